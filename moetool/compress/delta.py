"""The delta of an expert to the base of its layer: what is compressed in place of the expert."""

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.checkpoint.experts import ExpertReader
from moetool.compress.base.layer_base import LayerBase


def delta(weight: Tensor, base: Tensor) -> Tensor:
    """W − base `[out, in]` in fp32, for a base in fp32."""
    return weight.float() - base


class Deltas:
    """The deltas of one layer's experts, read and made one at a time. Taken role by role, every base is made once."""

    def __init__(self, reader: ExpertReader, layer: int, base: LayerBase, device: torch.device) -> None:
        self._reader, self._layer, self._base, self._device = reader, layer, base, device
        self._full: tuple[Role, Tensor] | None = None

    def of(self, role: Role, expert: int) -> Tensor:
        """`[out, in]` fp32 on the device. The shared expert is the one after the last routed one."""
        if self._full is None or self._full[0] != role:
            self._full = role, self._base.full(role)
        return delta(self._reader.dense(self._layer, expert, role), self._full[1]).to(self._device)
