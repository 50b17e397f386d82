"""Tensors of a checkpoint as another engine's modules take them: what is compressed beside the experts is decoded."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.format.beside import TENSORS, quantized_beside, quantized_name, weight_of
from moetool.representations.quantized import QuantizedMatrix, matrix_shape


def plain_tensors(reader: ExpertReader) -> Iterator[tuple[str, Tensor]]:
    """Read every tensor of a compressed checkpoint but its compressed experts, one at a time, with its name.

    Attention, embeddings and head come as numbers: in fp32 where `--include` has stored them in codes, in the model's
    dtype where `--keep-stored` has left them in the bits of another tool. So do shared experts, in fp32 where they are
    stored on the base of the others.

    Raises:
        InvalidInputError: a file cannot be read.
    """
    checkpoint = reader.checkpoint
    forms = {weight_of(module): form for module, form in quantized_beside(checkpoint.settings).items()}
    apart = {quantized_name(weight, tensor) for weight in forms for tensor in TENSORS}
    for layer in reader.layouts:
        apart |= {spec.name for spec in reader.specs(layer)}
        apart |= {reader.architecture.bias_name(layer, role) for role in reader.shape.biases}
    for name in checkpoint.tensors:
        if name in forms:
            yield name, _decoded(checkpoint, name, forms[name])
        elif name not in apart:
            yield name, checkpoint.read(name)
    for layer, layout in reader.layouts.items():
        if layout.is_extended:
            yield from reader.shared_expert_tensors(layer, partial(reader.dense, layer, reader.shape.experts))


def _decoded(checkpoint: Checkpoint, weight: str, form: QuantizedMatrix) -> Tensor:
    """The matrix `[out, in]`, fp32, that codes and scales beside a placeholder stand for."""
    tensors = {tensor: checkpoint.read(quantized_name(weight, tensor)) for tensor in TENSORS}
    shape = matrix_shape(form, tensors["codes"].numel(), len(tensors["scales"]))
    return form.decode(tensors, shape, checkpoint.tensors[weight].dtype)
