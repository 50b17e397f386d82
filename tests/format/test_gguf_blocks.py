"""Blocks of llama.cpp's types, read by the library `gguf`."""

import numpy as np
import pytest

from moetool.format.gguf.blocks import BLOCK_TYPES, WITHOUT_SUPER_BLOCKS, BlockType
from moetool.format.gguf.lattices import lattice_points
from moetool.format.gguf.parts import BlockParts

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")
BLOCKS = 5


def parts_of(kind: BlockType) -> BlockParts:
    """Random blocks with everything that a type can say."""
    random, groups = np.random.default_rng(0), kind.numbers // kind.group
    limits = kind.scale_range, kind.minimum_range
    scales, minima = (random.integers(low, high + 1, (BLOCKS, groups)).astype(np.int16) for low, high in limits)
    d, dmin = random.standard_normal((2, BLOCKS)).astype(np.float16)
    codes = random.integers(0, len(kind.levels), (BLOCKS, kind.numbers)).astype(np.uint8)
    if kind.is_lattice:
        points, count = lattice_points(kind.name), len(kind.magnitudes)
        sizes = points[random.integers(0, len(points), (BLOCKS, kind.numbers // kind.together))].reshape(BLOCKS, -1, 8)
        is_negative = random.integers(0, 2, sizes.shape) == 1
        if kind.has_even_signs:
            is_negative[..., 7] = is_negative[..., :7].sum(-1) % 2 == 1
        codes = np.where(is_negative, count - 1 - sizes, count + sizes).astype(np.uint8).reshape(BLOCKS, -1)
        scales |= 1
    return BlockParts(codes, scales, minima, d, dmin)


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
def test_the_library_reads_the_numbers_that_were_packed(kind: BlockType) -> None:
    parts, number = parts_of(kind), gguf.GGMLQuantizationType[kind.name.upper()]
    scales = parts.d[:, None].astype(np.float32) * parts.scales
    minima = parts.dmin[:, None].astype(np.float32) * parts.minima
    levels = np.array(kind.levels, np.float32)[parts.codes]
    expected = np.repeat(scales, kind.group, 1) * levels - np.repeat(minima, kind.group, 1)
    assert np.array_equal(gguf.quants.dequantize(kind.pack(parts), number), expected.astype(np.float32))
    assert gguf.GGML_QUANT_SIZES[number] == (kind.numbers, kind.nbytes)


def test_every_type_of_super_blocks_has_one_of_32_in_its_place() -> None:
    wide = {kind.name for kind in BLOCK_TYPES.values() if kind.numbers == 256}
    assert wide == set(WITHOUT_SUPER_BLOCKS)
    assert all(BLOCK_TYPES[number].numbers == 32 for number in WITHOUT_SUPER_BLOCKS.values())
