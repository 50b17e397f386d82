"""llama.cpp's quantized types: the layout of their blocks (`format.blocks`), and the bytes of these.

Groups of 16 or 32 numbers share a scale and, in some types, a minimum. A block of 256 numbers (a super-block) has codes
of these, one of 32 numbers a single group.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h (`block_q4_K` and the others).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moetool.format.blocks import NONE, ONE, SizedLayout, even_levels
from moetool.format.gguf.lattices import pack_iq2_s, pack_iq2_xs, pack_iq2_xxs, pack_iq3_s, pack_iq3_xxs
from moetool.format.gguf.parts import BlockParts

_Bytes = NDArray[np.uint8]
NumberType = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "iq4_xs", "iq4_nl",
    "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4",
]  # fmt: skip
MixtureName = Literal[
    "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "iq2_m", "iq3_xs", "iq3_m",
]  # fmt: skip
# Bits per weight of llama-quantize's mixtures of types, those of Llama 3.1 8B (llama.cpp, tools/quantize/README.md).
MIXTURES: Mapping[MixtureName, float] = MappingProxyType(
    {
        "q2_k_s": 2.97,
        "q3_k_s": 3.64,
        "q3_k_m": 4.0,
        "q3_k_l": 4.3,
        "q4_k_s": 4.67,
        "q4_k_m": 4.89,
        "q5_k_s": 5.57,
        "q5_k_m": 5.7,
        "iq2_m": 2.93,
        "iq3_xs": 3.5,
        "iq3_m": 3.76,
    }
)
StoredType = NumberType | Literal["i32"]  # of numbers that are no weights, too
MXFP4: NumberType = "mxfp4"  # whose codes are the nearest always
_TWO, _FOUR = np.uint8(2), np.uint8(4)
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockType(SizedLayout):
    """A quantized type of llama.cpp.

    Attributes:
        name: llama.cpp's, in lower case.
        nbytes: size of a block.
        pack: bytes `[blocks, nbytes]` of blocks.
        units: where in a block's bytes d lies, and dmin: fp16 numbers that all of its numbers are multiples of.
    """

    name: NumberType
    nbytes: int
    pack: Callable[[BlockParts], _Bytes]
    units: tuple[int, ...] = (0,)

    def size(self, numbers: int) -> int:
        return numbers // self.numbers * self.nbytes


def _halves(numbers: NDArray[np.float16]) -> _Bytes:
    """`[blocks, 2]`, the bytes of fp16 numbers."""
    return numbers.astype("<f2").view(np.uint8).reshape(len(numbers), 2)


def _planes(codes: _Bytes, bits: int, run: int) -> _Bytes:
    """Low `bits` of codes, those of `run` numbers side by side, those of the next runs in the bits above them."""
    planes = 8 // bits
    parts = (codes & (2**bits - 1)).reshape(len(codes), -1, planes, run)
    packed = np.zeros((len(codes), parts.shape[1], run), np.uint8)
    for plane in range(planes):
        packed |= parts[:, :, plane] << np.uint8(plane * bits)
    return packed.reshape(len(codes), -1)


def _six_bits(parts: BlockParts) -> _Bytes:
    """The twelve bytes of eight scales and eight minima of 6 bits."""
    scales, minima = parts.scales.astype(np.uint8), parts.minima.astype(np.uint8)
    first = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
    second = (minima[:, :4] & 63) | (minima[:, 4:] >> 4 << 6)
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], 1)


def _q2_k(parts: BlockParts) -> _Bytes:
    scales = (parts.scales | parts.minima << 4).astype(np.uint8)
    return np.concatenate([scales, _planes(parts.codes, 2, 32), _halves(parts.d), _halves(parts.dmin)], 1)


def _q3_k(parts: BlockParts) -> _Bytes:
    scales = (parts.scales + 32).astype(np.uint8)
    high = _planes(scales >> _FOUR, 2, 4)
    packed = np.concatenate([(scales[:, :8] & 15) | scales[:, 8:] << 4, high], 1)
    codes = _planes(parts.codes >> _TWO, 1, 32), _planes(parts.codes, 2, 32)
    return np.concatenate([*codes, packed, _halves(parts.d)], 1)


def _q4_k(parts: BlockParts) -> _Bytes:
    return np.concatenate([_halves(parts.d), _halves(parts.dmin), _six_bits(parts), _planes(parts.codes, 4, 32)], 1)


def _q5_k(parts: BlockParts) -> _Bytes:
    codes = _planes(parts.codes >> _FOUR, 1, 32), _planes(parts.codes, 4, 32)
    return np.concatenate([_halves(parts.d), _halves(parts.dmin), _six_bits(parts), *codes], 1)


def _q6_k(parts: BlockParts) -> _Bytes:
    codes = _planes(parts.codes, 4, 64), _planes(parts.codes >> _FOUR, 2, 32)
    return np.concatenate([*codes, parts.scales.astype(np.int8).view(np.uint8), _halves(parts.d)], 1)


def _q8_0(parts: BlockParts) -> _Bytes:
    return np.concatenate([_halves(parts.d), parts.codes - np.uint8(127)], 1)


def _short(parts: BlockParts) -> _Bytes:
    """4 bits, two runs of 16: q4_0 and iq4_nl."""
    return np.concatenate([_halves(parts.d), _planes(parts.codes, 4, 16)], 1)


def _q4_1(parts: BlockParts) -> _Bytes:
    return np.concatenate([_halves(parts.d), _halves(-parts.dmin), _planes(parts.codes, 4, 16)], 1)


def _fifth_bits(codes: _Bytes) -> _Bytes:
    return np.packbits(codes >> _FOUR, axis=1, bitorder="little")


def _q5_0(parts: BlockParts) -> _Bytes:
    return np.concatenate([_halves(parts.d), _fifth_bits(parts.codes), _planes(parts.codes, 4, 16)], 1)


def _q5_1(parts: BlockParts) -> _Bytes:
    units = _halves(parts.d), _halves(-parts.dmin)
    return np.concatenate([*units, _fifth_bits(parts.codes), _planes(parts.codes, 4, 16)], 1)


def _iq4_xs(parts: BlockParts) -> _Bytes:
    scales = (parts.scales + 32).astype(np.uint8)
    high, low = _planes(scales >> _FOUR, 2, 1), _planes(scales, 4, 1)
    return np.concatenate([_halves(parts.d), high, low, _planes(parts.codes, 4, 16)], 1)


def _lattice(
    name: NumberType, nbytes: int, group: int, magnitudes: tuple[int, ...], pack: Callable[[BlockParts], _Bytes]
) -> BlockType:
    levels = (*(-size for size in reversed(magnitudes)), *magnitudes)
    together, has_even_signs = 8 if len(magnitudes) == 3 else 4, not name.endswith("_s")
    return BlockType(
        name, 256, group, levels, (1, 31), NONE, nbytes, pack, together=together, has_even_signs=has_even_signs
    )


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType("q2_k", 256, 16, even_levels(0, 4), (0, 15), (0, 15), 84, _q2_k, units=(80, 82)),
            BlockType("q3_k", 256, 16, even_levels(-4, 8), (-32, 31), NONE, 110, _q3_k, units=(108,)),
            BlockType("q4_k", 256, 32, even_levels(0, 16), (0, 63), (0, 63), 144, _q4_k, units=(0, 2)),
            BlockType("q5_k", 256, 32, even_levels(0, 32), (0, 63), (0, 63), 176, _q5_k, units=(0, 2)),
            BlockType("q6_k", 256, 16, even_levels(-32, 64), (-128, 127), NONE, 210, _q6_k, units=(208,)),
            BlockType("q8_0", 32, 32, even_levels(-127, 255), ONE, NONE, 34, _q8_0),
            BlockType("q5_1", 32, 32, even_levels(0, 32), ONE, ONE, 24, _q5_1, units=(0, 2)),
            BlockType("q5_0", 32, 32, even_levels(-16, 32), ONE, NONE, 22, _q5_0),
            BlockType("q4_1", 32, 32, even_levels(0, 16), ONE, ONE, 20, _q4_1, units=(0, 2)),
            BlockType("q4_0", 32, 32, even_levels(-8, 16), ONE, NONE, 18, _short),
            BlockType("iq4_nl", 32, 32, IQ4_LEVELS, ONE, NONE, 18, _short),
            BlockType("iq4_xs", 256, 32, IQ4_LEVELS, (-32, 31), NONE, 136, _iq4_xs),
            _lattice("iq3_s", 110, 32, (1, 3, 5, 7, 9, 11, 13, 15), pack_iq3_s),
            _lattice("iq3_xxs", 98, 32, (4, 12, 20, 28, 36, 44, 52, 62), pack_iq3_xxs),
            _lattice("iq2_s", 82, 16, (8, 25, 43), pack_iq2_s),
            _lattice("iq2_xs", 74, 16, (8, 25, 43), pack_iq2_xs),
            _lattice("iq2_xxs", 66, 32, (8, 25, 43), pack_iq2_xxs),
        )
    }
)
# What a tensor gets whose rows are no whole super-blocks, as in llama.cpp (`llama_tensor_get_type`).
WITHOUT_SUPER_BLOCKS: Mapping[NumberType, NumberType] = MappingProxyType(
    {
        **dict.fromkeys(("q2_k", "q3_k", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs"), "iq4_nl"),
        "q4_k": "q5_0",
        "q5_k": "q5_1",
        "q6_k": "q8_0",
    }
)
