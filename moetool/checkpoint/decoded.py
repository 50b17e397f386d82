"""A checkpoint that is quantized beside its experts, as if it were not."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.format.beside import TENSORS, quantized_beside, quantized_name, weight_of
from moetool.format.marker import BESIDE, moetool_entry, version_of
from moetool.representations.quantized import QuantizedMatrix


@dataclass(frozen=True)
class DecodedCheckpoint(Checkpoint):
    """The same checkpoint with the matrices that codes stand for in the place of these; its config knows of none.

    Attributes:
        stored: as it lies on disk.
        forms: of the quantized matrices, by the name of the weight.
    """

    stored: Checkpoint
    forms: Mapping[str, QuantizedMatrix]

    def fingerprint(self) -> str:
        return self.stored.fingerprint()

    @property
    def is_fingerprinted_whole(self) -> bool:
        return self.stored.is_fingerprinted_whole

    def read(self, name: str) -> Tensor:
        if name not in self.forms:
            return super().read(name)
        info = self.info(name)
        target, position = torch.empty(math.prod(info.shape), dtype=info.dtype), 0
        for block in self.blocks(name):
            target[position : position + len(block)] = block
            position += len(block)
        return target.view(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self.forms:
            return super().read_rows(name, start, stop)
        info, form = self.info(name), self.forms[name]
        columns = info.shape[1]
        tensors = {
            "codes": self.stored.read_rows(quantized_name(name, "codes"), start * columns, stop * columns),
            "scales": self.stored.read_rows(quantized_name(name, "scales"), start, stop),
        }
        return form.decode(tensors, (stop - start, columns), info.dtype).to(info.dtype)

    def blocks(self, name: str, elements: int = 4 << 20) -> Iterator[Tensor]:
        if name not in self.forms:
            yield from super().blocks(name, elements)
            return
        rows, columns = self.info(name).shape
        step = max(1, elements // columns)
        for start in range(0, rows, step):
            yield self.read_rows(name, start, min(start + step, rows)).view(-1)


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint without codes beside its experts: the same, if it has none.

    Raises:
        InvalidInputError: codes or scales are missing, or do not fit each other.
    """
    if (entry := moetool_entry(checkpoint.config)) is None or checkpoint.is_imagined:
        return checkpoint
    if not (modules := quantized_beside(checkpoint.settings)):
        return checkpoint
    forms = {weight_of(module): form for module, form in modules.items()}
    tensors = dict(checkpoint.tensors)
    for weight, form in forms.items():
        tensors[weight] = _decoded(checkpoint, weight, form)
        for tensor in TENSORS:
            del tensors[quantized_name(weight, tensor)]
    left = {key: value for key, value in entry.items() if key != BESIDE}
    config = {**checkpoint.config, "quantization_config": {**left, "format_version": version_of(left)}}
    known = {own.name: getattr(checkpoint, own.name) for own in fields(Checkpoint)}
    shown = {"config": config, "tensors": dict(sorted(tensors.items()))}
    return DecodedCheckpoint(**{**known, **shown}, stored=checkpoint, forms=forms)


def is_decoded(checkpoint: Checkpoint) -> bool:
    """Whether something that a checkpoint shows as matrices is stored as codes."""
    return isinstance(checkpoint, DecodedCheckpoint)


def quantized_tensors(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of all tensors that store what is quantized beside a checkpoint's experts, placeholders among them."""
    weights = map(weight_of, quantized_beside(checkpoint.settings))
    return frozenset(
        name for weight in weights for name in (weight, *(quantized_name(weight, tensor) for tensor in TENSORS))
    )


def _decoded(checkpoint: Checkpoint, weight: str, form: QuantizedMatrix) -> TensorInfo:
    """What stands for a weight, by the headers of its codes and scales."""
    held = {tensor: quantized_name(weight, tensor) for tensor in TENSORS}
    if missing := [name for name in (weight, *held.values()) if name not in checkpoint.tensors]:
        raise InvalidInputError(
            f"Tensor {missing[0]} is missing from {checkpoint.path}: config.json says that {weight} is quantized."
        )
    codes, scales = (checkpoint.tensors[name] for name in held.values())
    rows = scales.shape[0] if scales.shape else 0
    shape = rows, math.prod(codes.shape) // max(1, rows)
    try:
        promised = {tensor: stored.shape for tensor, stored in form.tensors(shape).items()}
    except ValueError as error:
        raise InvalidInputError(f"{codes.name} of {checkpoint.path}: {error}.") from error
    if not rows or promised != {"codes": codes.shape, "scales": scales.shape} or codes.dtype != torch.uint8:
        raise InvalidInputError(
            f"{codes.name} {list(codes.shape)} and {scales.name} {list(scales.shape)} of {checkpoint.path} do not make "
            f"one matrix stored as '{form.spec}'."
        )
    return replace(scales, name=weight, shape=shape, nbytes=math.prod(shape) * scales.dtype.itemsize)
