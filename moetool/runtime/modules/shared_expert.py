"""A family's shared expert that is stored on the base of the routed experts, as the last of them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.inference import KernelExperts
from moetool.runtime.modules.networks import dropout_of
from moetool.runtime.modules.offloading import below, loaded
from moetool.runtime.modules.routed import RoutedExperts

_FEW = 4  # tokens up to which kernels multiply by plain factors in less time than torch


class SharedExpertOnBase(RoutedExperts):
    """Stands where the family has its shared expert; the routed experts, whose base it shares, compute it.

    Holds no more than the biases, under their native names: both modules are kept in a tuple, so that neither is
    registered a second time.
    """

    def __init__(self, experts: SharedBaseExperts, native: nn.Module, names: Mapping[Role, str]) -> None:
        """`native` is the module this one replaces; `names` are those of its matrices, by role."""
        super().__init__()
        self._modules_elsewhere = experts, native
        self.names = dict(names)
        for role in experts.layout.shape.biases:
            path = names[role].removesuffix(".weight")
            holder = nn.Module()
            holder.bias = native.get_submodule(path).bias
            self.add_module(path, holder)

    @property
    def experts(self) -> SharedBaseExperts:
        """The routed experts' module, which stores this shared expert as the last of its deltas."""
        return self._modules_elsewhere[0]

    @property
    def native(self) -> nn.Module:
        """The family's own shared-expert module, emptied of its weights."""
        return self._modules_elsewhere[1]

    @property
    def device(self) -> torch.device:
        """The device on which the stored matrices lie."""
        return self.experts.device

    def holders(self) -> Iterable[nn.Module]:
        """Modules whose tensors this one reads: its own, and those of the routed experts."""
        return [*self.modules(), *self.experts.modules()]

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """`[…, hidden]` → the same. All tokens choose the one expert that there is."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
        output = super().forward(rows, chosen, torch.ones_like(chosen, dtype=torch.float32))
        return F.dropout(output.view_as(hidden_states), dropout_of(self.native), self.training)

    def may_run_on_kernels(self) -> bool:
        return self.experts.may_run_on_kernels()

    def infer(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `RoutedExperts`. Many tokens meet plain factors as they come: there is nothing to unpack or to sort."""
        if len(hidden_states) > _FEW and self._is_cheap():
            return self.eager(hidden_states, top_k_index, top_k_weights)
        return super().infer(hidden_states, top_k_index, top_k_weights)

    def _is_cheap(self) -> bool:
        layout = self.experts.layout
        stored = (form for own in layout.weights.values() if own is not None for form in own[-1:])
        return all(form.is_cheap for form in (*stored, *layout.base.values()))

    def on_kernels(self) -> KernelExperts:
        """Describe the shared expert to kernels as a layer with one expert."""
        biases = {role: bias[None] for role, bias in self._biases().items()}
        return self.experts.kernels_of([self.experts.num_experts], biases, self.modules())

    def eager(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the shared expert in plain torch; its weights are fetched first where they are offloaded."""
        with loaded(*below(self)):
            return self.experts.shared_expert(hidden, self._biases())

    def _biases(self) -> dict[Role, Tensor]:
        return {role: self.bias(role) for role in self.experts.layout.shape.biases}

    def bias(self, role: Role) -> nn.Parameter:
        """The shared expert's bias beside its matrix of a role."""
        return self.get_parameter(self.names[role].removesuffix("weight") + "bias")
