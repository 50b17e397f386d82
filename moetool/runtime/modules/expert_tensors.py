"""Tensors of one layer's compressed experts in one module: bases, deltas, and matrices that are stored whole."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.architectures.fused_layout import PLAIN, FusedLayout, layout_of
from moetool.architectures.shape import NORM, fused_name
from moetool.format.layout import LayerLayout
from moetool.representations.base import Weight, empty_parameter
from moetool.runtime.modules.fused import Between, activation_between, entering, without_tensors
from moetool.runtime.modules.offloading import below
from moetool.runtime.modules.routed import RoutedExperts


class ExpertTensors(RoutedExperts):
    """Tensors of one layer's experts, as a shared base and one small delta per expert and matrix, or without a base.

    Tensors keep their native names: `gate_up_proj` (`up_proj` without gates) and `down_proj` hold the base (leading
    dimension 1), a placeholder if the base is stored in another form, or all experts where that group was left alone;
    biases are every expert's own. `moetool.{expert}.{role}` holds the deltas, `moetool.base.{role}` a base that is not
    dense.
    """

    moetool: nn.ModuleDict
    base_channels: Tensor

    def __init__(self, native: nn.Module, layout: LayerLayout) -> None:
        """Build empty on the device and in the dtype of `native`, the fused experts module it replaces."""
        super().__init__()
        fused = entering(native)
        dtype, device, shape = fused.dtype, fused.device, layout.shape
        self.layout = layout
        self.config = getattr(native, "config", None)
        self.act_fn: Between = activation_between(native)
        self.num_experts, self.hidden_dim, self.intermediate_dim = (
            shape.experts,
            shape.hidden,
            shape.intermediate,
        )
        self._original = (without_tensors(native),)  # in a tuple, or it would be registered
        self.native_layout = layout_of(native)
        self._has_base = {role: layout.has_base(role) for role in shape.roles}
        self._turns = {role: turn for role in shape.roles if (turn := layout.input_rotation(role)) is not None}
        self._is_normed = hasattr(native, NORM)
        if self._is_normed:
            self.add_module(NORM, native.get_submodule(NORM))
        for roles in shape.groups:
            is_native = layout.weights[roles[0]] is None
            rows, columns = shape.matrix(roles[0]) if is_native else layout.native_shape(roles[0])
            count = shape.experts if is_native else 1
            fused = empty_parameter((count, *self._lies(roles[0]).shape(len(roles) * rows, columns)), dtype, device)
            if is_native or layout.has_dense_base(roles[0]):
                self.register_parameter(fused_name(roles), fused)
            else:  # no parameter: nothing is to train a placeholder, or adapt it
                self.register_buffer(fused_name(roles), fused.detach())
            if roles[0] in shape.biases:
                bias = empty_parameter((shape.experts, len(roles) * shape.matrix(roles[0])[0]), dtype, device)
                setattr(self, f"{fused_name(roles)}_bias", bias)
        if layout.is_pruned:
            self.register_buffer("base_channels", torch.zeros(layout.base_channels, dtype=torch.int32, device=device))
            self.index_limits = {"base_channels": self.intermediate_dim}
        self.moetool = nn.ModuleDict({str(expert): nn.ModuleDict() for expert in range(layout.stored_experts)})
        shared = {
            str(role): nn.ParameterDict(
                {name: empty_parameter(stored.shape, stored.dtype or dtype, device) for name, stored in common.items()}
            )
            for role in shape.roles
            if (common := layout.shared_tensors(role))
        }
        if shared:
            self.moetool["shared"] = nn.ModuleDict(shared)
        for expert, role, representation in layout.deltas():
            weight = representation.build(shape.matrix(role), dtype, device)
            self.moetool[str(expert)].add_module(role, weight)
            if role in shared:
                weight.share(shared[role])
        if bases := {
            str(role): representation.build(layout.base_shape(role), dtype, device)
            for role, representation in layout.compact_bases()
        }:
            self.moetool["base"] = nn.ModuleDict(bases)

    def _lies(self, role: Role) -> FusedLayout:
        """How the fused tensor of a role lies: as in transformers' own module, if it was left alone."""
        return self.native_layout if self.layout.weights[role] is None else PLAIN

    @property
    def native(self) -> nn.Module:
        """The family's own experts module, emptied of its matrices and biases."""
        return self._original[0]

    def delta(self, expert: int, role: Role) -> Weight:
        """The run-time form of one expert's matrix: a delta to the base, or the matrix itself."""
        return cast("Weight", self.moetool[str(expert)].get_submodule(role))

    def _compact(self, role: Role) -> Weight:
        """The stored form of a base that is not dense."""
        return cast("Weight", self.moetool["base"].get_submodule(role))

    def _bases(self, role: Role) -> list[nn.Module]:
        """The modules that store a base that is not dense."""
        if self.layout.has_dense_base(role):
            return []
        compact = self._compact(role)
        return [compact, *below(compact)]

    def _shared(self) -> list[nn.Module]:
        """The modules that hold what deltas have in common."""
        return below(self.moetool["shared"]) if "shared" in self.moetool else []

    def base_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that store the bases of all roles, dense or not."""
        for roles in self._based():
            yield self.get_parameter(fused_name(roles))
        for role, _ in self.layout.compact_bases():
            yield from self._compact(role).parameters()

    def _uses_base(self, expert: int, role: Role) -> bool:
        weights = self.layout.weights[role]
        return weights is not None and weights[expert].uses_base and self._has_base[role]

    def _biases(self, expert: int) -> dict[Role, Tensor]:
        """The biases of a routed expert by role, `[out]` each."""
        found = {role: self.biases_of(role) for role in self.layout.shape.roles}
        return {role: bias[expert] for role, bias in found.items() if bias is not None}

    def biases_of(self, role: Role) -> Tensor | None:
        """The biases of all routed experts in a role `[experts, out]`, as they lie in memory, if they have some."""
        roles = self.layout.shape.group(role)
        if roles[0] not in self.layout.shape.biases:
            return None
        fused: Tensor = getattr(self, f"{fused_name(roles)}_bias")
        return self.native_layout.parts(fused, len(roles))[roles.index(role)]

    def _base(self, role: Role) -> Tensor:
        """The base `[out, in]` without pruned channels."""
        if not self.layout.has_dense_base(role):
            return self._compact(role).dense()
        return self.native_matrix(0, role)

    def native_matrix(self, index: int, role: Role) -> Tensor:
        """The matrix `[out, in]` of a role that stands in the fused tensors, as a view: an expert's, or (the 0th) the
        base."""
        group = self.layout.shape.group(role)
        return self._lies(role).parts(self._fused(index, role), len(group), -2)[group.index(role)]

    def _fused(self, index: int, role: Role) -> Tensor:
        """A part `[out, in]` of a fused tensor, with all outputs of a role's group in the order in which they lie."""
        fused = self.down_proj if role == "down" else entering(self)
        return self._lies(role).rows(fused if fused.dim() == 2 else fused[index])

    @torch.no_grad()
    def dense(self, expert: int, role: Role) -> Tensor:
        """The matrix `[out, in]` that an expert's stored form stands for, in fp32 (dynamic pruning left out)."""
        if self.layout.weights[role] is None:
            return self.native_matrix(expert, role).float()
        delta, turn = self.delta(expert, role).dense().float(), self._turns.get(role)
        if not self._uses_base(expert, role):
            return delta if turn is None else turn.back(delta)
        base = self._base(role)
        if turn is not None:  # of both at once: one rounding less
            return turn.back(base.float() + delta)
        if not self.layout.is_pruned:
            return base.float() + delta
        dimension = 1 if role == "down" else 0
        return delta.index_add(dimension, self.base_channels.long(), base.float())

    def flatten_bases(self) -> None:
        """Let bases be matrices, without the leading dimension of 1: sharding cuts tensors by their first."""
        for roles in self._based():
            base = getattr(self, name := fused_name(roles))
            setattr(self, name, nn.Parameter(base.detach()[0], requires_grad=base.requires_grad))

    def _based(self) -> Iterator[tuple[Role, ...]]:
        """Roles that share a fused tensor, those whose base is there as a matrix."""
        for roles in self.layout.shape.groups:
            if self.layout.weights[roles[0]] is not None and self.layout.has_dense_base(roles[0]):
                yield roles

    def extra_repr(self) -> str:
        weights = self.layout.weights
        ranks = {role: [weight.spec for weight in own or ()] or "native" for role, own in weights.items()}
        return f"channels={self.layout.base_channels}/{self.intermediate_dim}, {ranks}"
