"""Reading experts from a checkpoint by role, whatever their representation on disk."""

import torch
from torch import Tensor

from moetool.architectures import ROLES, Architecture, MoEShape, Role
from moetool.checkpoint.format import layer_layouts
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.representations.layout import BASE_CHANNELS, LayerLayout, delta_name, native_layout


class ExpertReader:
    """The experts of a checkpoint. Holds no weights; every call reads what it returns.

    Raises:
        InvalidInputError: on construction, if the files do not hold exactly the experts that `config.json` promises.
    """

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self.checkpoint, self.architecture = checkpoint, architecture
        self.shape: MoEShape = architecture.shape(checkpoint.config)
        self.layouts: dict[int, LayerLayout] = layer_layouts(checkpoint.config)
        self.moe_layers: tuple[int, ...] = architecture.moe_layers(checkpoint.config)
        self._check()

    def has(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return layer in self.moe_layers

    def layout(self, layer: int) -> LayerLayout:
        """How a MoE layer's experts are stored."""
        return self.layouts.get(layer) or native_layout(self.shape)

    def tensor_shapes(self, layer: int, layout: LayerLayout | None = None) -> dict[str, tuple[int, ...]]:
        """Every tensor that stores a layer's experts, by full name on disk, in the order in which it is written."""
        layout = layout or self.layout(layer)
        prefix = self.architecture.experts_prefix(layer)
        shapes: dict[str, tuple[int, ...]] = {}
        for role in ROLES:
            if layout.weights[role] is not None:
                shapes[self.architecture.weight_name(layer, 0, role)] = layout.base_shape(role)
                continue
            for expert in range(self.shape.experts):
                shapes[self.architecture.weight_name(layer, expert, role)] = self.shape.matrix(role)
        if layout.is_pruned:
            shapes[prefix + BASE_CHANNELS] = (layout.base_channels,)
        shapes.update({prefix + name: shape for name, shape in layout.delta_shapes()})
        return shapes

    def _check(self) -> None:
        """Headers against promises: missing, surplus and wrongly shaped tensors of the MoE blocks."""
        architecture, tensors = self.architecture, self.checkpoint.tensors
        if absent := sorted(set(self.layouts) - set(self.moe_layers)):
            raise InvalidInputError(f"quantization_config lists layers {absent}, which have no experts in the files.")
        blocks = {architecture.block_prefix(layer): layer for layer in self.moe_layers}
        expected: dict[str, tuple[int, ...]] = {}
        for layer in self.moe_layers:
            expected[architecture.router_name(layer)] = (self.shape.experts, self.shape.hidden)
            expected.update(self.tensor_shapes(layer))
        if missing := [name for name in expected if name not in tensors]:
            raise InvalidInputError(
                f"Tensor {missing[0]} is missing from {self.checkpoint.path} ({len(missing)} missing in all): "
                f"config.json promises {self.shape.experts} experts in {len(self.moe_layers)} MoE layers."
            )
        for name, shape in expected.items():
            if tensors[name].shape != shape:
                raise InvalidInputError(
                    f"Tensor {name} has shape {list(tensors[name].shape)}, config.json promises {list(shape)}."
                )
        for name in tensors:
            inside = next((prefix for prefix in blocks if name.startswith(prefix)), None)
            if inside and name not in expected and name.removeprefix(inside) not in architecture.extra_block_names:
                raise InvalidInputError(
                    f"Tensor {name} is inside a MoE block, and moetool does not know what it is for. "
                    "Refusing to guess: a rewritten checkpoint would be wrong."
                )

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of the experts."""
        return self.checkpoint.tensors[self.architecture.weight_name(self.moe_layers[0], 0, "gate")].dtype

    def stored(self, layer: int, expert: int, role: Role) -> Tensor | None:
        """The expert's own matrix as it is on disk, `None` where it is only stored as a difference to a base."""
        weights = self.layout(layer).weights[role]
        if weights is None:
            return self.checkpoint.read(self.architecture.weight_name(layer, expert, role))
        if weights[expert].uses_base:
            return None
        return self.checkpoint.read(self.architecture.experts_prefix(layer) + delta_name(expert, role, "weight"))

    def base(self, layer: int, role: Role) -> Tensor:
        """The stored base of a layer that has one, `[out, in]` without pruned channels, in its storage dtype."""
        return self.checkpoint.read(self.architecture.weight_name(layer, 0, role))

    def base_channels(self, layer: int) -> Tensor:
        """Indices (int64) of the intermediate channels that the stored base has."""
        layout = self.layout(layer)
        if not layout.is_pruned:
            return torch.arange(self.shape.intermediate)
        return self.checkpoint.read(self.architecture.experts_prefix(layer) + BASE_CHANNELS).long()

    def full_base(self, layer: int, role: Role) -> Tensor:
        """The base `[out, in]` in fp32 with zeros where channels were pruned."""
        base = self.base(layer, role).float()
        if not self.layout(layer).is_pruned:
            return base
        dimension = 1 if role == "down" else 0
        return torch.zeros(self.shape.matrix(role)).index_copy(dimension, self.base_channels(layer), base)

    def dense(self, layer: int, expert: int, role: Role) -> Tensor:
        """The matrix `[out, in]` an expert's stored form stands for: as stored where it is, else in fp32."""
        own = self.stored(layer, expert, role)
        if own is not None:
            return own
        weights = self.layout(layer).weights[role]
        assert weights is not None
        prefix = self.architecture.experts_prefix(layer)
        matrix = self.shape.matrix(role)
        weight = weights[expert].build(matrix, self.dtype, torch.device("cpu"))
        names = weights[expert].shapes(matrix)
        weight.load_state_dict({name: self.checkpoint.read(prefix + delta_name(expert, role, name)) for name in names})
        with torch.no_grad():
            return self.full_base(layer, role) + weight.dense().float()
