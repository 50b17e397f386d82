"""Assignment of a checkpoint's tensors to the decoder layers that compute with them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from moetool.architectures.described import towers_in
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.promises import check_shape, lacking
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.runtime.loading import surplus

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTSIDE = -1  # the block of everything outside decoder layers


def blocks_of(
    checkpoint: Checkpoint,
    model: "PreTrainedModel",
    mapping: Iterable[WeightRenaming | WeightConverter],
    layers: Mapping[str, int],
    experts: ExpertReader | None,
) -> Mapping[int, Mapping[str, torch.dtype]]:
    """Tensors on disk of each decoder layer, and of all other parts (`OUTSIDE`), with their dtypes in memory.

    Matrices of experts are not among them, nor towers beside the language model.

    Args:
        checkpoint: with its headers.
        model: of its config, on the meta device.
        mapping: transformers' rules of conversion for this model.
        layers: the number of each decoder layer, by the prefix of its tensors' names.
        experts: reader of the experts, if they are whole networks.

    Raises:
        InvalidInputError: a tensor is missing, has another shape than the config promises, or is a weight inside a
            layer that the model does not have.
    """
    rules = list(mapping)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    targets = {pattern: rule.target_patterns for rule in converters for pattern in rule.source_patterns}
    state = model.state_dict()
    blocks: dict[int, dict[str, torch.dtype]] = defaultdict(dict)
    covered = set(getattr(model, "all_tied_weights_keys", None) or {})
    aside = tuple(f"{path}." for path, _ in towers_in(model))
    unknown: list[str] = []
    for name in checkpoint.tensors:
        if experts is not None and name in experts.names:
            continue
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        renamed = renamed if renamed in state else name
        if renamed not in state:
            unknown.append(name)  # passes through to the output untouched, unless a layer would compute with it
            continue
        found, promised = checkpoint.tensors[name].shape, tuple(state[renamed].shape)
        if converter is None:
            check_shape(checkpoint.path, name, found, promised)
        covered.add(renamed)
        if converter is not None:
            first, *others = targets[converter]
            covered.update(renamed.replace(first, other) for other in others)
        if not renamed.startswith(aside):
            block = next((layer for prefix, layer in layers.items() if name.startswith(prefix)), OUTSIDE)
            blocks[block][name] = state[renamed].dtype
    _refuse_unused(checkpoint, model, [name for name in unknown if name.startswith(tuple(layers))])
    in_memory = _filled_by_reader(experts)
    due = (name for name, own in state.items() if own.numel() and name not in covered)
    if missing := [name for name in due if not any(own in name for own in in_memory)]:
        raise lacking(checkpoint.path, missing, checkpoint.tensors)
    return blocks


def _refuse_unused(checkpoint: Checkpoint, model: "PreTrainedModel", unknown: Iterable[str]) -> None:
    """Raise `InvalidInputError` for weights inside layers that the model would compute without."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    inside = [
        name
        for name in unknown
        if name.endswith((".weight", ".bias")) and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if inside := surplus(inside, checkpoint.settings):
        raise InvalidInputError(
            f"{checkpoint.path} has weights inside layers that the model of config.json does not have: "
            f"{inside[0]} ({len(inside)} in all). What was measured without them would be wrong; refusing."
        )


def _filled_by_reader(experts: ExpertReader | None) -> list[str]:
    """Parts of the names of tensors in memory that the reader of the experts fills."""
    if experts is None:
        return []
    family = experts.architecture
    parts = [f".{family.experts_module}."]
    if any(experts.layout(layer).is_extended for layer in experts.moe_layers):
        parts.append(f".{family.shared_expert_module}.")
    return parts
