"""The last check of a GGUF file: a layer of it, read back by its own metadata, against the model it was made from."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from moetool.checkpoint.gguf_model import GgufModel
from moetool.errors import InvalidInputError, VerificationError
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.blocks import NumberType
from moetool.job.result import LoadedLayer

# The most that rounding to a type takes of a matrix, ‖Δ‖ / ‖matrix‖, with room for unusual distributions.
_ROUNDING: dict[NumberType, float] = {
    "f32": 1e-6, "f16": 2e-3, "bf16": 1e-2, "q8_0": 3e-2, "q6_k": 0.1, "q5_k": 0.2, "q5_1": 0.2, "q5_0": 0.2,
    "q4_k": 0.4, "q4_1": 0.4, "q4_0": 0.4, "mxfp4": 0.4, "iq4_xs": 0.4, "iq4_nl": 0.4, "q3_k": 0.6, "iq3_s": 0.6,
    "iq3_xxs": 0.7, "q2_k": 0.9, "iq2_s": 0.9, "iq2_xs": 1.0, "iq2_xxs": 1.2,
}  # fmt: skip
# Codes that make good for each other's errors go far from a matrix where few inputs carry nearly everything: 4-bit
# codes of SmolLM2's queries by .52 of their size, others by more than all of it. But they point the way that it does:
# the least cosine in trials was .24, where rows in another order have less than .05; and they have about its size.
_ALIKE, _SIZES = 0.1, (0.5, 2.0)
_TINY = 1e-30


def is_rounding(stored: Tensor, matrix: Tensor, types: set[NumberType], *, chosen: bool) -> bool:
    """Whether a matrix read back is that of the source, rounded to one of some types; `chosen` if the codes were, on a
    text."""
    stored, matrix = stored.float(), matrix.float()
    size, own, error = (float(tensor.norm()) for tensor in (stored, matrix, stored - matrix))
    if size == own == 0:
        return True
    is_alike = float((stored * matrix).sum()) > _ALIKE * size * own and _SIZES[0] * own <= size <= _SIZES[1] * own
    return is_alike and (chosen or error <= max(_ROUNDING[one] for one in types) * own)


def prove_file(file: Path, source: GgufSource, types: set[NumberType], *, chosen: bool) -> LoadedLayer:
    """Compare the headers, and every matrix of one layer, with the source; a file that differs is deleted.

    Args:
        file: that was written.
        source: of its tensors.
        types: in which they are stored.
        chosen: whether codes were chosen on a text.

    Raises:
        VerificationError: the file says something else than the model, or a matrix differs by more than rounding.
    """
    layer = 0 if source.experts is None else source.experts.moe_layers[0]
    try:
        found = GgufModel(file, source)
        if found.heads != source.heads_in_file:
            raise InvalidInputError(f"it has {found.heads} heads of queries and keys, the model {source.heads_in_file}")
        expected, worst = dict(_of_source(source, layer)), 0.0
        for name, tensor in found.unit(layer, known_alone=True):
            if (before := expected.get(name)) is None:
                continue  # a shared expert that is stored on the base
            error = ((tensor - before.float()).norm() / before.float().norm().clamp_min(_TINY)).item()
            if not is_rounding(tensor, before, types, chosen=chosen):
                raise InvalidInputError(f"{name} differs by {error:.2g} of its size, which rounding does not explain")
            worst = max(worst, error)
    except InvalidInputError as error:
        file.unlink()  # llama.cpp would load it
        raise VerificationError(
            f"Read back, {file} is not what was to be written: {str(error).rstrip('.')}. It was deleted. This is a "
            "defect of moetool: please report it."
        ) from error
    return LoadedLayer(layer, float(f"{worst:.2g}"))


def _of_source(source: GgufSource, layer: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer by name, experts in the family's own layout."""
    reader, prefix = source.experts, source.layer_prefix(layer)
    names = set() if reader is None else reader.names
    for name in source.checkpoint.tensors:
        if name.startswith(prefix) and name not in names:
            yield name, source.checkpoint.read(name)
    if reader is not None:
        for roles in reader.shape.groups:
            yield from reader.native_tensors(
                layer,
                roles,
                reader.shape.experts,
                lambda role, expert: reader.dense(layer, expert, role).to(reader.dtype),
            )
