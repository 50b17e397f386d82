"""Writing a GGUF file: metadata by the library `gguf`, then tensors, never one of them whole in memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
from torch import Tensor

from moetool.checkpoint.files import atomically, free_bytes, storage_errors
from moetool.checkpoint.writer import is_finite
from moetool.errors import InvalidInputError, ResourceError, VerificationError
from moetool.format.gguf import EMBEDDINGS, HEAD, gguf_library

NumberType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
NUMBER_TYPES: tuple[NumberType, ...] = get_args(NumberType)
# Numbers in a block, and its bytes. The library writes these; its others it only reads.
_BLOCKS: dict[NumberType, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22),
    "q4_1": (32, 20), "q4_0": (32, 18),
}  # fmt: skip
_ALIGNMENT = 32
_LARGEST_FP16 = 65504.0
_UNTYPED = np.dtype(np.float32)  # what the library is told of a tensor whose type stands beside it
_ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", ".bias")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to be written.

    Attributes:
        name: GGUF's.
        shape: as torch has it.
        type: of its numbers.
        parts: its rows in order, in parts whose last dimension is the whole's.
    """

    name: str
    shape: tuple[int, ...]
    type: NumberType
    parts: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        numbers, size = _BLOCKS[self.type]
        return math.prod(self.shape) // numbers * size


def type_for(name: str, shape: Sequence[int], wanted: NumberType) -> NumberType:
    """The type of a tensor in a file of that type: routers, norms and biases are always fp32, rows that are no whole
    blocks fp16, and embeddings and the head have at least 8 bits, as in llama.cpp's own files."""
    if len(shape) == 1 or name.endswith(_ALWAYS_F32):
        return "f32"
    if shape[-1] % _BLOCKS[wanted][0]:
        return "f16"
    few = wanted in ("q4_0", "q4_1", "q5_0", "q5_1")
    return "q8_0" if few and name in (EMBEDDINGS, HEAD) else wanted


def data_bytes(tensors: Sequence[GgufTensor]) -> int:
    """Bytes of all tensors in a file."""
    return sum(_padded(tensor.nbytes) for tensor in tensors)


def write_gguf(file: Path, writer: Any, tensors: Sequence[GgufTensor], wrote: Callable[[GgufTensor], None]) -> None:
    """Write a file, whole or not at all.

    Args:
        file: its name.
        writer: the library's `GGUFWriter`, with all metadata.
        tensors: in order.
        wrote: called after each.

    Raises:
        InvalidInputError: a number is not finite, or fp16 has no room for it.
        VerificationError: a tensor came in more or fewer rows than planned.
        ResourceError: the disk is full, or the file cannot be written.
    """
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, _UNTYPED, tensor.nbytes, raw_dtype=_code(tensor.type))
    needed = data_bytes(tensors)
    with atomically(file, needed) as temporary:
        with storage_errors(file, needed):
            temporary.unlink(missing_ok=True)
            if (free := free_bytes(file)) < needed:
                raise ResourceError(f"Cannot write {file}: it needs {needed} bytes, {free} are free. Free some.")
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            handle = temporary.open("ab")
        with handle:
            _pad(handle, file)
            for tensor in tensors:
                _write(handle, file, tensor)
                wrote(tensor)


def _write(handle: IO[bytes], file: Path, tensor: GgufTensor) -> None:
    quantize, start, code = gguf_library().quants.quantize, handle.tell(), _code(tensor.type)
    for part in tensor.parts():
        if not is_finite(part):
            raise InvalidInputError(f"{tensor.name} would hold NaN or infinity: the checkpoint is damaged.")
        if tensor.type == "f16" and part.numel() and float(part.abs().max()) > _LARGEST_FP16:
            raise InvalidInputError(
                f"{tensor.name} has numbers up to {float(part.abs().max()):.3g}, more than fp16 can hold: --type bf16."
            )
        rows = quantize(part.detach().float().contiguous().numpy(), code)
        with storage_errors(file, tensor.nbytes):
            handle.write(rows.tobytes())
    if (written := handle.tell() - start) != tensor.nbytes:
        raise VerificationError(f"{tensor.name} came in {written} bytes, not {tensor.nbytes}; {file} was not written.")
    _pad(handle, file)


def _pad(handle: IO[bytes], file: Path) -> None:
    with storage_errors(file):
        handle.write(bytes(_padded(handle.tell()) - handle.tell()))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _code(number: NumberType) -> Any:
    return gguf_library().GGMLQuantizationType[number.upper()]
