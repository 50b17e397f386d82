"""Whether tensors still are where they were when their addresses were written down."""

from collections.abc import Collection, Iterable
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from moetool.representations.base import Weight
from moetool.representations.operand import Products

_DTYPE = attrgetter("dtype")


class Held:
    """The tensors of some modules, and the modules in them, as they were at one moment.

    Loading, moving, casting, training and parametrizing put others in their places, or put the same elsewhere. What is
    written in place is read as it is.
    """

    def __init__(self, holders: Iterable[nn.Module]) -> None:
        holders = list(holders)
        stores = [store for holder in holders for store in (holder._parameters, holder._buffers) if store]
        self._stores, self._found = stores, [tensor for store in stores for tensor in store.values()]
        self._tensors = [tensor for tensor in self._found if tensor is not None]
        self._places = self._now()
        self._modules = [(holder._modules, list(holder._modules.values())) for holder in holders if holder._modules]
        self._derived = [(own, derived) for own in holders if isinstance(own, Weight) and (derived := own.derived())]

    @classmethod
    def together(cls, several: Iterable["Held"]) -> "Held":
        """What several hold, which is looked at in one go, as they recorded it."""
        made = cls(())
        for own in several:
            made._stores += own._stores
            made._found += own._found
            made._tensors += own._tensors
            made._modules += own._modules
            made._derived += own._derived
            for all_places, places in zip(made._places, own._places, strict=True):
                all_places += places  # type: ignore[operator]
        return made

    def _now(self) -> tuple[list[int], list[tuple[int, ...]], list[torch.dtype]]:
        """Addresses, strides and dtypes. By `map`: every layer asks for every token."""
        tensors = self._tensors
        return [*map(Tensor.data_ptr, tensors)], [*map(Tensor.stride, tensors)], [*map(_DTYPE, tensors)]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that could be replaced."""
        return not (self._stores or self._modules or self._derived)

    def is_current(self) -> bool:
        """Whether all tensors are still the objects, at the addresses and of the dtypes, that were recorded."""
        found = [tensor for store in self._stores for tensor in store.values()]
        return (
            _are_same(found, self._found)
            and self._now() == self._places
            and all(_are_same(modules.values(), before) for modules, before in self._modules)
            and all(_are_same(own.derived(), before) for own, before in self._derived)
        )

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the memory block (storage) of every held tensor."""
        derived = (tensor for _, tensors in self._derived for tensor in tensors)
        return [tensor.untyped_storage() for tensor in (*self._tensors, *derived)]

    def memories(self) -> set[int]:
        """Addresses at which the memory blocks of all held tensors begin."""
        return {storage.data_ptr() for storage in self.storages()}


def _are_same(now: Collection[object], before: Collection[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


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
