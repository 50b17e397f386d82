"""Sparse differences: unbiased with the variance of the closed form, exact bytes, no index where a seed will do."""

import pytest
import torch
from torch import Tensor

from moetool.errors import InvalidInputError
from moetool.representations import Measured, Representation, parse_representation
from moetool.representations.operand import by_positions, marked
from moetool.representations.sparse import MagnitudeSparse, ScatteredWeight, Sparse

CPU = torch.device("cpu")
SHAPE = (12, 20)
BOTH = [Sparse(0.9, 5), Sparse(0.2, 5), Sparse(0.0, 0), Sparse(0.999, 1), MagnitudeSparse(0.1), MagnitudeSparse(0.5)]


def delta(shape: tuple[int, int] = SHAPE, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loaded(representation: Representation, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64):
    weight = representation.build(SHAPE, dtype, CPU)
    weight.load_state_dict(tensors, assign=True)
    return weight


def test_specs_are_what_config_json_says() -> None:
    assert Sparse(0.9, 17).spec == "sparse:0.9:17"
    assert MagnitudeSparse(0.1).spec == "sparse-magnitude:0.1"
    extreme = Sparse(1e-05, (1 << 64) - 1)
    assert parse_representation(extreme.spec) == extreme


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("sparse", "takes two arguments"),
        ("sparse:0.9", "takes two arguments"),
        ("sparse:0.9:-1", "takes two arguments"),
        ("sparse:0.9:1:2", "takes two arguments"),
        ("sparse:x:1", "a drop rate is a number, not 'x'"),
        ("sparse:1:1", "between 0 and 1"),
        ("sparse:1.0:1", "between 0 and 1"),
        ("sparse:-0.1:1", "between 0 and 1"),
        ("sparse:nan:1", "between 0 and 1"),
        ("sparse:0.9:18446744073709551616", "below 2\\^64"),
        ("sparse-magnitude", "takes one argument"),
        ("sparse-magnitude:0", "between 0"),
        ("sparse-magnitude:1.1", "between 0"),
        ("sparse-magnitude:nan", "between 0"),
        ("sparse-magnitude:", "a kept share is a number"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        parse_representation(spec)


@pytest.mark.parametrize("drop", [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99])
def test_seeded_bytes_are_those_of_the_values(drop: float) -> None:
    """16 (1 - p) bits per element, rounded to whole elements: no index, no header."""
    shape = (256, 768)
    assert Sparse(drop, 1).nbytes(shape, torch.bfloat16) == 2 * round(256 * 768 * (1 - drop))


@pytest.mark.parametrize("kept", [0.01, 0.05, 0.1, 0.2, 0.5])
def test_magnitude_bytes(kept: float) -> None:
    shape = (256, 768)
    elements = 256 * 768
    stored = MagnitudeSparse(kept).nbytes(shape, torch.bfloat16) - 2 * round(elements * kept)
    assert stored <= elements / 8
    assert stored == elements / 8 if kept == 0.5 else stored <= round(elements * kept) * 1.08


def test_counts_are_exact_decimals() -> None:
    """0.29 of 100 is 29 although 1 - 0.71 is less than 0.29 in floating point."""
    assert Sparse(0.71, 0).count((10, 10)) == 29
    assert MagnitudeSparse(0.29).count((10, 10)) == 29
    assert Sparse(0.99, 0).count((2, 2)) == 1


@pytest.mark.parametrize("representation", BOTH)
def test_decoded_is_the_scaled_part(representation: Representation) -> None:
    matrix = delta()
    decoded = representation.decode(representation.encode(matrix, torch.float64), SHAPE, torch.float64)
    kept = decoded != 0
    count = representation.count(SHAPE)
    assert int(kept.sum()) == count
    factor = matrix.numel() / count if representation.kind == "sparse" else 1.0
    torch.testing.assert_close(decoded[kept], matrix[kept] * factor, rtol=1e-15, atol=0)


def test_magnitude_keeps_the_largest() -> None:
    matrix = delta()
    decoded = MagnitudeSparse(0.1).decode(MagnitudeSparse(0.1).encode(matrix, torch.float64), SHAPE, torch.float64)
    assert matrix[decoded != 0].abs().min() > matrix[decoded == 0].abs().max()


def test_magnitude_with_importance() -> None:
    matrix, importance = delta(), torch.linspace(0.1, 3, 20, dtype=torch.float64)
    tensors = MagnitudeSparse(0.1).encode(matrix, torch.float64, Measured(importance.diag()))
    kept = MagnitudeSparse(0.1).decode(tensors, SHAPE, torch.float64) != 0
    score = matrix.square() * importance
    assert score[kept].min() > score[~kept].max()
    with pytest.raises(ValueError, match="importance must be"):
        MagnitudeSparse(0.1).encode(matrix, torch.float64, Measured(importance[:3].diag()))


def test_ties_and_zeros_leave_exactly_k() -> None:
    for matrix in (torch.zeros(SHAPE), torch.ones(SHAPE)):
        tensors = MagnitudeSparse(0.1).encode(matrix, torch.float32)
        weight = loaded(MagnitudeSparse(0.1), tensors, torch.float32)
        assert weight.indices().tolist() == list(range(24))


@pytest.mark.parametrize("drop", [0.5, 0.9])
def test_unbiased_with_the_variance_of_the_closed_form(drop: float) -> None:
    """Over 2500 masks: mean v, variance v^2 p / (1 - p), for every element (Eq. 4)."""
    masks, matrix = 2_500, delta((6, 10))
    total, squares = torch.zeros_like(matrix), torch.zeros_like(matrix)
    for seed in range(masks):
        representation = Sparse(drop, seed)
        values = representation.encode(matrix, torch.float64)["values"]
        decoded = torch.zeros(60, dtype=torch.float64)
        decoded[representation.indices((6, 10)).long()] = values
        total += decoded.view(6, 10)
        squares += decoded.view(6, 10).square()
    variance = matrix.square() * drop / (1 - drop)
    mean = total / masks
    assert ((mean - matrix).abs() < 4.5 * (variance / masks).sqrt()).all()
    # A scaled Bernoulli variable's second moment v^2 / (1 - p) scatters by sqrt(p / (1 - p) / masks) of itself.
    second = squares / masks * (1 - drop) / matrix.square()
    assert ((second - 1).abs() < 4.5 * (drop / (1 - drop) / masks) ** 0.5).all()
    measured = (squares / masks - mean.square()) / variance
    assert abs(float(measured.mean()) - 1) < 0.02


def test_the_same_seed_is_the_same_mask_and_another_is_not() -> None:
    assert Sparse(0.9, 1).indices(SHAPE).equal(Sparse(0.9, 1).indices(SHAPE))
    assert not Sparse(0.9, 1).indices(SHAPE).equal(Sparse(0.9, 2).indices(SHAPE))
    assert Sparse(0.95, 1).indices((6, 10)).tolist() == [4, 18, 47]  # pinned: files rely on it


def test_derived_seeds_are_short_and_differ() -> None:
    seeds = {
        Sparse.derived(0.9, 0, layer, e, role).seed for layer in range(4) for e in range(8) for role in ("up", "down")
    }
    assert len(seeds) == 64
    assert max(seeds) < 1 << 32


@pytest.mark.parametrize("representation", BOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_forward_is_the_dense_product(representation: Representation, dtype: torch.dtype) -> None:
    weight = loaded(representation, representation.encode(delta(), dtype), dtype)
    inputs = delta((5, 20), seed=1).to(dtype)
    assert weight(inputs).dtype == dtype
    torch.testing.assert_close(weight(inputs), inputs @ weight.dense().to(dtype).T)
    assert weight.dense().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert weight(inputs[:0]).shape == (0, 12)


def test_loading_again_forgets_old_positions() -> None:
    representation = MagnitudeSparse(0.1)
    weight = loaded(representation, representation.encode(delta(seed=1), torch.float64))
    weight.dense()
    weight.load_state_dict(representation.encode(delta(seed=2), torch.float64))
    assert weight.dense().equal(loaded(representation, representation.encode(delta(seed=2), torch.float64)).dense())


@pytest.mark.parametrize("representation", BOTH)
def test_gradients_reach_the_values_and_nothing_else(representation: Representation) -> None:
    weight = loaded(representation, representation.encode(delta(), torch.float64))
    inputs = delta((5, 20), seed=1)
    with torch.inference_mode():
        weight(inputs)  # what is remembered from here must not stand in the way of training
    weight(inputs).square().sum().backward()
    assert [name for name, _ in weight.named_parameters()] == ["values"]
    full = weight.dense().detach().requires_grad_()
    (inputs @ full.T).square().sum().backward()
    torch.testing.assert_close(weight.values.grad, full.grad.view(-1)[weight.indices().long()])


def test_damaged_positions_are_noticed() -> None:
    tensors = MagnitudeSparse(0.1).encode(delta(), torch.float64)
    tensors["high"][0] ^= 255
    with pytest.raises(InvalidInputError, match="damaged"):
        MagnitudeSparse(0.1).decode(tensors, SHAPE, torch.float64)


@pytest.mark.parametrize("shape", [(5, 7), (3, 64), (9, 130)])
@pytest.mark.parametrize("kept", [0.05, 0.3, 1.0])
def test_bits_stand_for_positions(shape: tuple[int, int], kept: float) -> None:
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(1)).view(-1) < kept
    chosen[-1] = True
    positions = chosen.nonzero().view(-1).int()
    operand = marked(shape, torch.ones(len(positions)), positions)
    assert operand.scales is not None
    assert operand.scales.shape == (shape[0], 1 + -(-shape[1] // 64))
    again = by_positions(operand)
    assert again.scales is not None
    assert again.scales.equal(positions)


@pytest.mark.parametrize(("kept", "most"), [(0.5, 0.3), (0.2, 0.7), (0.02, 4.0)])
def test_few_bytes_are_kept_per_value_for_kernels(kept: float, most: float) -> None:
    """A bit per element, or 32 per value where that is less."""
    shape = 64, 4096
    weight = Sparse(1 - kept, 3).build(shape, torch.bfloat16, torch.device("cpu"))
    (chain,) = weight.products() or ()
    assert sum(tensor.nbytes for tensor in weight.derived()) <= most * len(chain[0].data)
    assert isinstance(weight, ScatteredWeight)
    assert (weight._indices is None) is (kept > 0.1)
