"""A matrix that is decoded, when it is read, from tensors that hold it in few bits."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from moetool.errors import InvalidInputError

# Numbers of a tensor in the files, from one on in row-major order, in a shape.
Spans: TypeAlias = Callable[[str, int, tuple[int, ...]], Tensor]

_ELEMENTS = 1 << 20  # decoded at once: what a decoder needs beside its result stays small, and mostly in the cache


@dataclass(frozen=True)
class GroupScales:
    """A tensor of scales, one for each group of a matrix's inputs, that all numbers of the group are multiples of.

    Attributes:
        name: of the tensor, `[out, groups]`.
        group: number of inputs in a group.
        is_turned: whether it lies as `[groups, out]`.
    """

    name: str
    group: int
    is_turned: bool = False


def check_groups(name: str, order: Tensor, groups: int) -> None:
    """Raise `InvalidInputError` where a tensor names other groups of inputs than there are scales of.

    Args:
        name: of the tensor.
        order: the group of each input.
        groups: number of groups that have scales.
    """
    least, most = int(order.min()), int(order.max())
    if least < 0 or most >= groups:
        raise InvalidInputError(
            f"{name} has the groups {least} to {most}, and there are scales of {groups}. Download or write the "
            "checkpoint again."
        )


@dataclass(frozen=True)
class DecodedMatrix(ABC):
    """A matrix, or several of one shape in one tensor, that is decoded when it is read.

    Attributes:
        name: what it is shown as.
        shape: of what is shown; rows are counted over all dimensions but the last.
        dtype: of what is shown.
        parts: names of the tensors that hold it.
        notes: names of small tensors beside these that say how they are to be decoded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[str, ...]
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (excluded), `[stop - start, columns]`, in `dtype` or, to be rounded to it, in fp32.

        Raises:
            InvalidInputError: a file has changed since it was opened.
        """

    def scales(self, spans: Spans) -> GroupScales | None:
        """Scales of groups of inputs that follow each other; `None` where a matrix has others, or none.

        Raises:
            InvalidInputError: a file has changed since it was opened.
        """
        return None

    def rows(self, spans: Spans, start: int, stop: int) -> Tensor:
        """Decode rows `start` to `stop` of the matrix to `dtype`, a few at a time so that fp32 copies stay small."""
        columns = self.shape[-1]
        rows = torch.empty(stop - start, columns, dtype=self.dtype)
        step = max(1, _ELEMENTS // columns)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            rows[first - start : last - start] = self.decode(spans, first, last)
        return rows
