"""Matrices of whole numbers that lie turned in the files, `[in, out]`, with scales and zero points per group of inputs.

What is decoded is `scale · (number − zero)`, rounded to the dtype of the scales, in which their makers multiply, and
then to that of the model. GPTQ and AWQ differ in how words hold the numbers.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.checkpoint.stored.formats import QuantizedFiles
from moetool.checkpoint.stored.matrix import DecodedMatrix, GroupScales, Spans, check_groups

_INPUTS = 512  # whose words are read together, or those of one group
_AT_ONCE = 1 << 18  # numbers decoded together
PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class TurnedIntegers(DecodedMatrix):
    """A matrix `[out, in]` of whole numbers. `parts` are words, zero points and scales, and the group of each input
    where the files say it.

    Attributes:
        group: number of inputs in one group; the last may have fewer.
        groups: number of groups.
        rounded: dtype of the scales.
    """

    group: int
    groups: int
    rounded: torch.dtype

    @property
    @abstractmethod
    def tile(self) -> tuple[int, int]:
        """Numbers of inputs and of outputs in the least part that whole words hold."""

    @abstractmethod
    def words(self, spans: Spans, first: int, last: int) -> Tensor:
        """Words of the inputs `first` to `last` of all outputs, `[lines, columns]`."""

    @abstractmethod
    def numbers(self, words: Tensor) -> Tensor:
        """Unpack the numbers `[outputs, inputs]` fp32 that some columns of words hold."""

    @abstractmethod
    def zeros(self, spans: Spans) -> Tensor:
        """Read the zero points `[groups, out]` as fp32 numbers, in units of the codes."""

    def rows(self, spans: Spans, start: int, stop: int) -> Tensor:
        (outputs, inputs), step = self.shape, self.tile[1]
        low, high = start // step, -(-stop // step)  # columns of words
        kept = slice(low * step, min(high * step, outputs))
        scales = spans(self.parts[2], 0, (self.groups, outputs))[:, kept].float().T.contiguous()
        zeros = self.zeros(spans)[:, kept].T.contiguous()
        order = self._order(spans)
        found = torch.empty(kept.stop - kept.start, inputs, dtype=self.dtype)
        for first, last in self._pieces():
            words = self.words(spans, first, last)[:, low:high]
            columns = max(1, _AT_ONCE // ((last - first) * step))
            for column in range(0, high - low, columns):
                own = slice(column * step, min((column + columns) * step, len(found)))
                part = self.numbers(words[:, column : column + columns])[: own.stop - own.start, : last - first]
                if order is None:
                    of = slice(first // self.group, last // self.group)
                    grouped = part.unflatten(1, (-1, self.group))
                    grouped.sub_(zeros[own, of, None]).mul_(scales[own, of, None])
                else:
                    part.sub_(zeros[own].index_select(1, order[first:last]))
                    part.mul_(scales[own].index_select(1, order[first:last]))
                found[own, first:last] = part.to(self.rounded)
        return found[start - kept.start : stop - kept.start]

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        return self.rows(spans, start, stop)

    def scales(self, spans: Spans) -> GroupScales | None:
        return GroupScales(self.parts[2], self.group, is_turned=True) if self._order(spans) is None else None

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """First and last input of parts that whole words and whole groups make."""
        inputs, least = self.shape[1], math.lcm(self.group, self.tile[0])
        width = max(1, _INPUTS // least) * least
        for first in range(0, inputs, width):
            yield first, min(first + width, inputs)

    def _order(self, spans: Spans) -> Tensor | None:
        """The group of each input; `None` if whole groups are one after the other. Raises `InvalidInputError`."""
        inputs = self.shape[1]
        plain = torch.arange(inputs, dtype=torch.int32) // self.group
        order = spans(self.parts[3], 0, (inputs,)) if len(self.parts) > len(PARTS) else plain
        check_groups(self.parts[-1], order, self.groups)
        return None if inputs % self.group == 0 and order.equal(plain) else order


def modules_of(files: QuantizedFiles) -> list[str]:
    """Names of the modules that are stored as words, with a dot behind them; all parts of each are there.

    Raises:
        InvalidInputError: a part is missing, or is no matrix of the dtype that it has in GPTQ and AWQ.
    """
    endings = tuple(f".{part}" for part in PARTS)
    held = (name.removesuffix(ending) for ending in endings for name in files.tensors if name.endswith(ending))
    modules = [f"{name}." for name in dict.fromkeys(held)]
    for module in modules:
        for part in PARTS:
            if (info := files.tensors.get(f"{module}{part}")) is None:
                raise files.refuse(f"{module}{part} is missing, of a module that is stored in words with scales")
            is_right = info.dtype.is_floating_point if part == "scales" else info.dtype == torch.int32
            if len(info.shape) != 2 or 0 in info.shape or not is_right:
                raise files.refuse(
                    f"{info.name} is {list(info.shape)} in {info.dtype}, expected a matrix of "
                    + ("floating point numbers" if part == "scales" else "words of 32 bits")
                )
    return modules


def group_size(files: QuantizedFiles, module: str, inputs: int, groups: int) -> int:
    """Number of inputs that share a scale. Raises `InvalidInputError` where they are not so many groups."""
    if inputs % groups == 0:
        return inputs // groups
    size = files.entry.get("group_size")
    if type(size) is not int or size < 1 or -(-inputs // size) != groups:
        raise files.refuse(
            f"{module}scales are of {groups} groups, the words of {inputs} inputs: with a group_size of {size!r} these "
            "do not fit each other"
        )
    return size


def scale_bits(entry_group: object, bits: float) -> float:
    """Bits per number, scales in 16 bits and zero points included."""
    size = entry_group if type(entry_group) is int and entry_group > 0 else 128
    return bits + (16 + bits) / size
