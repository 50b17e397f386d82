"""How much of a matrix rounding may take before a file counts as wrong."""

import pytest
import torch

from moetool.export.blocks.coding import block_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.gguf.proof import is_rounding
from moetool.format.gguf.blocks import BLOCK_TYPES, NumberType


@pytest.mark.parametrize("spread", [1, 3, 6])
@pytest.mark.parametrize("number", ["iq2_xxs", "iq3_s", "iq4_xs", "q4_k", "q6_k", "q8_0"])
def test_chosen_codes_may_go_far_but_rows_keep_their_order(number: NumberType, spread: int) -> None:
    """Where inputs tell of each other and few carry nearly everything, as in SmolLM2, whose 4-bit codes took .52."""
    stream = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -spread, 256)[torch.randperm(256, generator=stream)]
    inputs = (torch.randn(512, 256, generator=stream) @ torch.randn(256, 256, generator=stream)) * scales
    matrix = torch.randn(64, 256, generator=stream)
    kind, given = BLOCK_TYPES[number], PreparedGram.of(inputs.T @ inputs)
    nearest, chosen = (block_codes(matrix, kind, own).decoded().T for own in (None, given))
    assert is_rounding(nearest, matrix, {number}, chosen=False)
    assert is_rounding(chosen, matrix, {number}, chosen=True)
    for wrong in (chosen.flip(0), chosen.flip(1), 3 * chosen, -chosen, torch.zeros_like(chosen)):
        assert not is_rounding(wrong, matrix, {number}, chosen=True)
    assert not is_rounding(nearest.flip(0), matrix, {number}, chosen=False)


def test_numbers_that_are_none_are_no_rounding() -> None:
    matrix = torch.ones(4, 256)
    assert not is_rounding(matrix / 0, matrix, {"q4_k"}, chosen=True)
    assert not is_rounding(matrix * float("nan"), matrix, {"q4_k"}, chosen=True)
