"""A dense model into one that computes a part of its feed-forward networks per token, without training it."""

from typing import ClassVar

from moetool.moefy.moefying import Moefy


class GMoefication(Moefy):
    """G-MoEfication: neurons that are left out count with their mean activation, whatever the activation function."""

    name: ClassVar[str] = "g-moefication"
    summary: ClassVar[str] = "split FFNs into experts; those left out count with their mean activation"

    @property
    def keeps_means(self) -> bool:
        return True


class Moefication(Moefy):
    """MoEfication (arXiv:2110.01786): neurons that are left out count as zero, which suits ReLU."""

    name: ClassVar[str] = "moefication"
    summary: ClassVar[str] = "split FFNs into experts; those left out count as zero"

    @property
    def keeps_means(self) -> bool:
        return False
