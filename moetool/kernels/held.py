"""Whether tensors still are where they were when their addresses were written down."""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor, nn

from moetool.representations.base import Weight
from moetool.representations.operand import Products

_FOUND = attrgetter("_found")
_PLACE, _STRIDE, _DTYPE = Tensor.data_ptr, Tensor.stride, attrgetter("dtype")


class Held:
    """The tensors of some modules, and the modules in them, as they were at one moment.

    Loading, moving, casting, training and parametrizing put others in their places, or put the same elsewhere. What is
    written in place is read as it is.
    """

    def __init__(self, holders: Iterable[nn.Module]) -> None:
        holders = list(holders)
        self._stores: list[dict[str, Any]] = [
            store for own in holders for store in (own._parameters, own._buffers, own._modules) if store
        ]
        self._found = [found for store in self._stores for found in store.values()]
        self._tensors = [found for found in self._found if isinstance(found, Tensor)]
        self._places = [*map(_PLACE, self._tensors)]
        self._strides = [*map(_STRIDE, self._tensors)]
        self._dtypes = [*map(_DTYPE, self._tensors)]
        self._derived = [(own, derived) for own in holders if isinstance(own, Weight) and (derived := own.derived())]

    @classmethod
    def together(cls, several: Iterable["Held"]) -> "Held":
        """What several hold, which is looked at in one go, as they recorded it."""
        made = cls(())
        for own in several:
            for name, noted in vars(own).items():
                getattr(made, name).extend(noted)
        return made

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that could be replaced."""
        return not (self._stores or self._derived)

    def is_current(self) -> bool:
        """Whether all tensors are still the objects, at the addresses and of the dtypes, that were recorded."""
        return are_current((self,))

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the memory block (storage) of every held tensor."""
        derived = (tensor for _, tensors in self._derived for tensor in tensors)
        return [tensor.untyped_storage() for tensor in (*self._tensors, *derived)]

    def memories(self) -> set[int]:
        """Addresses at which the memory blocks of all held tensors begin."""
        return {storage.data_ptr() for storage in self.storages()}


def are_current(several: Collection[Held]) -> bool:
    """Whether all of them are, as `Held.is_current` says. Every token asks: so one after the other, by `map`, without
    lists of them."""

    def noted(name: str) -> Iterator[Any]:
        return chain.from_iterable(map(attrgetter(name), several))

    return (
        sum(map(len, noted("_stores"))) == sum(map(len, map(_FOUND, several)))
        and all(map(is_, chain.from_iterable(map(dict.values, noted("_stores"))), noted("_found")))
        and all(map(eq, map(_PLACE, noted("_tensors")), noted("_places")))
        and all(map(eq, map(_STRIDE, noted("_tensors")), noted("_strides")))
        and all(map(is_, map(_DTYPE, noted("_tensors")), noted("_dtypes")))
        and all(_are_same(own.derived(), before) for own, before in noted("_derived"))
    )


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
