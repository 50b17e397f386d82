"""A GGUF file with other scales: its codes, types and metadata stay, and so does its size.

All numbers of a block are multiples of its fp16 numbers d and dmin (`format.gguf.blocks`). So a model in which blocks
were multiplied by factors is the same file with other such numbers, and with other numbers where it has plain ones.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moetool.checkpoint.files import atomically, storage_errors
from moetool.checkpoint.gguf_model import GgufModel
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import check_finite
from moetool.errors import VerificationError
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType
from moetool.format.gguf.words import EXPERTS, GATE_AND_UP, gguf_library, layer_in_file, layer_of
from moetool.job.progress import Progress
from moetool.numerics.multiples import factors_between

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

_PLAIN = ("F32", "F16", "BF16")  # types without blocks
_AT_ONCE = 1 << 22  # numbers that are looked at together
_CHANGED = 1e-6  # relative; what is less follows from adding and taking away one, as files do to some norms
_ROUNDING = 2e-3  # ‖Δ‖ / ‖tensor‖ that fp16 scales may leave, of which each is rounded by .0005 at most
_TINY = 1e-30


def block_type(stored: "ReaderTensor") -> BlockType | None:
    """The quantized type of a tensor of a file; `None` where it has none that moetool writes."""
    return BLOCK_TYPES.get(stored.tensor_type.name.lower())


def scaled_blocks(blocks: NDArray[np.uint8], kind: BlockType, factors: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks `[blocks, bytes]` of a type with all numbers of each multiplied by its entry of `factors` [blocks], as
    nearly as fp16 can say it."""
    found = blocks.copy()
    for start in kind.units:
        units = found[:, start : start + 2].copy().view("<f2")[:, 0].astype(np.float32)
        found[:, start : start + 2] = (units * factors).astype("<f2")[:, None].view(np.uint8)
    return found


def write_rescaled(before: Path, model: GgufSource, file: Path, progress: Progress) -> None:
    """Write a GGUF file again with the numbers of a model, which differ from its own by factors of blocks and where
    they are plain ones. What the model has no other numbers of stays byte for byte.

    Args:
        before: the file that there is.
        model: with the other numbers, in fp32.
        file: the one to write.
        progress: told of every tensor.

    Raises:
        InvalidInputError: a number of the model is not finite.
        VerificationError: more of it has changed than factors.
        ResourceError: the disk is full.
    """
    own, coming = GgufModel(before), {tensor.name: tensor for tensor in model.tensors("f16", "f16")}
    needed = before.stat().st_size
    with atomically(file, needed) as temporary:
        with storage_errors(file, needed):
            shutil.copyfile(before, temporary)
            data = np.memmap(temporary, np.uint8, "r+")
        for name, stored in own.tensors.items():
            progress.advance()
            if (rows := _rows(name, coming)) is None:
                continue
            if not _rescale(data[stored.data_offset : stored.data_offset + stored.n_bytes], stored, rows):
                raise VerificationError(
                    f"{name} is not what {before} holds times factors of its blocks; {file} was not written. This is a "
                    "defect of moetool: please report it."
                )
        with storage_errors(file, needed):
            data.flush()


def _rescale(data: NDArray[np.uint8], stored: "ReaderTensor", rows: Iterator[Tensor]) -> bool:
    """Give a tensor's bytes the numbers of `rows`; whether its types can hold these. Those of other types stay."""
    number, kind = stored.tensor_type, block_type(stored)
    if kind is None and number.name not in _PLAIN:
        return True
    size, start, left = 1 if kind is None else kind.numbers, 0, 0.0
    raw = data.reshape(-1, stored.n_bytes * size // stored.n_elements)
    for part in rows:
        check_finite(stored.name, part)
        for new in part.reshape(-1, size).float().split(max(1, _AT_ONCE // size)):
            here = slice(start, start + len(new))
            if kind is None:
                raw[here] = _plain(raw[here], new, number)
            else:
                raw[here], error = _scaled(raw[here], new, kind)
                left += error
            start += len(new)
    return start == len(raw) and left <= _CHANGED * len(raw)


def prove_rescaled(file: Path, model: Checkpoint) -> float:
    """Read a file back and compare all of it with a model in fp32.

    Returns:
        ‖Δ‖ / ‖tensor‖, the largest of all tensors.

    Raises:
        VerificationError: a tensor differs by more than the rounding of scales; the file is deleted.
    """
    found, worst = GgufModel(file, is_exact=True), 0.0
    for unit in range(-1, found.layers):
        for name, tensor in found.unit(unit):
            own = model.read(name).float()
            error = float((tensor - own).norm() / own.norm().clamp_min(_TINY))
            if not error <= _ROUNDING:
                file.unlink()  # llama.cpp would load it
                raise VerificationError(
                    f"Read back, {name} in {file} differs from what was trained by {error:.2g} of its size. The file "
                    "was deleted. This is a defect of moetool: please report it."
                )
            worst = max(worst, error)
    return float(f"{worst:.2g}")


def _rows(name: str, coming: Mapping[str, GgufTensor]) -> Iterator[Tensor] | None:
    """The rows of a tensor of the file; `None` for one that does not follow from the model's weights."""
    layer = layer_of(name)
    if layer >= 0 and name == layer_in_file(layer, GATE_AND_UP):
        parts = [coming[layer_in_file(layer, EXPERTS[role])].parts() for role in ("gate", "up")]
        return (torch.cat(matrices) for matrices in zip(*parts, strict=True))
    return coming[name].parts() if name in coming else None


def _scaled(blocks: NDArray[np.uint8], new: Tensor, kind: BlockType) -> tuple[NDArray[np.uint8], float]:
    """Blocks that hold the numbers `new` [blocks, numbers] as multiples of their own, and what these factors leave of
    them, in shares of each block's energy, summed."""
    library = gguf_library()
    decoded = library.quants.dequantize(blocks, library.GGMLQuantizationType[kind.name.upper()])
    old = torch.from_numpy(decoded.astype(np.float32, copy=False)).reshape(new.shape)
    factors = factors_between(old, new)
    left = (new - factors[:, None] * old).square().sum(1) / old.square().sum(1).clamp_min(_TINY)
    return scaled_blocks(blocks, kind, factors.numpy()), float(left.sum())


def _plain(raw: NDArray[np.uint8], new: Tensor, number: object) -> NDArray[np.uint8]:
    """Bytes `[numbers, bytes]` of numbers `new` [numbers, 1] in a plain type; those that have not changed stay."""
    quants = gguf_library().quants
    old = torch.from_numpy(quants.dequantize(raw, number).astype(np.float32, copy=True)).reshape(new.shape)
    stays = ((new - old).abs() <= _CHANGED * old.abs()).numpy()
    coming = quants.quantize(new.contiguous().numpy(), number).view(np.uint8).reshape(raw.shape)
    return np.where(stays, raw, coming)
