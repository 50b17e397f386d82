"""Stored matrices as rows of numbers that kernels read: forms, shapes and addresses."""

from functools import cache

import torch
from torch import Tensor

from moetool.compiled.compiler import added_forms
from moetool.numerics import trellis
from moetool.numerics.quantization import is_whole, levels
from moetool.representations.operand import Operand

# As matrices.h has them.
FIELDS, OPERANDS, TERMS = 11, 2, 3  # of an operand, of a term, of a matrix
NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
CODES = {1: 4, 2: 5, 3: 6, 4: 7, 5: 8, 6: 9, 8: 10}
TRELLIS = {1: 14, 2: 15, 3: 16, 4: 17}
FORMS = {"nf4": 11, "int8": 12, "sparse": 13}
ADDED = 18  # and the next ones: forms that are files of their own
_LEVELS = 16
MOST_NUMBERS = 1 << 28  # of a matrix that kernels of cards take, which count bits in 32 bits


class UnsupportedMatrixError(ValueError):
    """No kernel can multiply by a matrix; callers then run in plain torch."""


def operand_row(operand: Operand) -> list[int]:
    """Encode one operand as the row of numbers that a kernel reads.

    Raises:
        UnsupportedMatrixError: it cannot.
    """
    data, scales, places = operand.data, operand.scales, operand.places
    for tensor in (data, scales, places):
        if tensor is not None and (tensor.device != data.device or tensor.is_meta or not tensor.is_contiguous()):
            raise UnsupportedMatrixError("a tensor is not in one device's memory, one number after the other")
    values = data if operand.kind == "sparse" or scales is None else scales
    if values.dtype not in NUMBERS:
        raise UnsupportedMatrixError(f"numbers are {values.dtype}")
    table = operand_levels(operand)
    return [
        form_number(operand),
        *operand.shape,
        operand.group or 1,
        operand.transposed,
        data.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        NUMBERS[values.dtype],
        0 if table is None else table.data_ptr(),
        data.numel(),
        0 if places is None else places.data_ptr(),
    ]


def form_number(operand: Operand) -> int:
    """The number by which kernels know how an operand is stored.

    Raises:
        UnsupportedMatrixError: they do not.
    """
    match operand.kind:
        case "numbers":
            return NUMBERS[operand.data.dtype]
        case "codes":
            return CODES[operand.bits]
        case "trellis":
            return TRELLIS[operand.bits]
        case kind if kind in FORMS:
            return FORMS[kind]
        case kind if kind in added_forms():
            return ADDED + [*added_forms()].index(kind)
    raise UnsupportedMatrixError(f"no kernel reads '{operand.kind}'")


def operand_levels(operand: Operand) -> Tensor | None:
    """Values that an operand's codes stand for: [16] fp32 on its device, or those of a trellis's windows, [256].

    They are cached for good; `None` if codes are numbers themselves.
    """
    if operand.kind == "trellis":
        return trellis.values(operand.bits, operand.data.device)
    if operand.kind != "codes" or is_whole(operand.bits):
        return operand.levels
    return _levels(operand.bits, operand.data.device)


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """[16] fp32, repeated where codes are shorter: kernels do not clear the bits of a code's neighbours."""
    with torch.inference_mode(False):
        values = levels(bits, torch.float32, torch.device("cpu")).tolist()
        return torch.tensor([*values] * (_LEVELS // len(values)), device=device)
