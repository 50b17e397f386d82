"""Hidden states of the calibration set, on disk.

One file holds the inputs of one decoder layer (or the gradients with respect to them) for every window. Files keep the
memory needed independent of the model's depth, and let an interrupted run go on from the layer it had reached.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from moetool.checkpoint.reader import byte_view
from moetool.errors import ResourceError


class ActivationFile:
    """A tensor `[windows, length, hidden]` in a file, read and written by slices of windows."""

    def __init__(self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._row_bytes = shape[1] * shape[2] * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return self.shape[0] * self._row_bytes

    def read(self, start: int, stop: int) -> Tensor:
        """Windows `start` to `stop`, on the CPU."""
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        buffer = byte_view(rows)
        with self.path.open("rb") as file:
            file.seek(start * self._row_bytes)
            if file.readinto(buffer) != len(buffer):
                raise ResourceError(f"{self.path} ended early; the work directory is damaged. Use --overwrite.")
        return rows

    def replace(self, batches: Iterator[Tensor]) -> None:
        """Write the whole file from batches that follow each other, atomically."""
        temporary = self.path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                for rows in batches:
                    rows = rows.detach().to("cpu", self.dtype).contiguous()
                    file.write(byte_view(rows))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ResourceError(f"Could not write calibration activations to {self.path}: {error}.") from error
        temporary.replace(self.path)

    def delete(self) -> None:
        """Remove the file if it is there."""
        self.path.unlink(missing_ok=True)
