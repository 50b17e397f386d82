"""llama.cpp's importance matrix: a GGUF file of what every matrix was given on a text, which `llama-quantize` reads.

Source: llama.cpp, tools/imatrix/imatrix.cpp (`IMatrixCollector::save_imatrix`).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from moetool.checkpoint.files import atomically, storage_errors
from moetool.format.gguf.words import gguf_library

_TYPE, _DATASETS, _CHUNKS, _CHUNK_SIZE = "imatrix", "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


def imatrix_tensors(name: str, given: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Entries of one tensor in an imatrix file: sums of squared inputs `[matrices, in]` and tokens `[matrices, 1]`."""
    return {f"{name}.in_sum2": given.float().cpu(), f"{name}.counts": counts.float()[:, None].cpu()}


def write_imatrix(file: Path, tensors: Mapping[str, Tensor], text: str, windows: int, length: int) -> None:
    """An importance matrix as llama.cpp's `llama-imatrix` writes it, whole or not at all.

    Args:
        file: its name.
        tensors: sums and counts (`imatrix_tensors`).
        text: what they were measured on.
        windows: of it.
        length: tokens in each.

    Raises:
        ResourceError: it cannot be written.
    """
    writer = gguf_library().GGUFWriter(None, _TYPE)
    writer.add_type(_TYPE)
    writer.add_array(_DATASETS, [text])
    writer.add_uint32(_CHUNKS, windows)
    writer.add_uint32(_CHUNK_SIZE, length)
    for name in sorted(tensors):
        writer.add_tensor(name, np.ascontiguousarray(tensors[name].numpy()))
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with atomically(file, needed) as temporary, storage_errors(file, needed):
        temporary.unlink(missing_ok=True)
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
