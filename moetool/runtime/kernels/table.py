"""Stored matrices as rows of numbers that kernels read: forms, shapes and addresses."""

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from moetool.numerics.quantization import levels
from moetool.representations.bitsandbytes_formats import NF4_LEVELS
from moetool.representations.operand import Operand, Products
from moetool.runtime.kernels.held import Held

# As matrices.h has them.
FIELDS, OPERANDS, TERMS = 10, 2, 2  # of an operand, of a term, of a matrix
NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_CODES = {1: 4, 2: 5, 3: 6, 4: 7, 8: 8}
_FORMS = {"nf4": 9, "int8": 10, "sparse": 11}
_LEVELS = 16


class UnsupportedMatrixError(ValueError):
    """A matrix that no kernel here multiplies with."""


class Table:
    """Matrices `[out, in]`, e.g. those of all experts of a layer in one role, for kernels to choose from.

    Attributes:
        numbers: [matrices, fields] int64 on the CPU, valid as long as `is_current`.
        shape: out and in of each.
        products: what each is made of.
        held: the tensors of its holders.
    """

    def __init__(self, products: Sequence[Products], shape: tuple[int, int], holders: Iterable[nn.Module]) -> None:
        """`holders` have the tensors of `products` among their own parameters and buffers.

        Raises:
            UnsupportedMatrixError: a form, shape or place in memory that kernels do not know.
        """
        self.products, self.shape = list(products), shape
        self.numbers = torch.tensor([_row(own, shape) for own in products], dtype=torch.int64)
        self.held = Held(holders)

    @property
    def address(self) -> int:
        """Of `numbers`."""
        return self.numbers.data_ptr()

    def is_current(self) -> bool:
        """Whether every tensor still is where it was: loading, moving and training put others in their places."""
        return self.held.is_current()


def operand_row(operand: Operand) -> list[int]:
    """What a kernel reads of one operand.

    Raises:
        UnsupportedMatrixError: it cannot.
    """
    data, scales = operand.data, operand.scales
    for tensor in (data, scales):
        if tensor is not None and (tensor.device.type != "cpu" or not tensor.is_contiguous()):
            raise UnsupportedMatrixError("a tensor is not in the CPU's memory, one number after the other")
    values = data if operand.kind == "sparse" or scales is None else scales
    if values.dtype not in NUMBERS:
        raise UnsupportedMatrixError(f"numbers are {values.dtype}")
    if operand.kind == "numbers":
        form = NUMBERS[data.dtype]
    else:
        form = _CODES[operand.bits] if operand.kind == "codes" else _FORMS[operand.kind]
    return [
        form,
        *operand.shape,
        operand.group or 1,
        operand.transposed,
        data.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        NUMBERS[values.dtype],
        0
        if operand.kind not in ("codes", "nf4") or operand.bits == 8
        else _levels(operand.kind, operand.bits).data_ptr(),
        data.numel(),
    ]


def _row(products: Products, shape: tuple[int, int]) -> list[int]:
    if len(products) > TERMS or any(len(chain) > OPERANDS for chain in products):
        raise UnsupportedMatrixError("a matrix is a sum of more products than there is room for")
    row: list[int] = []
    for chain in products:
        if (chain[-1].outputs, chain[0].inputs) != shape:
            raise UnsupportedMatrixError(f"a product is {chain[-1].outputs} × {chain[0].inputs}, not {shape}")
        own = [number for operand in chain for number in operand_row(operand)]
        row += own + [0] * (OPERANDS * FIELDS - len(own))
    return row + [0] * (TERMS * OPERANDS * FIELDS - len(row))


@cache
def _levels(kind: str, bits: int) -> Tensor:
    """[16] fp32, repeated where codes are shorter: kernels do not clear the bits of a code's neighbours."""
    with torch.inference_mode(False):
        own = torch.tensor(NF4_LEVELS) if kind == "nf4" else levels(bits, torch.float32, torch.device("cpu"))
        return own.repeat(_LEVELS // len(own)).contiguous()
