"""Hidden states of the calibration set, on disk.

One file holds the inputs of one decoder layer (or the gradients with respect to them) for every window. Files keep the
memory needed independent of the model's depth, and let an interrupted run go on from the layer it had reached.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from moetool.calibration.peers import Peers
from moetool.checkpoint.files import TEMPORARY, FastDigest, atomically, storage_errors
from moetool.checkpoint.header import byte_view
from moetool.errors import ResourceError


class ActivationFile:
    """A tensor `[windows, length, hidden]` in a file, read and written by slices of windows. A model may have more than
    one hidden state per token, `[windows, length, states, hidden]`."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes on disk that the hidden states of all windows take."""
        return self.shape[0] * self._row_bytes

    def read(self, start: int, stop: int) -> Tensor:
        """Read the hidden states of windows `start` to `stop` into CPU memory: `[stop - start, length, channels]`.

        Raises:
            ResourceError: the file is shorter than what was written.
        """
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        buffer = byte_view(rows)
        with self.path.open("rb") as file:
            file.seek(start * self._row_bytes)
            if file.readinto(buffer) != len(buffer):
                raise ResourceError(f"{self.path} ended early: somebody changed it. --resume makes it again.")
        return rows

    def replace(self, batches: Iterator[Tensor]) -> str:
        """Write the whole file from batches that follow each other, atomically; returns its `FastDigest`.

        Raises:
            ResourceError: the disk is full, or the file cannot be written.
        """
        digest = FastDigest()
        with atomically(self.path, self.nbytes) as temporary:
            with storage_errors(self.path, self.nbytes):
                file = temporary.open("wb", buffering=0)
            with file:
                self._write(file, batches, digest)
        return str(digest)

    def replace_together(self, batches: Iterator[Tensor], start: int, peers: Peers) -> None:
        """Replace the content as `replace` does, by several processes, each of which gives its own windows from `start`
        on."""
        if not peers.is_first:
            peers.barrier()
            return self._write_part(self.path.with_name(self.path.name + TEMPORARY), batches, start, peers)
        with atomically(self.path, self.nbytes) as temporary:
            with storage_errors(self.path, self.nbytes), temporary.open("wb") as file:
                file.truncate(self.nbytes)
            peers.barrier()
            self._write_part(temporary, batches, start, peers)

    def _write_part(self, path: Path, batches: Iterator[Tensor], start: int, peers: Peers) -> None:
        with storage_errors(self.path):
            file = path.open("r+b", buffering=0)
        with file:
            file.seek(start * self._row_bytes)
            self._write(file, batches)
            with storage_errors(self.path):
                os.fsync(file.fileno())
        peers.barrier()

    def _write(self, file: BinaryIO, batches: Iterator[Tensor], digest: FastDigest | None = None) -> None:
        for rows in batches:
            data = byte_view(rows.detach().to("cpu", self.dtype).contiguous())
            if digest is not None:
                digest.update(data)
            with storage_errors(self.path, self.nbytes):
                while data:
                    data = data[file.write(data) :]
