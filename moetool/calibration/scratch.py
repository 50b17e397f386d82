"""Tensors that lie in a file without a name, and are gone with the last reference to them."""

import math
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from moetool.checkpoint.files import storage_errors


def scratch_tensor(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the disk of `directory`, mapped into memory: the system reads and writes what is used, and may drop it.

    Raises:
        ResourceError: there is no room. It is taken at once, so that nothing fails later.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    with storage_errors(directory / "scratch", nbytes):
        descriptor, name = tempfile.mkstemp(prefix="scratch-", dir=directory)
        try:
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
            mapped = torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype)
        finally:
            os.close(descriptor)
            Path(name).unlink()
    return mapped.view(shape)
