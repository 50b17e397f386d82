"""Layout of llama.cpp's quantized types: how many numbers share what, and the bytes of a block.

A number is `level(code) · s − m`. Groups of 16 or 32 numbers share s and m. In the types of 256 numbers (super-blocks)
these are small whole numbers times one fp16 number each, s = d · scale code and m = dmin · minimum code. In the types
of 32 numbers s and m are fp16 numbers themselves: here, d and dmin with codes of one.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h (`block_q4_K` and the others).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
class BlockType:
    """A quantized type of llama.cpp.

    Attributes:
        name: llama.cpp's, in lower case.
        numbers, nbytes: numbers in a block, and its size.
        group: numbers that share a scale.
        levels: the value of each code, ascending.
        scale_range: lowest and highest scale code.
        minimum_range: the same of minima; (0, 0) where a type has none.
        pack: bytes `[blocks, nbytes]` of blocks.
        together: numbers whose magnitudes are a point of a list (`lattices`); 1 where each has its own code.
        has_even_signs: whether of 8 numbers an even count is negative.
        units: where in a block's bytes d lies, and dmin: fp16 numbers that all of its numbers are multiples of.
    """

    name: NumberType
    numbers: int
    nbytes: int
    group: int
    levels: tuple[int, ...]
    scale_range: tuple[int, int]
    minimum_range: tuple[int, int]
    pack: Callable[[BlockParts], _Bytes]
    together: int = 1
    has_even_signs: bool = False
    units: tuple[int, ...] = (0,)

    def size(self, numbers: int) -> int:
        """Bytes that so many elements take in this type, whole blocks only."""
        return numbers // self.numbers * self.nbytes

    @property
    def has_minimum(self) -> bool:
        """Whether each group of a block stores a minimum that is subtracted, besides its scale (as in Q4_K)."""
        return self.minimum_range != (0, 0)

    @property
    def is_lattice(self) -> bool:
        """Whether several numbers have a code together."""
        return self.together > 1

    @property
    def magnitudes(self) -> tuple[int, ...]:
        """Levels above zero, ascending: of a lattice, those that the numbers of a point have before their signs."""
        return tuple(level for level in self.levels if level > 0)

    @property
    def scale_step(self) -> int:
        """Distance of neighboring scale codes: lattices have odd ones alone."""
        return 2 if self.is_lattice else 1

    @property
    def resolution(self) -> int:
        """Number of levels of a number by itself, or of the evenly spaced ones that lose about as much."""
        return {8: 4, 4: 8}.get(self.together, len(self.levels))

    @property
    def is_even(self) -> bool:
        """Whether the levels of codes are consecutive whole numbers, evenly spaced."""
        return self.levels[-1] - self.levels[0] == len(self.levels) - 1

    @property
    def is_symmetric(self) -> bool:
        """Whether there is every level with both signs, so that the sign of a scale makes no difference."""
        return self.levels[0] == -self.levels[-1]


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
    return BlockType(name, 256, nbytes, group, levels, (1, 31), _NONE, pack, together, has_even_signs)


def _even(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


_ONE, _NONE = (1, 1), (0, 0)
BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType("q2_k", 256, 84, 16, _even(0, 4), (0, 15), (0, 15), _q2_k, units=(80, 82)),
            BlockType("q3_k", 256, 110, 16, _even(-4, 8), (-32, 31), _NONE, _q3_k, units=(108,)),
            BlockType("q4_k", 256, 144, 32, _even(0, 16), (0, 63), (0, 63), _q4_k, units=(0, 2)),
            BlockType("q5_k", 256, 176, 32, _even(0, 32), (0, 63), (0, 63), _q5_k, units=(0, 2)),
            BlockType("q6_k", 256, 210, 16, _even(-32, 64), (-128, 127), _NONE, _q6_k, units=(208,)),
            BlockType("q8_0", 32, 34, 32, _even(-127, 255), _ONE, _NONE, _q8_0),
            BlockType("q5_1", 32, 24, 32, _even(0, 32), _ONE, _ONE, _q5_1, units=(0, 2)),
            BlockType("q5_0", 32, 22, 32, _even(-16, 32), _ONE, _NONE, _q5_0),
            BlockType("q4_1", 32, 20, 32, _even(0, 16), _ONE, _ONE, _q4_1, units=(0, 2)),
            BlockType("q4_0", 32, 18, 32, _even(-8, 16), _ONE, _NONE, _short),
            BlockType("iq4_nl", 32, 18, 32, IQ4_LEVELS, _ONE, _NONE, _short),
            BlockType("iq4_xs", 256, 136, 32, IQ4_LEVELS, (-32, 31), _NONE, _iq4_xs),
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
