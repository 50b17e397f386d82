"""Blocks of llama.cpp's types, multiplied."""

import numpy as np
import pytest

from moetool.export.gguf.rescaling import scaled_blocks
from moetool.format.gguf.blocks import BLOCK_TYPES

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_all_numbers_of_a_block_are_multiplied(name: str) -> None:
    kind, stream = BLOCK_TYPES[name], np.random.default_rng(0)
    blocks = stream.integers(0, 256, (64, kind.nbytes), dtype=np.uint8)
    for start in kind.units:  # d and dmin as files have them
        blocks[:, start : start + 2] = stream.uniform(0.01, 1, (64, 1)).astype("<f2").view(np.uint8)
    factors = np.exp2(stream.integers(-3, 3, 64)).astype(np.float32)  # exact in fp16
    number = gguf.GGMLQuantizationType[name.upper()]
    before, after = (
        gguf.quants.dequantize(own, number).reshape(64, kind.numbers)
        for own in (blocks, scaled_blocks(blocks, kind, factors))
    )
    assert np.abs(before).max() > 0
    np.testing.assert_allclose(after, factors[:, None] * before, rtol=1e-6)
