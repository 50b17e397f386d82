"""Check of the tensors inside MoE blocks against what `config.json` promises."""

from collections.abc import Mapping

from moetool.architectures import Architecture
from moetool.architectures.base import EXPERT_KEYS, WIDTH_KEYS, whole_number
from moetool.architectures.described import language_entries
from moetool.checkpoint.promises import check_shape, lacking
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError


def check_blocks(checkpoint: Checkpoint, architecture: Architecture, experts: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `InvalidInputError` for a missing, surplus or wrongly shaped tensor of the MoE blocks.

    Args:
        checkpoint: with its headers.
        architecture: the family, as these files have it.
        experts: shapes of the tensors that store experts, biases included, by name.
    """
    shape, layers, tensors = architecture.shape, architecture.moe_layers, checkpoint.tensors
    routers = dict.fromkeys(map(architecture.router_name, layers), architecture.routed_to)
    expected = {**experts, **routers}
    unsaid = _unsaid(checkpoint, architecture)
    if missing := [name for name in expected if name not in tensors]:
        promise = f" It promises {shape.experts} experts in {len(layers)} MoE layers.{unsaid}"
        raise lacking(checkpoint.path, missing, tensors, promise)
    for name, promised in expected.items():
        check_shape(checkpoint.path, name, tensors[name].shape, promised, unsaid)
    blocks = tuple(map(architecture.block_prefix, layers))
    corrections = {architecture.layer_prefix(layer) + name for layer in layers for name in architecture.router_others}
    for name in tensors:
        if name in expected or not name.startswith(blocks) or 0 in tensors[name].shape:  # as of no shared expert
            continue
        inside = next(name.removeprefix(prefix) for prefix in blocks if name.startswith(prefix))
        if name not in corrections and not inside.startswith(architecture.others):
            raise InvalidInputError(
                f"Tensor {name} is inside an MoE block, and moetool does not know what it is for. "
                "Refusing to guess: a rewritten checkpoint would be wrong."
            )


def _unsaid(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """Sentences on the numbers of experts that are transformers' and not the config's own."""
    config, settings, shape = language_entries(checkpoint.config), checkpoint.settings, architecture.shape
    numbers = ((EXPERT_KEYS, shape.experts), (WIDTH_KEYS, shape.intermediate))
    said = ([key for key in keys if whole_number(settings, key) == number] for keys, number in numbers)
    unsaid = [keys[0] for keys in said if keys and not config.keys() & {*keys}]
    return "".join(f" It has no {key}, for which transformers takes {settings[key]}." for key in unsaid)
