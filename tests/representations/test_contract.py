"""What every representation in the directory promises, taken from the files that are there."""

from collections.abc import Mapping

import pytest
import torch
from draws import normal
from torch import Tensor

from moetool.numerics.output_norm import ChannelNorm
from moetool.representations import (
    NOTHING,
    Measured,
    Representation,
    Stored,
    Weight,
    describe,
    parse_representation,
    representations,
)

SHAPE = (24, 32)
CPU = torch.device("cpu")
SPECS = [spec for kind in representations().values() for spec in kind.examples]
every_example = pytest.mark.parametrize("form", [parse_representation(spec) for spec in SPECS], ids=SPECS)


def measured() -> Measured:
    inputs = normal(40, SHAPE[1], seed=1).double()
    return Measured(gram=inputs.T @ inputs, norm=ChannelNorm(normal(SHAPE[0], seed=2).abs() + 0.1))


def loaded(form: Representation, encoded: dict[str, Tensor], dtype: torch.dtype) -> Weight:
    weight = form.build(SHAPE, dtype, CPU)
    weight.load_state_dict({name: encoded[name] for name in form.tensors(SHAPE)}, assign=True)
    weight.share(encoded)
    return weight


def seen(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def promised(tensors: Mapping[str, Stored], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (stored.shape, stored.dtype or dtype) for name, stored in tensors.items()}


@pytest.mark.parametrize("kind", sorted(representations()))
def test_every_kind_says_what_it_is(kind: str) -> None:
    form = representations()[kind]
    assert form.examples
    assert {parse_representation(spec).kind for spec in form.examples} == {kind}
    assert all(isinstance(answer, bool) for answer in (form.uses_base, form.is_cheap, form.is_whole, form.is_plain))
    assert not (form.is_whole and form.uses_base)


@every_example
def test_spec_round_trip(form: Representation) -> None:
    again = parse_representation(form.spec)
    assert (again, again.spec) == (form, form.spec)
    assert form.fitted(SHAPE).tensors(SHAPE) == form.tensors(SHAPE)


@every_example
@pytest.mark.parametrize("known", [NOTHING, measured()], ids=["plain", "measured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoded_as_promised(form: Representation, known: Measured, dtype: torch.dtype) -> None:
    """Names, shapes, dtypes and bytes are those of the headers; decoding them is what the run-time form computes."""
    encoded = form.encode(normal(*SHAPE), dtype, known)
    assert seen(encoded) == promised(form.tensors(SHAPE) | form.shared_tensors(SHAPE), dtype)
    assert seen(form.build(SHAPE, dtype, CPU).state_dict()) == promised(form.tensors(SHAPE), dtype)
    own = {name: encoded[name] for name in form.tensors(SHAPE)}
    assert sum(tensor.nbytes for tensor in own.values()) == form.nbytes(SHAPE, dtype)
    assert form.damage(encoded, SHAPE) is None
    decoded = form.decode(encoded, SHAPE, dtype)
    assert decoded.shape == SHAPE
    weight = loaded(form, encoded, dtype)
    with torch.no_grad():
        assert weight.dense().equal(decoded)
        assert weight.state_dict().keys() == own.keys()
        again = form.build(SHAPE, dtype, CPU)
        again.load_state_dict(weight.state_dict())
        again.share(encoded)
        assert again.dense().equal(decoded)
        wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in encoded.items()}
        inputs = normal(5, SHAPE[1], seed=3)
        expected = inputs @ form.decode(wide, SHAPE, torch.float32).T
        torch.testing.assert_close(loaded(form, wide, torch.float32)(inputs), expected, rtol=1e-4, atol=1e-4)


@every_example
def test_no_worse_than_nothing(form: Representation) -> None:
    """What is stored resembles the matrix; what promises to be it, is it."""
    original = normal(*SHAPE)
    decoded = form.decode(form.encode(original, torch.float32), SHAPE, torch.float32)
    if form.is_whole:
        assert decoded.equal(original)
    elif form.counted_parameters(SHAPE):
        assert float((decoded * original).sum()) > 0


@every_example
def test_factors_are_all_there_is(form: Representation) -> None:
    encoded = form.encode(normal(*SHAPE), torch.float32)
    if form.factors is not None:
        u, v = (encoded[name] for name in form.factors)
        assert set(form.factors) == encoded.keys()
        assert u.shape[1] == v.shape[0] == form.directions
        torch.testing.assert_close(u @ v, form.decode(encoded, SHAPE, torch.float32))


@every_example
def test_all_experts_at_once(form: Representation) -> None:
    """Every expert's own tensors and the shared ones decode to something like its matrix."""
    common = normal(SHAPE[0], 1) @ normal(1, SHAPE[1], seed=1)
    matrices = [(1 + expert) * common for expert in range(3)]
    shared, own = form.encode_jointly(matrices, torch.float32)
    assert shared.keys() == form.shared_tensors(SHAPE).keys()
    assert [tensors.keys() for tensors in own] == [form.tensors(SHAPE).keys()] * 3
    for tensors, original in zip(own, matrices, strict=True):
        decoded = form.decode(shared | tensors, SHAPE, torch.float32)
        if shared:
            torch.testing.assert_close(decoded, original, rtol=1e-4, atol=1e-4)
        else:
            assert decoded.equal(form.decode(form.encode(original, torch.float32), SHAPE, torch.float32))


@every_example
def test_only_what_is_plain_can_be_quantized(form: Representation) -> None:
    if not form.is_plain:
        with pytest.raises(ValueError, match=f"'{form.spec}' cannot be quantized"):
            form.quantized(4, 8)
        return
    codes = form.quantized(4, 8)
    assert codes.uses_base
    assert codes.nbytes(SHAPE, torch.float32) <= form.nbytes(SHAPE, torch.float32)
    assert codes.directions == form.directions


@every_example
def test_is_described_with_its_number(form: Representation) -> None:
    """Seven of a kind are one part, and beside another kind they still are."""
    alone = describe([form] * 7)
    assert alone.count(";") == 0
    assert "7 ×" in alone or alone.startswith("rank ")
    assert alone in describe([form] * 7 + [parse_representation(SPECS[0])]) or form.kind == SPECS[0].partition(":")[0]


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        (["low-rank:12", "dense", "low-rank:96"], "rank 12 … 96, mean 54; 1 × dense"),
        (["low-rank:0", "low-rank:0"], "2 × base alone"),
        (["low-rank:3", "low-rank:0"], "rank 3; 1 × base alone"),
        (["quantised-low-rank:23:3:row", "quantised:2:8", "quantised-low-rank:5:3:8", "quantised:8:8"],
         "1 × 8 bits; 1 × 2 bits; 2 × rank 5 … 23 in 3 bits"),
        (["quantised-low-rank:5:3:8", "quantised-low-rank:5:2:8"], "1 × rank 5 in 2 bits; 1 × rank 5 in 3 bits"),
        (["sparse:0.9:1", "sparse:0.9:2"], "2 × sparse:0.9"),
        (["low-rank-sparse:2:sparse:0.9:1", "low-rank-sparse:2:sparse:0.9:2"], "2 × low-rank-sparse:2:sparse:0.9"),
        (["low-rank-sparse:3:sparse-magnitude:0.1"], "1 × low-rank-sparse:3:sparse-magnitude:0.1"),
        (["nf4", "quantised-weight:4:row", "shared-v:3"], "1 × shared-v:3; 1 × nf4; 1 × quantised-weight:4:row"),
        ([], ""),
    ],
)  # fmt: skip
def test_descriptions(specs: list[str], said: str) -> None:
    assert describe(map(parse_representation, specs)) == said
