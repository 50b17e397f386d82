"""Writing a GGUF file: metadata by the library `gguf`, then tensors, never one of them whole in memory."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moetool.checkpoint.files import TEMPORARY, FastDigest, free_bytes, settle, storage_errors
from moetool.checkpoint.writer import check_finite
from moetool.errors import InvalidInputError, ResourceError, VerificationError
from moetool.export.blocks.coding import block_codes
from moetool.export.gguf.mxfp4 import mxfp4_bytes
from moetool.export.gguf.packing import packed
from moetool.format.gguf.blocks import BLOCK_TYPES, MXFP4, WITHOUT_SUPER_BLOCKS, NumberType, StoredType
from moetool.format.gguf.words import EMBEDDINGS, HEAD, gguf_library, layer_of
from moetool.job.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

# Numbers in a block, and its bytes.
_BLOCKS: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "mxfp4": (32, 17), "i32": (1, 4),
    **{name: (kind.numbers, kind.nbytes) for name, kind in BLOCK_TYPES.items()},
}  # fmt: skip
_AT_ONCE = 1 << 20  # numbers that are put into blocks together
BLOCK_ALIGNMENT = 32
_LARGEST_FP16 = 65504.0
_NUMBERS_OF_EXPERTS = "ffn_gate_tid2eid.weight"  # of each token, in layers where these are looked up
_UNTYPED = np.dtype(np.float32)  # what the library is told of a tensor whose type stands beside it
_ALWAYS_F32 = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", ".bias",
    "ssm_conv1d.weight", "ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight", "shortconv.conv.weight",
    "ssm_a", "ssm_d", "hc_attn_fn.weight", "hc_ffn_fn.weight", "output_hc_fn.weight", "compressor_ape.weight",
    "ple_conv1d.weight", "position_embd.weight",
)  # fmt: skip
_WIDE = EMBEDDINGS, HEAD, "output_hc_down.weight", "output_hc_up.weight", "per_layer_token_embd.weight"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to be written.

    Attributes:
        name: GGUF's.
        shape: in torch's order.
        type: of its numbers.
        parts: its rows in order, in parts whose last dimension is the whole's; or, as uint8, the bytes of its blocks.
        has_inputs: whether a text tells what its matrices are given; the others get the nearest codes.
    """

    name: str
    shape: tuple[int, ...]
    type: StoredType
    parts: Callable[[], Iterator[Tensor]]
    has_inputs: bool = True

    @property
    def layer(self) -> int:
        """The decoder layer that it is of; −1 outside of all layers."""
        return layer_of(self.name)

    @property
    def numbers(self) -> int:
        """Number of elements of the tensor, in all dimensions."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data in its type, without padding."""
        numbers, size = _BLOCKS[self.type]
        return self.numbers // numbers * size

    @property
    def is_always_wide(self) -> bool:
        """Whether it has no fewer bits in any file: routers, norms and biases are fp32, numbers of experts integers."""
        return type_for(self.name, self.shape, "f16") in ("f32", "i32")

    def is_fallback(self, wanted: Collection[NumberType]) -> bool:
        """Whether it has none of the wanted types because its rows are no whole blocks of them."""
        if self.is_always_wide or self.type in wanted:
            return False
        return any(self.shape[-1] % _BLOCKS[number][0] for number in wanted)


def type_for(name: str, shape: Sequence[int], wanted: NumberType) -> StoredType:
    """The type of a tensor in a file whose type is `wanted`, as in llama.cpp's own files.

    Routers, norms, biases and what convolves or decays a state are always fp32, numbers of experts integers. Rows that
    are no whole super-blocks have blocks of 32 numbers, and rows that 32 does not divide fp16. Embeddings, the head and
    what joins residual streams before it have at least 8 bits.
    """
    if name.endswith(_NUMBERS_OF_EXPERTS):
        return "i32"
    if len(shape) == 1 or name.endswith(_ALWAYS_F32):
        return "f32"
    if name in _WIDE and is_quantized(wanted):
        wanted = "q8_0"
    if shape[-1] % _BLOCKS[wanted][0]:
        wanted = WITHOUT_SUPER_BLOCKS.get(wanted, "f16")
    return "f16" if shape[-1] % _BLOCKS[wanted][0] else wanted


def is_quantized(number: StoredType) -> bool:
    """Whether a type stores numbers in blocks that share a scale, unlike f32, f16, bf16 and i32."""
    return _BLOCKS[number][0] > 1


def data_bytes(tensors: Sequence[GgufTensor]) -> int:
    """Bytes of all tensors' data in a file, with the padding after each."""
    return sum(_padded(tensor.nbytes) for tensor in tensors)


def write_gguf(
    file: Path,
    writer: "GGUFWriter",
    units: Sequence[Sequence[GgufTensor]],
    noted: Sequence[str],
    progress: Progress,
    note: Callable[[int, str], None],
) -> str:
    """Write a GGUF file in order, unit by unit; an interrupted run continues with the last unit that was noted.

    Until it is whole it has another name. What was noted of it is there, or all of it is written again.

    Args:
        file: its name.
        writer: the library's `GGUFWriter`, with all metadata.
        units: tensors in order.
        noted: what an earlier run has noted of the first units.
        progress: of its phase a tensor is a step, those that are noted left out.
        note: called when a unit is on the disk, with its number and the `FastDigest` of all that is there.

    Returns:
        The `FastDigest` of the file.

    Raises:
        InvalidInputError: a number is not finite, or fp16 has no room for it.
        VerificationError: a tensor came in more or fewer rows than planned.
        ResourceError: the disk is full, or the file cannot be written.
    """
    tensors = [tensor for unit in units for tensor in unit]
    _announce(writer, tensors)
    needed, temporary = data_bytes(tensors), file.with_name(file.name + TEMPORARY)
    digest = _taken_up(temporary, noted)
    begin = 0 if digest is None else len(noted)
    if begin:
        progress.skip(sum(map(len, units[:begin])))
    try:
        if digest is None:
            _write_head(temporary, writer, needed)
            digest = FastDigest()
            digest.update(temporary.read_bytes())
        with storage_errors(file, needed):
            handle = temporary.open("ab")
        with handle:
            output = _Digested(handle, digest, file)
            for number, unit in enumerate(units[begin:], begin):
                for tensor in unit:
                    _write(output, tensor)
                    progress.advance()
                output.sync()
                note(number, str(digest))
                begin = number + 1
    except BaseException:
        if not begin:  # nothing that anybody could go on with
            temporary.unlink(missing_ok=True)
        raise
    settle(temporary, file, needed)
    return str(digest)


def head_bytes(writer: "GGUFWriter", tensors: Sequence[GgufTensor]) -> int:
    """Bytes of a file before its first tensor: metadata and the list of tensors, whatever types these have.

    Args:
        writer: the library's `GGUFWriter`, with all metadata; it cannot be used again.
        tensors: of the file.
    """
    _announce(writer, tensors)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "head"
        _write_head(file, writer, 0)
        return file.stat().st_size


def _announce(writer: "GGUFWriter", tensors: Sequence[GgufTensor]) -> None:
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, _UNTYPED, tensor.nbytes, raw_dtype=_code(tensor.type))


def _taken_up(temporary: Path, noted: Sequence[str]) -> FastDigest | None:
    """The digest of an unfinished file as far as it was noted, the rest of it cut off; `None` if it has to be begun."""
    if not noted or not temporary.exists():
        return None
    digest, left = FastDigest(), int(noted[-1].partition(":")[0])
    with storage_errors(temporary), temporary.open("r+b") as handle:
        while block := handle.read(min(left, 4 << 20)):
            digest.update(block)
            left -= len(block)
        handle.truncate(handle.tell())
    return digest if str(digest) == noted[-1] else None


def _write_head(temporary: Path, writer: "GGUFWriter", needed: int) -> None:
    with storage_errors(temporary, needed):
        temporary.unlink(missing_ok=True)
        if (free := free_bytes(temporary)) < needed:
            raise ResourceError(f"Cannot write {temporary}: it needs {needed} bytes, {free} are free. Free some.")
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        size = temporary.stat().st_size
        with temporary.open("ab") as handle:
            handle.write(bytes(_padded(size) - size))


class _Digested:
    """A file that is appended to, and the `FastDigest` of all that was written to it."""

    def __init__(self, handle: IO[bytes], digest: FastDigest, file: Path) -> None:
        self._handle, self._digest, self.file = handle, digest, file

    def write(self, data: bytes) -> None:
        with storage_errors(self.file, len(data)):
            self._handle.write(data)
        self._digest.update(data)

    def sync(self) -> None:
        with storage_errors(self.file):
            self._handle.flush()
            os.fsync(self._handle.fileno())


def _write(output: _Digested, tensor: GgufTensor) -> None:
    written = 0
    for part in tensor.parts():
        check_finite(tensor.name, part)
        if tensor.type == "f16" and part.numel() and (largest := float(part.abs().max())) > _LARGEST_FP16:
            raise InvalidInputError(
                f"{tensor.name} has numbers up to {largest:.3g}, more than fp16 can hold: --type bf16."
            )
        rows = _rows(part, tensor.type)
        output.write(rows)
        written += len(rows)
    if written != tensor.nbytes:
        raise VerificationError(
            f"{tensor.name} came in {written} bytes, not {tensor.nbytes}; {output.file} was not written."
        )
    output.write(bytes(_padded(written) - written))


def _rows(part: Tensor, number: StoredType) -> bytes:
    """Rows as they are stored, in blocks with the nearest codes unless they are blocks already."""
    if part.dtype == torch.uint8:
        return part.numpy().tobytes()
    if number == "i32":
        return part.to(torch.int32).numpy().tobytes()
    kind = BLOCK_TYPES.get(number)
    if kind is None and number != MXFP4:
        stored: bytes = (
            gguf_library().quants.quantize(part.detach().float().contiguous().numpy(), _code(number)).tobytes()
        )
        return stored
    rows = part.reshape(-1, part.shape[-1])
    step = max(1, _AT_ONCE // rows.shape[1])
    coded = (mxfp4_bytes(some) if kind is None else packed(block_codes(some, kind), kind) for some in rows.split(step))
    return b"".join(some.numpy().tobytes() for some in coded)


def _padded(size: int) -> int:
    return -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _code(number: StoredType) -> "GGMLQuantizationType":
    return gguf_library().GGMLQuantizationType[number.upper()]
