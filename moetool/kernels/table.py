"""The matrices of a layer's experts in one role, as kernels find them by number."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import nn

from moetool.kernels.held import Held
from moetool.kernels.launches import Launches
from moetool.kernels.operands import FIELDS, OPERANDS, TERMS, UnsupportedMatrixError, operand_row
from moetool.representations.operand import Products


class Table:
    """Matrices `[out, in]`, e.g. those of all experts of a layer in one role, for kernels to choose from.

    Attributes:
        numbers: [matrices, fields] int64 on the CPU, valid as long as `is_current`.
        launches: the same for kernels of a card, where the matrices are.
        shape: out and in of each.
        products: what each is made of.
        held: the tensors of its holders.
    """

    def __init__(
        self, products: Sequence[Products | None], shape: tuple[int, int], holders: Iterable[nn.Module]
    ) -> None:
        """`holders` have the tensors of `products` among their own parameters and buffers.

        Raises:
            UnsupportedMatrixError: a form, shape or place in memory that kernels do not know.
        """
        self.products, self.shape = [own for own in products if own is not None], shape
        if len(self.products) < len(products):
            raise UnsupportedMatrixError("a matrix is stored in a way that is no sum of products")
        self.numbers = torch.tensor([_row(own, shape) for own in self.products], dtype=torch.int64)
        devices = {operand.data.device for own in self.products for chain in own for operand in chain}
        if len(devices) > 1:
            raise UnsupportedMatrixError(f"tensors are on {len(devices)} devices")
        self._device = devices.pop() if devices else torch.device("cpu")
        if self._device.type != "cpu":
            _ = self.launches  # now: while a graph is captured nothing can be copied to a card
        self.held = Held(holders)

    @cached_property
    def launches(self) -> Launches:
        """Raises `UnsupportedMatrixError` for what kernels of a card do not know."""
        return Launches(self.products, self._device)

    @property
    def address(self) -> int:
        """Memory address of `numbers`, the table that kernels read."""
        return self.numbers.data_ptr()

    def is_current(self) -> bool:
        """Whether every tensor still is where it was: loading, moving and training put others in their places."""
        return self.held.is_current()


def _row(products: Products, shape: tuple[int, int]) -> list[int]:
    if len(products) > TERMS or any(len(chain) > OPERANDS for chain in products):
        raise UnsupportedMatrixError("a matrix is a sum of more products than there is room for")
    row: list[int] = []
    for chain in products:
        outputs = shape[0] if chain[-1].places is not None else chain[-1].outputs
        if (outputs, chain[0].inputs) != shape:
            raise UnsupportedMatrixError(f"a product is {chain[-1].outputs} × {chain[0].inputs}, not {shape}")
        own = [number for operand in chain for number in operand_row(operand)]
        row += own + [0] * (OPERANDS * FIELDS - len(own))
    return row + [0] * (TERMS * OPERANDS * FIELDS - len(row))
