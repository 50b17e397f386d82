"""Stored matrices as rows of numbers that kernels read: forms, shapes and addresses."""

from functools import cache

import torch
from torch import Tensor

from moetool.numerics import trellis
from moetool.numerics.quantization import levels
from moetool.representations.bitsandbytes_formats import NF4_LEVELS
from moetool.representations.operand import Operand

# As matrices.h has them.
FIELDS, OPERANDS, TERMS = 11, 2, 3  # of an operand, of a term, of a matrix
NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
CODES = {1: 4, 2: 5, 3: 6, 4: 7, 8: 8}
TRELLIS = {1: 12, 2: 13, 3: 14, 4: 15}
FORMS = {"nf4": 9, "int8": 10, "sparse": 11}
_LEVELS = 16


class UnsupportedMatrixError(ValueError):
    """A matrix that no kernel here multiplies with."""


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
    if operand.kind == "numbers":
        form = NUMBERS[data.dtype]
    else:
        by_bits = {"codes": CODES, "trellis": TRELLIS}.get(operand.kind)
        form = FORMS[operand.kind] if by_bits is None else by_bits[operand.bits]
    table = operand_levels(operand)
    return [
        form,
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


def operand_levels(operand: Operand) -> Tensor | None:
    """What codes stand for, [16] fp32 on their device, or of those in a trellis what windows do; None where they are
    numbers themselves. Kept for good."""
    if operand.kind == "trellis":
        return trellis.values(operand.bits, operand.data.device)
    if operand.kind not in ("codes", "nf4") or operand.bits == 8:
        return None
    return _levels(operand.kind, operand.bits, operand.data.device)


@cache
def _levels(kind: str, bits: int, device: torch.device) -> Tensor:
    """[16] fp32, repeated where codes are shorter: kernels do not clear the bits of a code's neighbours."""
    with torch.inference_mode(False):
        values = NF4_LEVELS if kind == "nf4" else levels(bits, torch.float32, torch.device("cpu")).tolist()
        return torch.tensor([*values] * (_LEVELS // len(values)), device=device)
