"""Compressed experts of one layer as parameters that another engine makes room for and fills, tensor by tensor."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.architectures.base import Settings
from moetool.errors import InvalidInputError, UsageError
from moetool.format.beside import quantized_beside
from moetool.format.entry import layer_layouts
from moetool.format.families import architecture_of
from moetool.format.kinds import custom_module
from moetool.format.layout import BASE_CHANNELS, LayerLayout
from moetool.format.marker import METHOD, STORED, moetool_entry
from moetool.numerics.index_sets import are_indices
from moetool.runtime.modules.experts import SharedBaseExperts

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def served_layouts(config: Settings, *, decodes: bool = False) -> dict[int, LayerLayout]:
    """The layouts of a checkpoint's layers, by its settings, if another engine can hold them in its own model.

    `decodes`: whether what is in few bits beside the experts is decoded while it is loaded (`plain_tensors`).

    Raises:
        UsageError: it would need more than the routed experts to be moetool's.
    """
    if (spec := custom_module(config)) is not None:
        raise UsageError(f"This model has modules that only moetool runs ('{spec.key}' in its quantization_config).")
    if not decodes and needs_decoding(config):
        raise UsageError(
            f"Attention, embeddings or other matrices of this model are in few bits, too: run vLLM with --load-format "
            f"{METHOD}, which decodes them while they are loaded."
        )
    if config.get("text_config") is not None:
        raise UsageError(
            "The language model lies in another model, which engines put together in ways of their own. Export it: "
            "moetool export MODEL OUTPUT."
        )
    architecture, layouts = architecture_of(config), layer_layouts(config)
    if architecture.is_fused:
        raise UsageError(
            f"{architecture.name} has all experts of a layer in one tensor, which engines cut up under names of their "
            "own. Served are families with experts one by one, such as Mixtral or Qwen3-MoE."
        )
    if any(layout.shape.biases for layout in layouts.values()):
        raise UsageError("These experts have biases, which are not served.")
    if extended := [layer for layer, layout in layouts.items() if layout.is_extended]:
        raise UsageError(
            f"Layer {extended[0]} stores its shared expert on the base of the others, which engines run elsewhere. "
            "Compress without --shared-expert, or export it: moetool export MODEL OUTPUT."
        )
    return layouts


def needs_decoding(config: Settings) -> bool:
    """Whether a checkpoint has matrices beside its experts in few bits, by `--include` or `--keep-stored`."""
    return bool(quantized_beside(config) or (moetool_entry(config) or {}).get(STORED))


def layer_of(prefix: str) -> int:
    """The number in a module's path such as `model.layers.3.mlp.experts`.

    Raises:
        InvalidInputError: there is none.
    """
    if (found := _LAYER.search(prefix)) is None:
        raise InvalidInputError(f"{prefix} does not say which layer it belongs to.")
    return int(found[1])


class _Native(nn.Module):
    """What experts in the family's own form would tell: config, activation, dtype and device."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        self.config, self.act_fn = config, ACT2FN[config.hidden_act]
        self.gate_up_proj = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)


class FilledExperts:
    """`SharedBaseExperts` that are filled from a checkpoint by the names of its tensors, each once.

    Attributes:
        module: the experts, all of whose tensors are parameters without gradients.
    """

    def __init__(self, config: Any, checkpoint: Settings, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        """Build empty. `config` is transformers' of the model, `checkpoint` its settings."""
        architecture, self._layout = architecture_of(checkpoint), layer_layouts(checkpoint)[layer]
        self._layer, shape = layer, self._layout.shape
        self.module = SharedBaseExperts(_Native(config, dtype, device), self._layout).eval()
        _hold_as_parameters(self.module)
        prefix = architecture.experts_prefix(layer)
        self._native: dict[str, tuple[int, Role]] = {}
        for role in shape.roles:
            count = shape.experts if self._layout.weights[role] is None else 1
            for expert in range(count):
                name = architecture.weight_name(layer, expert, role).removeprefix(prefix)
                self._native[name] = expert, role
        fused = set(self.fused.values())
        self._own = {name: own for name, own in self.module.named_parameters() if own not in fused}
        self._left = {*self._native, *self._own}

    @property
    def fused(self) -> dict[Role, nn.Parameter]:
        """The tensor in which the matrices of a role lie that have native names: a base, a placeholder, or all."""
        gate_up, down = map(self.module.get_parameter, ("gate_up_proj", "down_proj"))
        return {"gate": gate_up, "up": gate_up, "down": down}

    @property
    def own(self) -> Mapping[str, nn.Parameter]:
        """All others, by their names in the file, relative to the experts."""
        return self._own

    def load(self, name: str, tensor: Tensor) -> None:
        """Take a tensor by its name in the file, relative to the experts.

        Raises:
            InvalidInputError: there is no place for it, or it is of another shape or type.
        """
        if name in self._native:
            self.load_native(*self._native[name], tensor)
        elif name in self._own:
            self._copy(name, self._own[name].data, tensor)
        else:
            raise InvalidInputError(
                f"{self._named(name)} is in the checkpoint, and its config.json has no such tensor."
            )

    def load_native(self, expert: int, role: Role, tensor: Tensor) -> None:
        """Fill in a matrix `[out, in]` that lies under the native name of an expert."""
        name = next((name for name, place in self._native.items() if place == (expert, role)), None)
        if name is None:
            raise InvalidInputError(
                f"Layer {self._layer} has a matrix of expert {expert} under its family's name, where its config.json "
                "promises a delta."
            )
        roles = self._layout.shape.group(role)
        self._copy(name, self.fused[role].data[expert].chunk(len(roles))[roles.index(role)], tensor)

    def _copy(self, name: str, place: Tensor, tensor: Tensor) -> None:
        if place.shape != tensor.shape or place.is_floating_point() != tensor.is_floating_point():
            raise InvalidInputError(
                f"{self._named(name)} is {tensor.dtype} {list(tensor.shape)}, and must be {place.dtype} "
                f"{list(place.shape)}."
            )
        place.copy_(tensor)
        self._left.discard(name)

    def finish(self) -> None:
        """All is loaded: raise `InvalidInputError` if it is not, or not what it has to be."""
        if self._left:
            raise InvalidInputError(
                f"{len(self._left)} tensors of layer {self._layer} are missing from the checkpoint, the first "
                f"{min(self._left)}."
            )
        channels, width = self._own.get(BASE_CHANNELS), self._layout.shape.intermediate
        if channels is not None and not are_indices(channels, width):
            raise InvalidInputError(f"{self._named(BASE_CHANNELS)} must hold different indices below {width}.")

    def _named(self, name: str) -> str:
        return f"Layer {self._layer}: {name}"


def _hold_as_parameters(module: nn.Module) -> None:
    """Engines look for parameters alone: buffers that are stored become some. None gets gradients."""
    for holder in module.modules():
        for name, buffer in list(holder.named_buffers(recurse=False)):
            if name not in holder._non_persistent_buffers_set:
                delattr(holder, name)
                holder.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    module.requires_grad_(False)
