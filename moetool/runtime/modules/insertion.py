"""Putting custom modules where the config of a checkpoint lists them, and keeping others from loading these.

The module of a kind is in the file of its name in this directory, which has a function `insert`.

Where the dense model had a weight that a custom module replaces, there is a placeholder of one number: a loader that
does not know moetool fails on its shape instead of filling the weight at random.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from moetool.architectures import Architecture, Role
from moetool.architectures.dense import find_dense_architecture
from moetool.architectures.shape import fused_name
from moetool.errors import InvalidInputError
from moetool.format.kinds import custom_module
from moetool.format.kinds.base import PLACEHOLDER
from moetool.representations.base import KeepsWide

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CustomLayer(KeepsWide):
    """A module that only moetool's checkpoints have: all its tensors must be in the file.

    Attributes:
        is_efficient: its experts are small beside what they share, and trained alone unless one asks for more.
    """

    is_efficient: ClassVar[bool] = False

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that `--train experts` trains: by default all of the module's."""
        return self.parameters()


class Routed(CustomLayer):
    """A module whose router `gate` gives logits `[tokens, experts]`, of which the `top_k` largest count."""

    gate: nn.Linear
    num_experts: int
    top_k: int


def experts_per_token(model: "PreTrainedModel") -> int:
    """The k of top-k routing, the largest of all layers'; 1 for a model that has none."""
    custom = next((module.top_k for module in model.modules() if isinstance(module, Routed)), 1)
    told = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
    return int((max(told) if isinstance(told, list) else told) or custom)


def add_placeholder(module: nn.Module, weight: str, like: Tensor) -> None:
    """Put a placeholder where others expect a weight below `module`, by its name (`up_proj.weight`)."""
    *path, name = weight.split(".")
    holder = module
    for part in path:
        if not hasattr(holder, part):
            holder.add_module(part, nn.Module())
        holder = getattr(holder, part)
    holder.register_buffer(name, torch.zeros(PLACEHOLDER, device=like.device, dtype=like.dtype))


def is_placeholder(tensor: Tensor) -> bool:
    """Whether a tensor has the shape of the placeholder that stands where a weight is stored elsewhere."""
    return tuple(tensor.shape) == PLACEHOLDER


def path_in(model: "PreTrainedModel", path: str) -> str:
    """Where the module of a causal language model that `path` names, on disk or in memory, is in `model`, which may be
    its bare decoder, or the language model without what lies around it."""
    return paths_in(model, [path])[path]


def paths_in(model: "PreTrainedModel", paths: Iterable[str]) -> dict[str, str]:
    """Where modules are in a model, by the paths that name them, as `path_in`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    prefix = "" if hasattr(model, model.base_model_prefix) else f"{model.base_model_prefix}."
    found = {path: path.removeprefix(prefix) for path in paths}
    modules = {name for name, _ in model.named_modules()}
    if elsewhere := [path for path, place in found.items() if place not in modules]:
        mapping = get_model_conversion_mapping(model, None, None)
        renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        for path in elsewhere:
            renamed, _ = rename_source_key(f"{path}.weight", renamings, [])
            found[path] = renamed.removesuffix(".weight").removeprefix(prefix)
    return found


def fused_experts(
    model: "PreTrainedModel", architecture: Architecture
) -> Iterator[tuple[int, tuple[Role, ...], object]]:
    """The tensors in which a model of transformers' own holds the matrices of all experts of a layer: the layer, the
    roles of these, and the parameter; `None` where it has none."""
    end, layers = architecture.experts_module, architecture.moe_layers
    inside = {layer: f"{architecture.layer_path(layer)}.{end}" for layer in layers}
    places = paths_in(model, inside.values())
    for layer, path in inside.items():
        for roles in architecture.shape.groups:
            yield layer, roles, getattr(model.get_submodule(places[path]), fused_name(roles), None)


def insert_modules(model: "PreTrainedModel", config: Mapping[str, object]) -> None:
    """Build the custom modules that the `quantization_config` of `config` describes, empty, in their place.

    Raises:
        InvalidInputError: it cannot be read, or does not fit the model.
    """
    if (spec := custom_module(config)) is None:
        return
    module = importlib.import_module(f"moetool.runtime.modules.{spec.name}")
    try:
        module.insert(model, find_dense_architecture(config), spec)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(f"quantization_config: {spec.key} does not fit the model: {error!r}.") from error
