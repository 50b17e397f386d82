"""Whether tensors still are where they were when their addresses were written down."""

from collections.abc import Iterable
from operator import is_

from torch import nn

from moetool.representations.base import Weight
from moetool.representations.operand import Products


class Held:
    """The tensors of some modules, and the modules in them, as they were at one moment.

    Loading, moving, casting, training and parametrizing put others in their places, or put the same elsewhere. What is
    written in place is read as it is.
    """

    def __init__(self, holders: Iterable[nn.Module]) -> None:
        holders = list(holders)
        self._tensors = [
            (tensors, name, tensor, tensor.data_ptr(), tensor.dtype, tensor.stride())
            for holder in holders
            for tensors in (holder._parameters, holder._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self._modules = [(holder._modules, list(holder._modules.values())) for holder in holders if holder._modules]
        self._derived = [(own, derived) for own in holders if isinstance(own, Weight) and (derived := own.derived())]

    def is_current(self) -> bool:
        """Whether all tensors are still the ones that were looked at."""
        for tensors, name, tensor, address, dtype, stride in self._tensors:
            if (
                tensors.get(name) is not tensor
                or tensor.data_ptr() != address
                or tensor.dtype != dtype
                or tensor.stride() != stride
            ):
                return False
        return all(
            len(modules) == len(before) and all(map(is_, modules.values(), before)) for modules, before in self._modules
        ) and all(
            len(now := own.derived()) == len(before) and all(map(is_, now, before)) for own, before in self._derived
        )

    def memories(self) -> set[int]:
        """Addresses at which the memory of the held tensors begins."""
        stored = [tensor for _, _, tensor, *_ in self._tensors]
        stored += [tensor for _, derived in self._derived for tensor in derived]
        return {tensor.untyped_storage().data_ptr() for tensor in stored}


def are_held(matrices: Iterable[Products], holders: Iterable[Held]) -> bool:
    """Whether matrices are made of tensors that are held, and not of passing ones as in parametrized modules."""
    memories = set().union(*(held.memories() for held in holders))
    return all(
        tensor.untyped_storage().data_ptr() in memories
        for products in matrices
        for chain in products
        for operand in chain
        for tensor in (operand.data, operand.scales)
        if tensor is not None
    )
