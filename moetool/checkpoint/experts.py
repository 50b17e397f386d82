"""Reading experts from a checkpoint by role, whatever their representation on disk."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from moetool.architectures import Architecture, MoEShape, Role
from moetool.architectures.fused_layout import PLAIN, FusedLayout, neurons, stacked
from moetool.architectures.shape import by_name, fused_name
from moetool.checkpoint.block_check import check_blocks
from moetool.checkpoint.header import check_dtype
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import TensorSpec, is_finite
from moetool.errors import InvalidInputError
from moetool.format.entry import check_unquantized, layer_layouts
from moetool.format.kinds.base import PLACEHOLDER
from moetool.format.layout import (
    BASE_CHANNELS,
    LayerLayout,
    base_name,
    delta_name,
    native_layout,
    shared_name,
)
from moetool.numerics.index_sets import are_indices
from moetool.representations import Representation

Weights = Callable[[int, Role], Tensor]  # an expert's matrix `[out, in]`, by expert and role


class ExpertReader:
    """Reader of a checkpoint's experts, which holds no weights: every call reads what it returns.

    Attributes:
        shape: of every MoE layer.
        layouts: of the layers that are moetool's.
        moe_layers: indices.
        names: of every tensor on disk that stores experts' matrices.
        biases: names of those with all experts' biases, where there are some.
        dtype: in which most bytes of the experts are stored, of those tensors that have no dtype of a form's own.

    Raises:
        InvalidInputError: on construction, if the files do not hold exactly the experts that `config.json` promises.
    """

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        check_unquantized(checkpoint.config)
        self.checkpoint = checkpoint
        self.shape: MoEShape = architecture.shape
        self.layouts: dict[int, LayerLayout] = layer_layouts(checkpoint.settings)
        self.moe_layers: tuple[int, ...] = architecture.moe_layers
        self.architecture = self._as_stored(architecture)
        self.names: frozenset[str] = frozenset()
        self.biases: frozenset[str] = frozenset()
        self._last_base: tuple[tuple[int, Role], Tensor] | None = None
        self._check()

    def _as_stored(self, architecture: Architecture) -> Architecture:
        """The family as these files have it. transformers reads experts under the names that they have in memory, too,
        and for some families turns matrices round if they do not have the shape that they have in memory."""
        tensors, first = self.checkpoint.tensors, self.moe_layers[0]
        fused: dict[Role, str] = {role: f"experts.{fused_name(self.shape.group(role))}" for role in self.shape.roles}
        if architecture.weight_name(first, 0, "down") not in tensors:
            if architecture.block_prefix(first) + fused["down"] not in tensors:
                return architecture
            architecture = replace(architecture, weights=fused, on_disk=architecture.in_memory)
        turned = architecture.on_disk.is_transposed
        if turned == architecture.in_memory.is_transposed:
            return architecture
        rows, columns = self.shape.matrix("down")
        native = next((layer for layer in self.moe_layers if self.layout(layer).weights["down"] is None), None)
        found = None if native is None else tensors.get(architecture.weight_name(native, 0, "down"))
        turned = found is None or found.shape != (self.shape.experts, rows, columns)
        return replace(architecture, on_disk=replace(architecture.on_disk, is_transposed=turned))

    @property
    def numbers(self) -> int:
        """Number of elements that the matrices of all experts have together."""
        return self.shape.expert_parameters * self.shape.experts * len(self.moe_layers)

    def has(self, layer: int) -> bool:
        """Whether a decoder layer has experts."""
        return layer in self.moe_layers

    def layout(self, layer: int) -> LayerLayout:
        """The layout in which an MoE layer's experts are stored."""
        return self.layouts.get(layer) or native_layout(self.shape)

    def _shapes(
        self, layer: int, layout: LayerLayout | None = None
    ) -> Iterator[tuple[str, tuple[int, ...], torch.dtype | None]]:
        """Name, shape and dtype (`None`: the experts' own) of every tensor that stores a layer's experts."""
        layout = layout or self.layout(layer)
        for roles in self.shape.groups:
            native = layout.weights[roles[0]] is None
            count = self.shape.experts if native else 1
            matrices = {role: self.shape.matrix(role) if native else layout.native_shape(role) for role in roles}
            if self.architecture.is_fused:
                lies = self.architecture.on_disk if native else PLAIN
                for together in self.architecture.together(roles):
                    name, (rows, columns) = self.architecture.weight_name(layer, 0, together[0]), matrices[together[0]]
                    if self.architecture.on_disk.is_stacked:
                        each, length = neurons((rows, columns), together[0])
                        yield name, (count * each, length), None
                        continue
                    yield name, (count, *lies.shape(rows * len(together), columns)), None
                continue
            for role, shape in matrices.items():
                for expert in range(count):
                    yield self.architecture.weight_name(layer, expert, role), shape, None
        prefix = self.architecture.experts_prefix(layer)
        for name, stored in layout.own_tensors():
            yield prefix + name, stored.shape, stored.dtype

    def _bias_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for roles in self.shape.groups:
            if roles[0] in self.shape.biases:
                rows = sum(self.shape.matrix(role)[0] for role in roles)
                yield self.architecture.bias_name(layer, roles[0]), (self.shape.experts, rows)

    def count(self, layer: int) -> int:
        """Experts of a layer: the routed ones, and the shared one if it is stored on their base."""
        return self.layout(layer).stored_experts

    def shared_expert_specs(self, layer: int) -> list[TensorSpec]:
        """The shared expert's matrices under their native names.

        Raises:
            InvalidInputError: the family has none, or one of another form or width than the routed experts.
        """
        names = self._shared_expert_tensors(layer)
        if not names:
            raise InvalidInputError(f"{self.architecture.name} has no shared expert that could be stored on the base.")
        specs = []
        for name, roles in names.items():
            rows, columns = self.shape.matrix(roles[0])
            specs.append(TensorSpec(name, self.dtype, (len(roles) * rows, columns)))
        for spec in specs:
            found = self.checkpoint.tensors.get(spec.name)
            if found is not None and found.shape != spec.shape:
                raise InvalidInputError(
                    f"The shared expert cannot be stored on the base of the routed ones: {spec.name} has shape "
                    f"{list(found.shape)}, theirs is {list(spec.shape)}."
                )
            if found is None and not self.layout(layer).is_extended:
                raise InvalidInputError(f"Tensor {spec.name} of the shared expert is missing.")
        inside = f"{self.architecture.layer_prefix(layer)}{self.architecture.shared_expert_module}."
        beside = (name for name in self.checkpoint.tensors if name.startswith(inside) and not name.endswith(".bias"))
        if own := next((name for name in beside if name not in names), None):
            raise InvalidInputError(
                f"The shared expert cannot be stored on the base of the routed ones: it has {own} beside its matrices."
            )
        return specs

    def _shared_expert_tensors(self, layer: int) -> dict[str, list[Role]]:
        return by_name(self.architecture.shared_expert_names(layer))

    def shared_expert_tensors(self, layer: int, matrix: Callable[[Role], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The shared expert under its native names, `matrix(role)` each."""
        for name, roles in self._shared_expert_tensors(layer).items():
            yield name, torch.cat([matrix(role) for role in roles])

    def _read_shared_expert(self, layer: int, role: Role) -> Tensor:
        name = self.architecture.shared_expert_names(layer)[role]
        rows = self.shape.matrix(role)[0]
        start = self._shared_expert_tensors(layer)[name].index(role) * rows
        return self.checkpoint.read_rows(name, start, start + rows)

    def specs(self, layer: int, layout: LayerLayout | None = None) -> list[TensorSpec]:
        """Names, dtypes and shapes of every tensor that stores a layer's experts, in its own or in a given layout."""
        own = self.dtype
        return [TensorSpec(name, dtype or own, shape) for name, shape, dtype in self._shapes(layer, layout)]

    def _check(self) -> None:
        """Compare headers with promises; note the names of the experts' tensors."""
        if absent := sorted(set(self.layouts) - set(self.moe_layers)):
            raise InvalidInputError(f"quantization_config lists layers {absent}, which have no experts in the files.")
        due = [own for layer in self.moe_layers for own in self._shapes(layer)]
        experts = {name: shape for name, shape, _ in due}
        biases = {name: shape for layer in self.moe_layers for name, shape in self._bias_shapes(layer)}
        check_blocks(self.checkpoint, self.architecture, experts | biases)
        self.names, self.biases = frozenset(experts), frozenset(biases)
        sizes = Counter[torch.dtype]()
        for name in (name for name, _, own in due if own is None):
            info = self.checkpoint.info(name)
            check_dtype(name, info.dtype, self.checkpoint.path)
            sizes[info.dtype] += info.nbytes
        self.dtype = sizes.most_common(1)[0][0]

    def _read_native(self, layer: int, expert: int, role: Role, shape: tuple[int, int]) -> Tensor:
        """The `expert`-th matrix `[out, in]` under native names: an expert's own, or (the 0th) the base."""
        name = self.architecture.weight_name(layer, expert, role)
        if not self.architecture.is_fused:
            return self.checkpoint.read(name)
        [group] = [own for own in self.architecture.together(self.shape.group(role)) if role in own]
        lies = self.architecture.on_disk
        if lies.is_stacked:
            each, _ = neurons(shape, role)
            rows = self.checkpoint.read_rows(name, expert * each, (expert + 1) * each)
            return rows.T.contiguous() if role == "down" else rows
        if self.layout(layer).weights[role] is not None or lies == PLAIN:
            start = group.index(role) * shape[0]
            return self.checkpoint.read_part(name, expert, start, start + shape[0])
        part = self.checkpoint.read_part(name, expert, 0, self.checkpoint.info(name).shape[1])
        return lies.matrices(part, len(group))[group.index(role)].contiguous()

    def _decode(
        self,
        layer: int,
        representation: Representation,
        shape: tuple[int, int],
        name: Callable[[str], str],
        shared: Callable[[str], str] | None = None,
    ) -> Tensor:
        prefix = self.architecture.experts_prefix(layer)
        tensors = {tensor: self.checkpoint.read(prefix + name(tensor)) for tensor in representation.tensors(shape)}
        if shared is not None:
            for tensor in representation.shared_tensors(shape):
                tensors[tensor] = self.checkpoint.read(prefix + shared(tensor))
        return representation.decode(tensors, shape, self.dtype)

    def stored(self, layer: int, expert: int, role: Role) -> Tensor | None:
        """The expert's own matrix as it is on disk, `None` where it is only stored as a delta to a base.

        The shared expert is the one after the last routed one.
        """
        weights = self.layout(layer).weights[role]
        if expert == self.shape.experts and not self.layout(layer).is_extended:
            return self._read_shared_expert(layer, role)
        if weights is None:
            return self._read_native(layer, expert, role, self.shape.matrix(role))
        if not (form := weights[expert]).is_whole:
            return None
        [name] = form.tensors(self.shape.matrix(role))
        return self.checkpoint.read(self.architecture.experts_prefix(layer) + delta_name(expert, role, name))

    def weights(self, layer: int) -> Weights:
        """The matrices of a layer's experts as `dense` gives them. Those of an ordinary layer, which make a base before
        they make deltas to it, are read once and held for as long as this is."""
        read = partial(self.dense, layer)
        return cache(read) if self.layout(layer).is_native else read

    def bias(self, layer: int, expert: int, role: Role) -> Tensor:
        """The bias `[out]` beside an expert's matrix, of experts that have one there."""
        group = self.shape.group(role)
        fused = self.checkpoint.read_rows(self.architecture.bias_name(layer, role), expert, expert + 1)[0]
        return self.architecture.on_disk.parts(fused, len(group))[group.index(role)].contiguous()

    def base(self, layer: int, role: Role) -> Tensor:
        """The base of a layer that has one, `[out, in]` without pruned channels, in its storage dtype if it is dense
        and otherwise in fp32."""
        layout = self.layout(layer)
        if layout.has_dense_base(role):
            return self._read_native(layer, 0, role, layout.base_shape(role))
        return self._decode(layer, layout.base[role], layout.base_shape(role), lambda tensor: base_name(role, tensor))

    def base_channels(self, layer: int) -> Tensor:
        """Indices (int64) of the intermediate channels that the stored base has. Raises `InvalidInputError`."""
        layout = self.layout(layer)
        if not layout.is_pruned:
            return torch.arange(self.shape.intermediate)
        name = self.architecture.experts_prefix(layer) + BASE_CHANNELS
        channels = self.checkpoint.read(name).long()
        if not are_indices(channels, self.shape.intermediate):
            raise InvalidInputError(
                f"{name} must hold different indices below {self.shape.intermediate}, and does not."
            )
        return channels

    def damage(self, layer: int) -> Iterator[str]:
        """Describe what is wrong with a layer's stored codes and positions although shapes are right and numbers
        finite. All of them are read."""
        layout, prefix = self.layout(layer), self.architecture.experts_prefix(layer)
        stored = [(form, layout.base_shape(role), base_name(role, "")) for role, form in layout.compact_bases()]
        stored += [(form, self.shape.matrix(role), delta_name(one, role, "")) for one, role, form in layout.deltas()]
        for form, shape, name in stored:
            if type(form).damage is not Representation.damage:
                tensors = {part: self.checkpoint.read(f"{prefix}{name}{part}") for part in form.tensors(shape)}
                if (found := form.damage(tensors, shape)) is not None:
                    yield f"{prefix}{name.removesuffix('.')}: {found}"
        if layout.is_pruned:
            try:
                self.base_channels(layer)
            except InvalidInputError as error:
                yield str(error).rstrip(".")

    def full_base(self, layer: int, role: Role) -> Tensor:
        """The base `[out, in]` in fp32 with zeros where channels were pruned. Not to be written to: the last one is
        kept, because all experts of a layer are read one after the other."""
        if self._last_base is None or self._last_base[0] != (layer, role):
            base = self.base(layer, role).float()
            if (turn := self.layout(layer).input_rotation(role)) is not None:
                base = turn.back(base)
            if self.layout(layer).is_pruned:
                dimension = 1 if role == "down" else 0
                full = torch.zeros(self.shape.matrix(role))
                base = full.index_copy(dimension, self.base_channels(layer), base)
            self._last_base = (layer, role), base
        return self._last_base[1]

    def dense(self, layer: int, expert: int, role: Role) -> Tensor:
        """The matrix `[out, in]` an expert's stored form stands for: as stored where it is, else in fp32.

        Raises:
            InvalidInputError: it is not finite.
        """
        own = self.stored(layer, expert, role)
        if own is not None:
            return self._checked(own, layer, expert, role)
        weights = self.layout(layer).weights[role]
        assert weights is not None
        representation = weights[expert]
        matrix = self._decode(
            layer,
            representation,
            self.shape.matrix(role),
            lambda tensor: delta_name(expert, role, tensor),
            lambda tensor: shared_name(role, tensor),
        ).float()
        layout = self.layout(layer)
        if (turn := layout.input_rotation(role)) is not None:
            matrix = turn.back(matrix)
        has_base = representation.uses_base and layout.has_base(role)
        whole = self.full_base(layer, role) + matrix if has_base else matrix
        return self._checked(whole, layer, expert, role)

    def _checked(self, matrix: Tensor, layer: int, expert: int, role: Role) -> Tensor:
        if not is_finite(matrix):
            raise InvalidInputError(
                f"The {role} matrix of expert {expert} in layer {layer} of {self.checkpoint.path} has NaN or infinite "
                "values: the checkpoint is damaged."
            )
        return matrix

    def factors(self, layer: int, expert: int, role: Role) -> tuple[Tensor, Tensor] | None:
        """Read the stored factors U `[out, rank]` and V `[rank, in]` of an expert's delta; `None` if it is not
        low-rank."""
        weights = self.layout(layer).weights[role]
        if weights is None or (names := weights[expert].factors) is None:
            return None
        prefix = self.architecture.experts_prefix(layer)
        left, right = (self.checkpoint.read(prefix + delta_name(expert, role, name)) for name in names)
        return left, right

    def native_tensors(
        self, layer: int, roles: Sequence[Role], count: int, matrix: Callable[[Role, int], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """`count` experts' matrices per role of a group under their native names, `matrix(role, i)` each."""
        return self._under_native_names(layer, roles, count, matrix, self.architecture.on_disk)

    def bias_tensors(
        self, layer: int, roles: Sequence[Role], count: int, bias: Callable[[Role, int], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """`count` experts' biases per role of a group under their native name, `bias(role, i)` each, if they have any.
        In the dtype of their own."""
        if roles[0] in self.shape.biases:
            name, lies = self.architecture.bias_name(layer, roles[0]), self.architecture.on_disk
            rows = torch.stack([lies.joined([bias(role, i) for role in roles]) for i in range(count)])
            yield name, rows.to(self.checkpoint.info(name).dtype)

    def base_tensors(
        self, layer: int, roles: Sequence[Role], matrix: Callable[[Role], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The bases of the roles of a group, `matrix(role)` each, at the native names of one expert's matrices."""
        return self._under_native_names(layer, roles, 1, lambda role, _: matrix(role), PLAIN)

    def _under_native_names(
        self,
        layer: int,
        roles: Sequence[Role],
        count: int,
        matrix: Callable[[Role, int], Tensor],
        lies: FusedLayout,
    ) -> Iterator[tuple[str, Tensor]]:
        architecture = self.architecture
        if architecture.is_fused:
            for together in architecture.together(roles):
                name = architecture.weight_name(layer, 0, together[0])
                if architecture.on_disk.is_stacked:
                    yield name, stacked([matrix(together[0], i) for i in range(count)], together[0])
                    continue
                whole = [lies.fused([matrix(role, i) for role in together]) for i in range(count)]
                yield name, torch.stack(whole)
            return
        for role in roles:
            for i in range(count):
                yield architecture.weight_name(layer, i, role), matrix(role, i)

    def placeholders(self, layer: int, roles: Sequence[Role]) -> Iterator[tuple[str, Tensor]]:
        """Make the placeholder tensors at the native names of a group whose base is not dense."""
        yield from self.base_tensors(layer, roles, lambda _: torch.zeros(PLACEHOLDER, dtype=self.dtype))
