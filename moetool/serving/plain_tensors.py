"""Tensors of a checkpoint as another engine's modules take them: what is in few bits beside the experts is decoded."""

from collections.abc import Iterator

from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.format.beside import TENSORS, quantized_beside, quantized_name, weight_of
from moetool.representations.quantized import QuantizedMatrix


def plain_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Read every tensor of a compressed checkpoint, one at a time, with its name.

    Experts come as they are stored. Attention, embeddings and head come as numbers: in fp32 where `--include` has
    stored them in 8 bits, in the model's dtype where `--keep-stored` has left them in the bits of another tool.

    Raises:
        InvalidInputError: a file cannot be read.
    """
    forms = {weight_of(module): form for module, form in quantized_beside(checkpoint.settings).items()}
    parts = {quantized_name(weight, tensor) for weight in forms for tensor in TENSORS}
    for name in checkpoint.tensors:
        if name in forms:
            yield name, _decoded(checkpoint, name, forms[name])
        elif name not in parts:
            yield name, checkpoint.read(name)


def _decoded(checkpoint: Checkpoint, weight: str, form: QuantizedMatrix) -> Tensor:
    """The matrix `[out, in]`, fp32, that codes and scales beside a placeholder stand for."""
    tensors = {tensor: checkpoint.read(quantized_name(weight, tensor)) for tensor in TENSORS}
    rows, dtype = len(tensors["scales"]), checkpoint.tensors[weight].dtype
    return form.decode(tensors, (rows, tensors["codes"].numel() // rows), dtype)
