"""Layout of codes in blocks: how many numbers share what, and which levels there are.

A number is `level(code) · s − m`. Groups of numbers share s and m. Where a block has several groups, these are small
whole numbers times one number each of the block, s = d · scale code and m = dmin · minimum code. Where it has one, s
and m are d and dmin themselves, with codes of one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

ONE, NONE = (1, 1), (0, 0)  # ranges of scale codes and minima without a choice


@dataclass(frozen=True)
class BlockLayout:
    """A kind of blocks, whatever bytes store them.

    Attributes:
        name: what it is called.
        numbers: in a block.
        group: numbers that share a scale.
        levels: the value of each code, ascending.
        scale_range: lowest and highest scale code.
        minimum_range: the same of minima; (0, 0) where there are none.
        together: numbers whose magnitudes are a point of a list (`gguf.lattices`); 1 where each has its own code.
        has_even_signs: whether of 8 numbers an even count is negative.
        unit: dtype of d and dmin.
    """

    name: str
    numbers: int
    group: int
    levels: tuple[int, ...]
    scale_range: tuple[int, int]
    minimum_range: tuple[int, int]
    together: int = field(default=1, kw_only=True)
    has_even_signs: bool = field(default=False, kw_only=True)
    unit: torch.dtype = field(default=torch.float16, kw_only=True)

    @property
    def has_minimum(self) -> bool:
        """Whether each group of a block stores a minimum that is subtracted, besides its scale (as in Q4_K)."""
        return self.minimum_range != NONE

    @property
    def is_lattice(self) -> bool:
        """Whether several numbers together have one code: a point of a list."""
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

    def as_unit(self, numbers: Tensor) -> Tensor:
        """Round fp32 numbers to the nearest that d and dmin can be, those beyond their range to the largest."""
        most = torch.finfo(self.unit).max
        return numbers.clamp(-most, most).to(self.unit).float()


@dataclass(frozen=True)
class SizedLayout(BlockLayout, ABC):
    """A kind of blocks whose bytes are known."""

    @abstractmethod
    def size(self, numbers: int) -> int:
        """Bytes that so many elements take in this type, whole blocks only."""


def even_levels(first: int, count: int) -> tuple[int, ...]:
    """So many consecutive whole numbers from the first on."""
    return tuple(range(first, first + count))


@dataclass(frozen=True)
class AffineCodes(SizedLayout):
    """Groups on an even grid with a scale and a minimum of their own, as MLX has them."""

    @classmethod
    def of(cls, bits: int, group: int, unit: torch.dtype) -> Self:
        """Codes of so many bits, in groups of so many numbers."""
        return cls(f"{bits}-bit", group, group, even_levels(0, 1 << bits), ONE, ONE, unit=unit)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.levels) - 1).bit_length()

    def size(self, numbers: int) -> int:
        return numbers * self.bits // 8 + 2 * (numbers // self.group) * self.unit.itemsize


def symmetric(bits: int, group: int, unit: torch.dtype) -> BlockLayout:
    """Groups on an even grid about zero, with a scale of either sign: the level beyond the others, −2^(b−1), stands on
    the side where a group needs it."""
    levels = even_levels(-(1 << (bits - 1)), 1 << bits)
    return BlockLayout(f"symmetric {bits}", group, group, levels, ONE, NONE, unit=unit)
