"""More bits in the rows that count more."""

import copy
import gc

import pytest
import torch
from torch import Tensor

from moetool.compress.mixing.schemes import row_mixtures
from moetool.errors import InvalidInputError
from moetool.numerics.output_norm import ChannelNorm
from moetool.representations import Measured, parse_representation
from moetool.representations.mixed_rows import MixedRows, TrellisRows
from moetool.representations.quantized import Quantized

SHAPE = (64, 32)
FORM = MixedRows((4, 8, 0, 4), 16)


def matrix(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def weighted() -> Measured:
    inputs = torch.randn(100, SHAPE[1], generator=torch.Generator().manual_seed(1)).double()
    scale = torch.linspace(-1.5, 1.5, SHAPE[0])[torch.randperm(SHAPE[0], generator=torch.Generator().manual_seed(2))]
    return Measured(inputs.T @ inputs, norm=ChannelNorm(scale.exp())).with_feedback()


def lost(form: MixedRows | Quantized, measured: Measured) -> float:
    assert measured.feedback is not None
    assert measured.norm is not None
    found = form.decode(form.encode(matrix(), torch.bfloat16, measured), SHAPE, torch.bfloat16)
    return float(measured.feedback.output_errors(matrix() - found) @ measured.norm.counts())


def test_rows_that_count_most_have_most_bits() -> None:
    measured = weighted()
    counts = FORM.counts(matrix(), measured)
    encoded = FORM.encode(matrix(), torch.float32, measured)
    order = FORM.order(encoded["row_bits"], SHAPE[0])
    bits = [0 if part.form is None else part.form.bits for part in FORM.row_parts(SHAPE) for _ in range(part.rows)]
    assert bits == [0] * 16 + [1] * 32 + [3] * 16
    assert counts[order[:16]].max() < counts[order[16:48]].min() < counts[order[16:48]].max() < counts[order[48:]].min()


def test_each_part_is_what_its_form_makes_of_these_rows() -> None:
    measured = weighted()
    encoded = FORM.encode(matrix(), torch.bfloat16, measured)
    found, order = FORM.decode(encoded, SHAPE, torch.bfloat16), FORM.order(encoded["row_bits"], SHAPE[0])
    assert not found[order[:16]].any()
    for part in FORM.coded(SHAPE):
        rows = order[part.first : part.last]
        alone = part.form.encode(matrix()[rows], torch.bfloat16, measured)
        assert found[rows].equal(part.form.decode(alone, (part.rows, SHAPE[1]), torch.bfloat16))


def test_loses_less_than_as_many_bits_for_all_rows() -> None:
    measured, same = weighted(), MixedRows((3, 10, 3), 16)
    assert same.mean_bits == 1
    assert lost(same, measured) < 0.8 * lost(Quantized(1, 16), measured)


@pytest.mark.parametrize("rows", [20, 24, 30, 100, 129, 1000])
def test_parts_have_all_rows(rows: int) -> None:
    for form in (FORM, MixedRows((0, 1, 15), 8), MixedRows((8, 8), 0), MixedRows((0, 15, 1), 0)):
        parts = form.row_parts((rows, 16))
        assert [part.first for part in parts[1:]] == [part.last for part in parts[:-1]]
        assert (parts[0].first, parts[-1].last) == (0, rows)
        assert all(part.rows for part in parts)
        assert parts[-1].form is not None


def test_too_few_rows_for_any_bits() -> None:
    with pytest.raises(ValueError, match="8 rows"):
        MixedRows((15, 1), 0).tensors((8, 16))


def test_damage_is_seen() -> None:
    encoded = FORM.encode(matrix(), torch.float32)
    assert FORM.damage(encoded, SHAPE) is None
    other = MixedRows((8, 4, 0, 4), 16).encode(matrix(), torch.float32)
    damage = FORM.damage(encoded | {"row_bits": other["row_bits"]}, SHAPE)
    assert damage is not None
    assert FORM.spec in damage


@pytest.mark.parametrize("shares", ["8.9", "16", "0.16", "4.4.4.3.1", "8.8.0", "8.0.0.0.0.0.0.8", "x.8", "8.-8.16", ""])
def test_shares_that_cannot_be(shares: str) -> None:
    with pytest.raises(InvalidInputError, match="quantised-rows"):
        parse_representation(f"quantised-rows:{shares}:16")


def test_scales_get_gradients_and_loading_moves_rows() -> None:
    encoded, inputs = FORM.encode(matrix(), torch.float32), torch.randn(3, SHAPE[1])
    weight = FORM.build(SHAPE, torch.float32, torch.device("cpu"))
    weight.load_state_dict(encoded)
    weight(inputs).square().sum().backward()
    assert weight.scales.grad is not None
    assert weight.scales.grad.abs().sum(1).all()
    before = weight.dense()
    other = FORM.encode(matrix(5), torch.float32)
    weight.load_state_dict(other)
    assert weight.dense().equal(FORM.decode(other, SHAPE, torch.float32))
    assert not weight.dense().equal(before)


def test_a_product_holds_nothing_afterwards() -> None:
    """What is replaced, as offloading does, goes; and a model in training can be copied."""
    weight = FORM.build(SHAPE, torch.float32, torch.device("cpu"))
    weight.load_state_dict(FORM.encode(matrix(), torch.float32))
    weight(torch.randn(3, SHAPE[1])).sum()
    copied = copy.deepcopy(weight)
    assert copied.dense().equal(weight.dense())
    address = weight.codes.untyped_storage().data_ptr()
    weight.codes = torch.zeros_like(weight.codes)
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    assert not any(each.untyped_storage().data_ptr() == address for each in tensors)


def test_mixtures_on_offer() -> None:
    found = row_mixtures([1, 2, 3, 8], 16, (256, 32), trellis=False)
    means = [form.mean_bits for form in found]
    assert len(set(found)) == len(found) > 8
    assert min(means) <= 0.5
    assert max(means) >= 2.5
    assert {type(form) for form in row_mixtures([1, 2], 16, (256, 32), trellis=True)} == {TrellisRows}
    assert {type(form) for form in row_mixtures([1, 2], 16, (250, 32), trellis=True)} == {MixedRows}
    assert row_mixtures([1, 2], 16, (64, 32), trellis=False) == []
    assert row_mixtures([8], 16, (256, 32), trellis=False) == []
