"""bitsandbytes' formats: its numbers, with and without it."""

import itertools

import pytest
import torch

from moetool.representations import parse_representation
from moetool.representations.bitsandbytes_formats import NF4, NF4_LEVELS, Int8

SHAPES = [(4, 128), (31, 33), (7, 5), (16, 64)]


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_numbers_that_bitsandbytes_gives() -> None:
    """Taken from `quantize_4bit` and `int8_vectorwise_quant` of bitsandbytes 0.50.2 on `matrix((4, 96))`."""
    nf4 = NF4().encode(matrix((4, 96)), torch.bfloat16)
    assert nf4["codes"][:12].tolist() == [68, 102, 169, 97, 131, 136, 123, 182, 50, 154, 147, 109]
    expected = torch.tensor([3.4105, 2.6133, 1.9507, 1.9029, 2.0655, 3.9300])
    torch.testing.assert_close(nf4["absmax"], expected, rtol=0, atol=5e-5)
    int8 = Int8().encode(matrix((4, 96)).half(), torch.bfloat16)
    assert int8["codes"][0, :8].tolist() == [-42, -43, -9, -16, 32, 26, -12, -79]
    torch.testing.assert_close(int8["absmax"], torch.tensor([3.4102, 2.6133, 2.0664, 3.9297]), rtol=0, atol=5e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_bit_by_bit_against_bitsandbytes(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(matrix(shape), blocksize=64, quant_type="nf4")
    own = NF4().encode(matrix(shape), torch.bfloat16)
    assert own["codes"].equal(codes.flatten())
    assert own["absmax"].equal(state.absmax)
    codes, absmax, _ = functional.int8_vectorwise_quant(matrix(shape).half())
    own = Int8().encode(matrix(shape).half(), torch.bfloat16)
    assert own["codes"].equal(codes)
    assert own["absmax"].equal(absmax)


@pytest.mark.parametrize("form", [NF4(), Int8()])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_stored_is_what_is_read(form: NF4 | Int8, shape: tuple[int, int]) -> None:
    stored = form.encode(matrix(shape), torch.bfloat16)
    planned = form.tensors(shape)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        name: (entry.shape, entry.dtype) for name, entry in planned.items()
    }
    numbers = shape[0] * shape[1]
    expected = numbers + 4 * shape[0] if isinstance(form, Int8) else -(-numbers // 2) + 4 * -(-numbers // 64)
    assert form.nbytes(shape, torch.bfloat16) == expected
    decoded = form.decode(stored, shape, torch.bfloat16)
    error = (decoded - matrix(shape)).abs()
    # Half the widest step of the grid, of the largest number that shares the scale.
    largest = max(b - a for a, b in itertools.pairwise(NF4_LEVELS)) / 2
    assert error.max() <= (1 / 254 if isinstance(form, Int8) else largest) * matrix(shape).abs().max() * 1.001
    assert parse_representation(form.spec) == form


@pytest.mark.parametrize("form", [NF4(), Int8()])
def test_what_survives_unharmed(form: NF4 | Int8) -> None:
    """Zeros, and the number that sets the scale."""
    values = torch.zeros(2, 64)
    values[1, 3] = -2.5
    assert form.decode(form.encode(values, torch.bfloat16), (2, 64), torch.bfloat16).equal(values)


@pytest.mark.parametrize("form", [NF4(), Int8()])
def test_a_product_is_that_of_the_matrix(form: NF4 | Int8) -> None:
    weight = form.build((16, 64), torch.bfloat16, torch.device("cpu"))
    weight.load_state_dict(form.encode(matrix((16, 64)), torch.bfloat16))
    assert not list(weight.parameters())
    inputs = torch.randn(3, 64)
    torch.testing.assert_close(weight(inputs), inputs @ weight.dense().T)
    assert weight.to(torch.bfloat16)(inputs.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("form", [NF4(), Int8()])
def test_scales_stay_what_they_were(form: NF4 | Int8) -> None:
    weight = form.build((16, 64), torch.bfloat16, torch.device("cpu"))
    stored = form.encode(matrix((16, 64)), torch.bfloat16)
    weight.load_state_dict(stored)
    assert all(weight.half().state_dict()[name].equal(tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("form", [NF4(), Int8()])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(form: NF4 | Int8, value: float) -> None:
    values = matrix((4, 64))
    values[2, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        form.encode(values, torch.bfloat16)
