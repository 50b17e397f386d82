"""Matrices in blocks, llama.cpp's and groups on even grids: nearest codes, and codes that lose least at the output."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moetool.compiled import compiler
from moetool.export.blocks.blocked import Blocked, first_scales, nearest_blocks
from moetool.export.blocks.coding import block_codes
from moetool.export.blocks.descent import Descent
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.gguf.packing import packed
from moetool.format.blocks import AffineCodes, BlockLayout, symmetric
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType

ROWS, COLUMNS = 24, 512
# Relative squared error of the nearest codes for normal weights, with some room: what a uniform grid of as many levels
# in groups of as many numbers can do.
NEAREST = {
    "q2_k": 0.09, "q3_k": 0.03, "q4_k": 8e-3, "q5_k": 2e-3, "q6_k": 5e-4, "q8_0": 5e-5, "q5_1": 2e-3, "q5_0": 2e-3,
    "iq3_s": 0.03, "iq3_xxs": 0.04, "iq2_s": 0.08, "iq2_xs": 0.1, "iq2_xxs": 0.13,
    "q4_1": 8e-3, "q4_0": 9e-3, "iq4_nl": 8e-3, "iq4_xs": 8e-3,
}  # fmt: skip
EVEN = {2: 0.13, 3: 0.04, 4: 9e-3, 8: 5e-5}
LAYOUTS: list[BlockLayout] = [
    *BLOCK_TYPES.values(),
    *(make(bits, 64, torch.bfloat16) for make in (AffineCodes.of, symmetric) for bits in EVEN),
    AffineCodes.of(4, 8, torch.float32),
    symmetric(3, 512, torch.float32),  # more numbers than compiled code takes
]
NEAREST |= {name: most for bits, most in EVEN.items() for name in (f"{bits}-bit", f"symmetric {bits}")}
KINDS = pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: f"{kind.name} {kind.group}")
STORED = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=BLOCK_TYPES)


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
def test_nearest_codes_are_about_as_good_as_their_number_of_levels(kind: BlockLayout, matrix: Tensor) -> None:
    error = block_codes(matrix, kind).decoded().T - matrix
    assert float(error.square().sum() / matrix.square().sum()) < NEAREST[kind.name]


@KINDS
def test_on_inputs_codes_lose_a_third_at_the_most(kind: BlockLayout, matrix: Tensor, gram: Tensor) -> None:
    chosen = block_codes(matrix, kind, PreparedGram.of(gram))
    assert lost(matrix, chosen, gram) < lost(matrix, block_codes(matrix, kind), gram) / 3


@STORED
def test_the_library_decodes_what_was_meant(kind: BlockType, matrix: Tensor, gram: Tensor) -> None:
    gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")
    chosen = block_codes(matrix, kind, PreparedGram.of(gram))
    found = gguf.quants.dequantize(packed(chosen, kind).numpy(), gguf.GGMLQuantizationType[kind.name.upper()])
    assert torch.equal(torch.from_numpy(found), chosen.decoded().T)


@pytest.mark.parametrize("bits", EVEN)
def test_what_is_on_the_grid_stays(bits: int) -> None:
    """To the last bit, on the side that a group needs, with scales and minima that bf16 holds."""
    torch.manual_seed(3)
    levels = torch.arange(2**bits).repeat(2**8 // 2**bits * 2).view(1, 2, -1).float()
    scales = torch.tensor([[0.5, -0.75], [3.0, 0.25]])[..., None]
    for kind, matrix in (
        (AffineCodes.of(bits, 256, torch.bfloat16), levels * scales.abs() - 4),
        (symmetric(bits, 256, torch.bfloat16), (levels - 2 ** (bits - 1)) * scales),
    ):
        assert torch.equal(block_codes(matrix.flatten(1), kind).decoded().T, matrix.flatten(1))


@pytest.mark.parametrize("unit", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_and_minima_are_such_as_are_stored(unit: torch.dtype, matrix: Tensor, gram: Tensor) -> None:
    for given in (None, PreparedGram.of(gram)):
        chosen = block_codes(matrix, AffineCodes.of(3, 32, unit), given)
        for numbers in (chosen.d, chosen.dmin):
            assert torch.equal(numbers, numbers.to(unit).float())


@KINDS
def test_a_sweep_never_makes_a_row_worse(kind: BlockLayout, matrix: Tensor, gram: Tensor) -> None:
    inputs = matrix.T.contiguous()
    blocked = nearest_blocks(inputs, kind)
    descent = Descent(inputs, blocked, gram / gram.diagonal().mean())
    before = descent.lost()
    for _ in range(2):
        descent.sweep()
        after = descent.lost()
        assert bool((after <= before * (1 + 1e-4)).all())
        before = after
    error = inputs - blocked.decoded()
    torch.testing.assert_close((error * (descent.gram @ error)).sum(0), after, rtol=1e-3, atol=0)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What has everything after it computed in plain torch."""
    if problem := compiler.problem():
        pytest.skip(problem)
    return lambda: monkeypatch.setattr(compiler, "problem", lambda: "not here")


@KINDS
def test_compiled_and_plain_choose_as_well(
    kind: BlockLayout, matrix: Tensor, gram: Tensor, plain: Callable[[], None]
) -> None:
    """They add in another order, after which a code here and there is another one; most are the same."""
    given, inputs = PreparedGram.of(gram), matrix.T.contiguous()
    assert given is not None
    compiled, scales = block_codes(matrix, kind, given), first_scales(inputs, kind, given.gram.diagonal())
    plain()
    other = block_codes(matrix, kind, given)
    for own, expected in zip(scales, first_scales(inputs, kind, given.gram.diagonal()), strict=True):
        assert float(torch.isclose(own, expected, rtol=1e-3).float().mean()) > 0.99
    assert float((compiled.codes == other.codes).float().mean()) > (0.5 if len(kind.levels) > 100 else 0.8)
    assert lost(matrix, compiled, gram) == pytest.approx(lost(matrix, other, gram), rel=0.02)


@KINDS
def test_one_sweep_is_the_same_compiled_and_plain(
    kind: BlockLayout, matrix: Tensor, gram: Tensor, plain: Callable[[], None]
) -> None:
    inputs, gram = matrix.T.contiguous(), gram / gram.diagonal().mean()
    found = Descent(inputs, nearest_blocks(inputs, kind), gram)
    found.sweep()
    plain()
    other = Descent(inputs, nearest_blocks(inputs, kind), gram)
    other.sweep()
    torch.testing.assert_close(found.lost().sum(), other.lost().sum(), rtol=0.01, atol=0)


@pytest.mark.parametrize(("name", "columns"), [("q5_0", 96), ("q4_1", 288), ("iq4_nl", 544), ("q8_0", 32)])
def test_widths_that_super_blocks_do_not_divide(name: str, columns: int, plain: Callable[[], None]) -> None:
    torch.manual_seed(2)
    given, draw = torch.randn(300, columns), torch.randn(5, columns)
    draw[1] = 0
    draw[2, 32:] = 0
    draw[3] *= 1e-12  # below what the scales of blocks hold
    gram, kind = given.T @ given, BLOCK_TYPES[name]
    compiled = block_codes(draw, kind, PreparedGram.of(gram))
    assert bool(compiled.decoded().isfinite().all())
    assert not compiled.decoded()[:, 1].any()
    plain()
    assert lost(draw, compiled, gram) == pytest.approx(
        lost(draw, block_codes(draw, kind, PreparedGram.of(gram)), gram), rel=0.02
    )


def test_one_row_alone_is_coded_as_among_others(matrix: Tensor, gram: Tensor) -> None:
    given = PreparedGram.of(gram)
    for name in ("q4_k", "q5_0"):
        whole = block_codes(matrix, BLOCK_TYPES[name], given)
        assert torch.equal(block_codes(matrix[5:6], BLOCK_TYPES[name], given).codes[:, 0], whole.codes[:, 5])


@KINDS
def test_zeros_stay_zeros(kind: BlockLayout, gram: Tensor) -> None:
    zeros = torch.zeros(3, COLUMNS)
    for given in (None, PreparedGram.of(gram)):
        assert torch.equal(block_codes(zeros, kind, given).decoded(), zeros.T)


def test_inputs_that_were_never_given_do_no_harm(matrix: Tensor, gram: Tensor) -> None:
    """A channel without energy has codes as good as the nearest, to some rounding of the scale they share."""
    gram = gram.clone()
    gram[::4], gram[:, ::4] = 0, 0
    kind = BLOCK_TYPES["q4_k"]
    error = block_codes(matrix, kind, PreparedGram.of(gram)).decoded().T - matrix
    assert float(error.isfinite().all())
    assert float(error.norm() / matrix.norm()) < 0.5
