"""Storage of quantized modules beside the experts: attention projections, embeddings and the head.

A quantized module `NAME` has `NAME.moetool.codes` and `NAME.moetool.scales`, and a placeholder where `NAME.weight` was.
An embedding and the head that are one tensor stay one: it is stored, and listed, under the embedding's name.
"""

from collections.abc import Mapping

from moetool.architectures import Architecture
from moetool.architectures.base import Settings
from moetool.errors import InvalidInputError
from moetool.format.families import architecture_of
from moetool.format.marker import BESIDE, moetool_entry
from moetool.representations import parse_representation
from moetool.representations.quantized import ROW_BITS, QuantizedMatrix, coded_by_rows

GROUP = 128
TENSORS = ("codes", "scales")  # of such a form


def quantized_name(weight: str, tensor: str) -> str:
    """`model.layers.0.self_attn.q_proj.moetool.codes`, of the matrix `….q_proj.weight`."""
    return f"{weight.removesuffix('weight')}moetool.{tensor}"


def weight_of(module: str) -> str:
    """The name of a module's weight, such as `model.layers.3.self_attn.q_proj.weight`."""
    return f"{module}.weight"


def quantizable(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Modules that may be quantized, `attention` and `embeddings`, whether or not a model has all of them."""
    return {
        "attention": tuple(prefix + name for prefix in architecture.layer_prefixes for name in architecture.attention),
        "embeddings": architecture.embeddings,
    }


def quantized_beside(config: Settings) -> dict[str, QuantizedMatrix]:
    """Forms of the quantized matrices beside a model's experts, by module name, read from `config.json`.

    Raises:
        InvalidInputError: the entry lists a module that cannot be stored so, or a form that it cannot have.
    """
    listed = (moetool_entry(config) or {}).get(BESIDE)
    if not listed:
        return {}
    if not isinstance(listed, Mapping):
        raise InvalidInputError(f"quantization_config.{BESIDE} must be an object by module, not {listed!r}.")
    architecture = architecture_of(config)
    known = {name for names in quantizable(architecture).values() for name in names}
    found = {}
    for name, spec in listed.items():
        if name not in known:
            raise InvalidInputError(
                f"quantization_config.{BESIDE} has {name!r}: {architecture.name} has no such attention or embedding."
            )
        form = coded_by_rows(parse_representation(str(spec)))
        if form is None:
            read = ", ".join(f"'{QuantizedMatrix.kind}:{bits}:GROUP'" for bits in ROW_BITS)
            raise InvalidInputError(
                f"quantization_config.{BESIDE}: {name} is stored as '{spec}'; this moetool reads {read} there."
            )
        found[name] = form
    return found
