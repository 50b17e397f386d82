"""Stored tensors that gradients move."""

import pytest
import torch
from draws import normal

from moetool.numerics.quantization import BITS
from moetool.representations import Representation, parse_representation, representations
from moetool.representations.quantized import Quantized
from moetool.representations.trainable import Pace

SHAPE = (24, 32)
SPECS = [spec for kind in representations().values() for spec in kind.examples]
every_example = pytest.mark.parametrize("form", [parse_representation(spec) for spec in SPECS], ids=SPECS)
STILL = Pace(codes=0, scales=0)


@every_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_begins_as_stored(form: Representation, dtype: torch.dtype) -> None:
    """Nothing that has not moved is stored differently, whether the matrix behind it is known or not."""
    own = form.encode(normal(*SHAPE), dtype)
    for known in (None, normal(*SHAPE), normal(*SHAPE, seed=5)):
        moving = form.trainable(own, SHAPE, known)
        if moving is None:
            continue
        torch.testing.assert_close(moving.dense(), form.decode(own, SHAPE, torch.float32), rtol=0, atol=0)
        moving.step(normal(*SHAPE, seed=1), STILL)
        again = moving.tensors()
        assert again.keys() == own.keys()
        assert all(again[name].equal(own[name]) for name in own)


def test_codes_and_factors_can_move() -> None:
    own = Quantized(2, 8).encode(normal(*SHAPE), torch.float32)
    assert Quantized(2, 8).trainable(own, SHAPE) is not None


@every_example
def test_what_is_stored_is_what_moved(form: Representation) -> None:
    """After steps, `dense` is what the stored tensors stand for, nothing in them is damaged, and they come nearer."""
    dtype, goal = torch.bfloat16, normal(*SHAPE)
    own = form.encode(goal + 0.3 * normal(*SHAPE, seed=3), dtype)
    moving = form.trainable(own, SHAPE, goal)
    if moving is None:
        return
    before = (moving.dense() - goal).square().sum()
    for step in range(40):
        moving.step(moving.dense() - goal, Pace(0.05 * (1 - step / 40), 0.01 * (1 - step / 40)))
    stored = moving.tensors()
    decoded = form.decode(stored, SHAPE, dtype)
    torch.testing.assert_close(moving.dense(), decoded, rtol=1e-6, atol=1e-6)
    assert form.damage(stored, SHAPE) is None
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in own.items()
    }
    if not isinstance(form, Quantized) or form.bits > 1:  # of two levels both are about as far from most
        assert (decoded - goal).square().sum() < 0.97 * before


@pytest.mark.parametrize("bits", BITS)
def test_codes_stay_in_range(bits: int) -> None:
    form = Quantized(bits, 8)
    moving = form.trainable(form.encode(normal(*SHAPE), torch.float32), SHAPE)
    for sign in (1.0, -1.0):
        for _ in range(20):  # until the mean of gradients has turned
            moving.dense()
            moving.step(torch.full(SHAPE, sign), Pace(300.0, 0.0))
        decoded = form.decode(moving.tensors(), SHAPE, torch.float32)
        extreme = moving.dense().abs()
        torch.testing.assert_close(decoded.abs(), extreme)
        assert bool((decoded * sign <= 0).all())
        assert form.damage(moving.tensors(), SHAPE) is None
