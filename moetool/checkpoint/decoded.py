"""A checkpoint that is quantized beside its experts, as if it were not."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.matrix import DecodedMatrix, Spans
from moetool.errors import InvalidInputError
from moetool.format.beside import TENSORS, quantized_beside, quantized_name, weight_of
from moetool.format.marker import BESIDE, moetool_entry, version_of
from moetool.numerics.packing import unpack_span
from moetool.numerics.quantization import dequantize
from moetool.representations.quantized import QuantizedMatrix, check_rows, matrix_shape


@dataclass(frozen=True)
class CodedMatrix(DecodedMatrix):
    """A matrix `[out, in]` that moetool's codes stand for. `parts` are scales and codes.

    Attributes:
        form: of the codes.
    """

    form: QuantizedMatrix

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        (scales, codes), bits, (rows, columns) = self.parts, self.form.bits, self.shape
        groups = self.form.tensors((rows, columns))["scales"].shape[1]
        own = unpack_span(lambda first, size: spans(codes, first, (size,)), bits, (rows, columns), start, stop)
        return dequantize(own, spans(scales, start * groups, (stop - start, groups)), bits, torch.float32)


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view of a checkpoint in which modules beside the experts are decoded; the checkpoint itself if none is
    coded.

    Raises:
        InvalidInputError: codes or scales are missing, or do not fit each other.
    """
    if (entry := moetool_entry(checkpoint.config)) is None or checkpoint.is_imagined:
        return checkpoint
    if not (modules := quantized_beside(checkpoint.settings)):
        return checkpoint
    matrices = [_decoded(checkpoint, weight_of(module), form) for module, form in modules.items()]
    left = {key: value for key, value in entry.items() if key != BESIDE}
    config = {**checkpoint.config, "quantization_config": {**left, "format_version": version_of(left)}}
    return checkpoint.showing(matrices, config)


def quantized_tensors(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of all tensors that store what is quantized beside a checkpoint's experts, placeholders among them."""
    weights = map(weight_of, quantized_beside(checkpoint.settings))
    return frozenset(
        name for weight in weights for name in (weight, *(quantized_name(weight, tensor) for tensor in TENSORS))
    )


def _decoded(checkpoint: Checkpoint, weight: str, form: QuantizedMatrix) -> CodedMatrix:
    """What stands for a weight, by the headers of its codes and scales."""
    held = {tensor: quantized_name(weight, tensor) for tensor in TENSORS}
    if missing := [name for name in (weight, *held.values()) if name not in checkpoint.tensors]:
        raise InvalidInputError(
            f"Tensor {missing[0]} is missing from {checkpoint.path}: config.json says that {weight} is quantized."
        )
    codes, scales = (checkpoint.tensors[name] for name in held.values())
    rows = scales.shape[0] if scales.shape else 0
    shape = matrix_shape(form, math.prod(codes.shape), rows)
    try:
        check_rows(form, rows)
        promised = {tensor: stored.shape for tensor, stored in form.tensors(shape).items()}
    except ValueError as error:
        raise InvalidInputError(f"{codes.name} of {checkpoint.path}: {error}.") from error
    if not rows or promised != {"codes": codes.shape, "scales": scales.shape} or codes.dtype != torch.uint8:
        raise InvalidInputError(
            f"{codes.name} {list(codes.shape)} and {scales.name} {list(scales.shape)} of {checkpoint.path} do not make "
            f"one matrix stored as '{form.spec}'."
        )
    return CodedMatrix(weight, shape, scales.dtype, (scales.name, codes.name), form)
