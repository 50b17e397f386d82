"""Compressed experts of one layer as parameters that another engine makes room for and fills, tensor by tensor."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.architectures.base import Settings
from moetool.architectures.shape import fused_name
from moetool.checkpoint.experts import ExpertReader
from moetool.errors import InvalidInputError, UsageError
from moetool.format.beside import quantized_beside
from moetool.format.entry import layer_layouts
from moetool.format.families import architecture_of
from moetool.format.kinds import custom_module
from moetool.format.layout import BASE_CHANNELS, LayerLayout
from moetool.format.marker import METHOD, STORED, moetool_entry
from moetool.numerics.index_sets import are_indices
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.fused import without_tensors
from moetool.runtime.modules.insertion import path_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def served_layouts(config: Settings, *, decodes: bool = False) -> dict[int, LayerLayout]:
    """The layouts of a checkpoint's layers, by its settings, if another engine can hold them in its own model.

    `decodes`: whether moetool loads the checkpoint, not the engine (`FilledExperts.fill` and `plain_tensors`).

    Raises:
        UsageError: it would need more than the experts to be moetool's, or moetool's loader.
    """
    if (spec := custom_module(config)) is not None:
        raise UsageError(f"This model has modules that only moetool runs ('{spec.key}' in its quantization_config).")
    if not decodes and needs_decoding(config):
        raise _wants_loader("Attention, embeddings or other matrices of this model are in few bits, too")
    if config.get("text_config") is not None:
        raise UsageError(
            "The language model lies in another model, which engines put together in ways of their own. Export it: "
            "moetool export MODEL OUTPUT."
        )
    architecture, layouts = architecture_of(config), layer_layouts(config)
    if not decodes and architecture.is_fused:
        raise _wants_loader(
            f"{architecture.name} has all experts of a layer in one tensor, which engines cut up under names of their "
            "own"
        )
    extended = [layer for layer, layout in layouts.items() if layout.is_extended]
    if not decodes and extended:
        raise _wants_loader(f"Layer {extended[0]} stores its shared expert on the base of the others")
    if dynamic := [layer for layer in extended if layouts[layer].dynamic_channels]:
        raise UsageError(
            f"The shared expert of layer {dynamic[0]} skips channels of the base in every batch, and engines run it "
            "elsewhere. Export it: moetool export MODEL OUTPUT."
        )
    return layouts


def _wants_loader(what: str) -> UsageError:
    return UsageError(f"{what}: run vLLM with --load-format {METHOD}, which takes that apart while it is loaded.")


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


def _in_family(model: "PreTrainedModel", checkpoint: Settings, layer: int) -> nn.Module:
    architecture = architecture_of(checkpoint)
    path = f"{architecture.layer_path(layer)}.{architecture.experts_module}"
    return model.get_submodule(path_in(model, path))


def _without_memory(native: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of experts whose tensors have their shapes, in a dtype and on a device, and one number each."""
    made = without_tensors(native)
    for name, own in native.named_parameters(recurse=False):
        single = torch.zeros((), dtype=dtype, device=device)
        made.register_parameter(name, nn.Parameter(single.expand(own.shape), requires_grad=False))
    return made


class FilledExperts:
    """`SharedBaseExperts` that are filled from a checkpoint: by the names of its tensors, each once, or from its files.

    Attributes:
        module: the experts, all of whose tensors are parameters without gradients.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        checkpoint: Settings,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        experts: Sequence[int] | None = None,
    ) -> None:
        """Build empty.

        Args:
            model: transformers' own, on the meta device.
            checkpoint: its settings.
            layer: whose experts.
            dtype: of what is stored in the model's own.
            device: where they are to lie.
            experts: the numbers of those that this process holds, all if nothing is said.
        """
        architecture, whole = architecture_of(checkpoint), layer_layouts(checkpoint)[layer]
        self._experts = tuple(range(whole.shape.experts) if experts is None else experts)
        self._layer, self._layout = layer, whole.of(self._experts)
        native = _without_memory(_in_family(model, checkpoint, layer), dtype, device)
        self.module = SharedBaseExperts(native, self._layout).eval()
        _hold_as_parameters(self.module)
        self._prefix, shape = architecture.experts_prefix(layer), self._layout.shape
        self._native: dict[str, tuple[int, Role]] = {}
        for role in shape.roles:
            named = self._experts if self._layout.weights[role] is None else [0]
            for place, expert in enumerate(named):
                name = architecture.weight_name(layer, expert, role).removeprefix(self._prefix)
                self._native[name] = place, role
        names = [name for name, _ in self._layout.own_tensors()]
        self._own = {self._on_disk(name): self.module.get_parameter(name) for name in names}
        self._left = {*self._native, *self._own}

    def _on_disk(self, name: str) -> str:
        """The name in the file of one of moetool's tensors, whose experts have their numbers among all there."""
        start, dot, rest = name.partition(".")
        expert, _, of_it = rest.partition(".")
        return f"{start}{dot}{self._experts[int(expert)]}.{of_it}" if expert.isdigit() else name

    @property
    def fused(self) -> dict[Role, nn.Parameter]:
        """The tensor in which the matrices of a role lie that have native names: a base, a placeholder, or all."""
        groups = self._layout.shape.groups
        return {role: self.module.get_parameter(fused_name(roles)) for roles in groups for role in roles}

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
        name = next((name for name, own in self._native.items() if own == (expert, role)), None)
        if name is None:
            raise InvalidInputError(
                f"Layer {self._layer} has a matrix of expert {expert} under its family's name, where its config.json "
                "promises a delta."
            )
        self._copy(name, self.module.native_matrix(expert, role), tensor)

    @torch.no_grad()
    def fill(self, reader: ExpertReader) -> None:
        """Read all of them from the files of their checkpoint.

        Raises:
            InvalidInputError: a file cannot be read.
        """
        layout = self._layout
        for role in layout.shape.roles:
            if layout.weights[role] is None:
                for place, expert in enumerate(self._experts):
                    self.module.native_matrix(place, role).copy_(reader.dense(self._layer, expert, role))
            elif layout.has_dense_base(role):
                self.module.native_matrix(0, role).copy_(reader.base(self._layer, role))
            if (biases := self.module.biases_of(role)) is not None:
                for place, expert in enumerate(self._experts):
                    biases[place].copy_(reader.bias(self._layer, expert, role))
        for name, own in self._own.items():
            self._copy(name, own.data, reader.checkpoint.read(self._prefix + name))
        self._left.clear()

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
