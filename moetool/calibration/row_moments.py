"""How errors in the rows of a projection count together: the second moment of the loss's gradients at its outputs.

Every token passes through a projection, so that the moment is taken from the gradients themselves, not from slopes as
that of an expert (`calibration.output_metric`). Errors move between `LINKED_ROWS` rows, and so only their moments are
kept, as correlations in fp16.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor

from moetool.calibration.output_metric import OUTPUT_DAMPING, damped
from moetool.checkpoint.files import save_tensors
from moetool.numerics.halved_gram import HalvedGram
from moetool.numerics.row_feedback import LINKED_ROWS

_ENERGY = "energy"


class RowMoments:
    """`Σ g gᵀ` of the gradients g at a matrix's outputs, between rows of one chunk of `LINKED_ROWS`."""

    def __init__(self, rows: int, length: int, device: torch.device, first: int = 0) -> None:
        """Start without gradients, for a matrix of so many `rows` and windows of `length` tokens, of which other
        processes run the `first`."""
        self._grams = [HalvedGram(size, length, first, device) for size in _chunks(rows)]

    def add(self, gradients: Tensor) -> None:
        """Add gradients `[windows · length, rows]` at outputs."""
        for gram, part in zip(self._grams, gradients.split(LINKED_ROWS, 1), strict=True):
            gram.add(part)

    def reduce(self, all_reduce: Callable[[Tensor], object]) -> None:
        """Add up, by a function that does so in place, what several processes have seen of windows of their own."""
        for gram in self._grams:
            gram.reduce(all_reduce)

    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps: the energy of every row, `[rows]` fp32, and by chunk the correlations in fp16."""
        moments = [gram.matrix() for gram in self._grams]
        energy = torch.cat([moment.diagonal() for moment in moments])
        found = {_ENERGY: energy.clone()}
        for index, (moment, own) in enumerate(zip(moments, energy.split(LINKED_ROWS), strict=True)):
            unit = torch.where(own > 0, own.rsqrt(), 0)
            found[str(index)] = (moment * unit * unit[:, None]).half()
        return found


@dataclass(frozen=True, eq=False)
class ProjectionMetric:
    """The metric of the outputs of a projection: `RowMetric`.

    Attributes:
        energy: `[rows]` fp32, of the gradients at each.
        correlations: by chunk of `LINKED_ROWS` rows, `[n, n]` fp16.
    """

    energy: Tensor
    correlations: Sequence[Tensor]

    @classmethod
    def read(cls, path: Path, name: str, device: torch.device) -> Self:
        """Read what `save_row_moments` wrote of the matrix of a name."""
        with safe_open(path, "pt", device=str(device)) as file:
            energy = file.get_tensor(f"{name}/{_ENERGY}")
            return cls(energy, [file.get_tensor(f"{name}/{index}") for index in range(len(_chunks(len(energy))))])

    def moment(self, rows: Tensor) -> Tensor:
        """`Σ g gᵀ` of the gradients at some `rows` [n] int64 of one chunk, in their order: [n, n] fp32."""
        chunk = int(rows[0]) // LINKED_ROWS
        own, size = rows - chunk * LINKED_ROWS, self.energy[rows].sqrt()
        return self.correlations[chunk][own][:, own].float() * size * size[:, None]

    def among(self, rows: Tensor) -> Tensor:
        return damped(self.moment(rows), OUTPUT_DAMPING)


def row_moments_path(work: Path, layer: int) -> Path:
    """The file of a work directory in which a layer's moments wait for its projections to be coded."""
    return work / f"rows-{layer:05d}.safetensors"


def save_row_moments(path: Path, moments: Mapping[str, RowMoments]) -> None:
    """Write the moments of matrices, by name, to a safetensors file."""
    save_tensors(path, {f"{name}/{key}": own for name, one in moments.items() for key, own in one.tensors().items()})


def row_moment_numbers(rows: int) -> int:
    """How many numbers the moments of a matrix with so many rows are."""
    return sum(size**2 for size in _chunks(rows))


def _chunks(rows: int) -> list[int]:
    """Return the number of rows in each chunk of `LINKED_ROWS` that a matrix of so many `rows` is cut into."""
    return [min(LINKED_ROWS, rows - start) for start in range(0, rows, LINKED_ROWS)]
