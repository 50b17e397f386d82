"""The delta of an expert to the base of its layer: what is compressed in place of the expert."""

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.bases.layer_base import LayerBase
from moetool.checkpoint.experts import Weights
from moetool.representations import Representation


def delta(weight: Tensor, base: Tensor) -> Tensor:
    """Subtract a base `[out, in]` in fp32 from a weight `[out, in]` of any dtype, in fp32."""
    return weight.float() - base


class Deltas:
    """The deltas of one layer's experts to its `base`, made one at a time on `device`, from the `weights` of all.

    Taken group by group of roles, each role's base is made once.
    """

    def __init__(self, weights: Weights, base: LayerBase, device: torch.device) -> None:
        """`weights` gives every expert's matrix, as it is stored or wider, wherever it is."""
        self.base, self.device = base, device
        self.weights = weights
        self._full: dict[Role, Tensor] = {}

    def of(self, role: Role, expert: int) -> Tensor:
        """Compute the delta `[out, in]` of one expert's matrix to the base of its role, in fp32 on the device."""
        if role not in self._full:
            if role == "down" or "down" in self._full:  # gate and up are kept beside each other
                self._full.clear()
            self._full[role] = self.base.full(role).to(self.device)
        return delta(self.weight(role, expert), self._full[role])

    def target(self, role: Role, expert: int, form: Representation) -> Tensor:
        """The matrix `[out, in]` that a form stores: the expert's delta to the base if the form is of deltas
        (`uses_base`), else the expert's own matrix. It is fp32 unless it is stored without a change."""
        if form.uses_base:
            return self.of(role, expert)
        own = self.weight(role, expert)
        return own if form.is_whole else own.float()

    def weight(self, role: Role, expert: int) -> Tensor:
        """Read the expert's own matrix `[out, in]` onto the device, in its stored dtype or a wider one."""
        return self.weights(expert, role).to(self.device)
