"""A dense model into one that computes a part of its feed-forward networks per token, without training it."""

from typing import ClassVar

import torch
from torch import Tensor

from moetool.pipeline.moefying import Moefy


class GMoefication(Moefy):
    """G-MoEfication: neurons that are left out count with their mean activation, whatever the activation function."""

    name: ClassVar[str] = "g-moefication"
    summary: ClassVar[str] = "split FFNs into experts; those left out count with their mean activation"

    def representative(self, mean: Tensor) -> Tensor:
        return mean


class Moefication(Moefy):
    """MoEfication (arXiv:2110.01786): neurons that are left out count as zero, which suits ReLU."""

    name: ClassVar[str] = "moefication"
    summary: ClassVar[str] = "split FFNs into experts; those left out count as zero"

    def representative(self, mean: Tensor) -> Tensor:
        return torch.zeros_like(mean)
