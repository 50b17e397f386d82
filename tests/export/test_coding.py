"""Matrices in llama.cpp's blocks: nearest codes, and codes that lose least at the output."""

import pytest
import torch
from torch import Tensor

from moetool.export.gguf.blocked import Blocked, first_scales, with_scales
from moetool.export.gguf.coding import block_codes
from moetool.export.gguf.descent import Descent
from moetool.format.gguf_blocks import BLOCK_TYPES, BlockType
from moetool.numerics.error_feedback import Feedback

ROWS, COLUMNS = 24, 512
# Relative squared error of the nearest codes for normal weights, with some room: what a uniform grid of as many levels
# in groups of as many numbers can do.
NEAREST = {
    "q2_k": 0.09, "q3_k": 0.03, "q4_k": 8e-3, "q5_k": 2e-3, "q6_k": 5e-4, "q8_0": 5e-5, "q5_1": 2e-3, "q5_0": 2e-3,
    "iq3_s": 0.03, "iq3_xxs": 0.04, "iq2_s": 0.08, "iq2_xs": 0.1, "iq2_xxs": 0.13,
    "q4_1": 8e-3, "q4_0": 9e-3, "iq4_nl": 8e-3, "iq4_xs": 8e-3,
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=BLOCK_TYPES)


@pytest.fixture(scope="module")
def matrix() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS) * 0.02


@pytest.fixture(scope="module")
def gram() -> Tensor:
    """Of inputs that tell much of each other."""
    torch.manual_seed(1)
    inputs = torch.randn(2000, 128) @ torch.randn(128, COLUMNS) + 4 * torch.randn(2000, COLUMNS)
    return inputs.T @ inputs


def lost(matrix: Tensor, blocked: Blocked, gram: Tensor) -> float:
    error = matrix.double() - blocked.decoded().T.double()
    return float((error @ gram.double() * error).sum())


@KINDS
def test_nearest_codes_are_about_as_good_as_their_number_of_levels(kind: BlockType, matrix: Tensor) -> None:
    error = block_codes(matrix, kind).decoded().T - matrix
    assert float(error.square().sum() / matrix.square().sum()) < NEAREST[kind.name]


@KINDS
def test_on_inputs_codes_lose_a_third_at_the_most(kind: BlockType, matrix: Tensor, gram: Tensor) -> None:
    chosen = block_codes(matrix, kind, Feedback.of(gram))
    assert lost(matrix, chosen, gram) < lost(matrix, block_codes(matrix, kind), gram) / 3


@KINDS
def test_the_library_decodes_what_was_meant(kind: BlockType, matrix: Tensor, gram: Tensor) -> None:
    gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")
    chosen = block_codes(matrix, kind, Feedback.of(gram))
    found = gguf.quants.dequantize(chosen.tobytes().numpy(), gguf.GGMLQuantizationType[kind.name.upper()])
    assert torch.equal(torch.from_numpy(found), chosen.decoded().T)


@KINDS
def test_a_sweep_never_makes_a_row_worse(kind: BlockType, matrix: Tensor, gram: Tensor) -> None:
    inputs = matrix.T.contiguous()
    blocked = with_scales(inputs, kind, *first_scales(inputs, kind, gram.diagonal()))
    descent = Descent(inputs, blocked, gram / gram.diagonal().mean())
    before = descent.lost()
    for _ in range(2):
        descent.sweep()
        after = descent.lost()
        assert bool((after <= before * (1 + 1e-4)).all())
        before = after
    error = inputs - blocked.decoded()
    torch.testing.assert_close((error * (descent.gram @ error)).sum(0), after, rtol=1e-3, atol=0)


@KINDS
def test_zeros_stay_zeros(kind: BlockType, gram: Tensor) -> None:
    zeros = torch.zeros(3, COLUMNS)
    for feedback in (None, Feedback.of(gram)):
        assert torch.equal(block_codes(zeros, kind, feedback).decoded(), zeros.T)


def test_inputs_that_were_never_given_do_no_harm(matrix: Tensor, gram: Tensor) -> None:
    """A channel without energy has codes as good as the nearest, to some rounding of the scale they share."""
    gram = gram.clone()
    gram[::4], gram[:, ::4] = 0, 0
    kind = BLOCK_TYPES["q4_k"]
    error = block_codes(matrix, kind, Feedback.of(gram)).decoded().T - matrix
    assert float(error.isfinite().all())
    assert float(error.norm() / matrix.norm()) < 0.5
