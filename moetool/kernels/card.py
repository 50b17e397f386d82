"""Products with stored matrices on a card, by kernels in Triton (`triton_products`), which is imported when needed.

Nothing in `routed` waits for the card, so that CUDA graphs can record it. What is fastest on which card has not been
measured: sizes of tiles are guesses, from how many tokens on `linear` is better is what it is on a CPU, and torch's and
bitsandbytes' products of 4 and 8 bits are left aside.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.kernels.launches import COLUMNS, COLUMNS_TRANSPOSED, SLOTS, Launch, card_levels, kind
from moetool.kernels.operands import FIELDS, FORMS, OPERANDS, TERMS
from moetool.kernels.table import Table
from moetool.representations.operand import Operand, by_positions, numbers

_ROWS, _ROWS_TRANSPOSED = 16, 64  # of a tile
_TOKENS = 4  # at most, that share the decoding of a tile
FUSED = {"enable_fp_fusion": True}  # products and sums in one; triton warns from 3.9 on where nothing is said
_SPARSE = 256  # values that are read at a time


@cache
def problem(device: torch.device) -> str:
    """Why kernels cannot run on a card, in a sentence; nothing if they can. Compiles one when asked first."""
    if os.environ.get("MOETOOL_KERNELS", "").lower() in {"0", "off", "no"}:
        return "MOETOOL_KERNELS=off is set"
    if find_spec("triton") is None:
        return "there is no triton; torch brings it along where it is built for a card"
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"Triton wants a card of compute capability 8.0, and this one has {capability[0]}.{capability[1]}"
    try:
        with torch.inference_mode(False), torch.no_grad():
            matrix = torch.arange(32.0, device=device).view(2, 16)
            table = Table([((numbers(matrix),),)], (2, 16), ())
            found = routed(table, torch.zeros(1, dtype=torch.int64, device=device), matrix[:1])
            works = found.allclose(matrix[:1] @ matrix.T)
    except Exception as error:  # a compiler, a driver, a linker: whatever fails, the eager form does without
        return f"Triton cannot compile or run them: {' '.join(str(error).split())[:200]}"
    return "" if works else "what Triton compiles gives wrong numbers"


def routed(table: Table, chosen: Tensor, inputs: Tensor) -> Tensor:
    """See `products.routed`. A matrix is read once for every four inputs, where there are more inputs than matrices."""
    pairs, outputs, launches = len(chosen), table.shape[0], table.launches
    chosen = chosen.to(torch.int64).contiguous()
    inputs = inputs.to(torch.float32).contiguous()
    output = inputs.new_zeros(pairs, outputs)
    if not pairs:
        return output
    between = inputs.new_zeros(TERMS, pairs, launches.inner) if launches.inner else None
    tokens = min(_TOKENS, _power(-(-pairs // len(table.products)))) if pairs > len(table.products) else 1
    order = places = chosen  # not read for one token at a time
    if tokens > 1:
        ordered, order = chosen.sort(stable=True)
        places = torch.arange(pairs, device=chosen.device) - torch.searchsorted(ordered, ordered)
    with torch.cuda.device_of(inputs):
        for step in launches.steps:
            term = step.slot // OPERANDS
            source = inputs if not step.is_last or between is None else between[term]
            target = output if not step.is_first or between is None else between[term]
            _launch(step, table, chosen, order, places, source, target, tokens)
    return output


def _launch(
    step: Launch,
    table: Table,
    chosen: Tensor,
    order: Tensor,
    places: Tensor,
    source: Tensor,
    target: Tensor,
    tokens: int,
) -> None:
    from moetool.kernels import triton_products as kernels

    own, pairs = step.kind, len(chosen)
    arguments = (
        *(table.launches.numbers, chosen, order, places, source, target, pairs, len(table.products)),
        *(source.shape[1], target.shape[1], step.number),
    )
    fixed = {"SLOT": step.slot, "SLOTS": SLOTS, "FIELDS": FIELDS, "NUMBERS": own.numbers, "TOKENS": tokens}
    if own.form == FORMS["sparse"]:
        kernels.sparse_products[(step.extent, pairs)](*arguments, **fixed, COLUMNS=_SPARSE, num_warps=2, **FUSED)
        return
    rows, columns = (_ROWS_TRANSPOSED, COLUMNS_TRANSPOSED) if own.transposed else (_ROWS, COLUMNS)
    blocks = -(-step.extent // (columns if own.transposed else rows))
    kernels.products[(blocks, pairs)](
        *arguments,
        **fixed,
        FORM=own.form,
        DECODE=own.decode,
        SERVED=own.served,
        ALIGNED=own.is_aligned,
        WHOLE=own.is_whole,
        TRANSPOSED=own.transposed,
        PLACED=own.is_placed,
        ROWS=rows // own.served,
        COLUMNS=columns,
        num_warps=8 if tokens > 2 else 4,  # so that sums of all tokens are in registers
        **FUSED,
    )


def unpacked_linear(operands: Sequence[Operand], inputs: Tensor) -> Tensor:
    """Inputs times the sum of stored matrices of one shape, none of them transposed: `[tokens, in]` →
    `[tokens, out]`."""
    return F.linear(inputs, summed(operands, inputs.dtype))


def unpacked(operand: Operand, dtype: torch.dtype) -> Tensor:
    """The matrix `[rows, columns]` that an operand stands for, in `dtype`."""
    return summed([operand], dtype)


def summed(operands: Sequence[Operand], dtype: torch.dtype) -> Tensor:
    """Sum matrices of one shape in fp32 on a card, and round the sum once to `dtype`."""
    sparse = [operand for operand in operands if operand.kind == "sparse"]
    others = [operand for operand in operands if operand.kind != "sparse"]
    pairs = [others[first : first + 2] for first in range(0, len(others), 2)]
    is_rounded_last = len(pairs) + len(sparse) > 1
    data = operands[0].data
    make = torch.empty if pairs else torch.zeros
    out = make(operands[0].shape, dtype=torch.float32 if is_rounded_last else dtype, device=data.device)
    with torch.cuda.device_of(data):
        for number, pair in enumerate(pairs):
            _unpack(pair, out, adds=number > 0)
        for operand in sparse:
            _scatter(operand, out)
    return out.to(dtype)


def _unpack(operands: Sequence[Operand], out: Tensor, *, adds: bool) -> None:
    from moetool.kernels import triton_products as kernels

    first, second = operands[0], operands[-1]
    rows, columns = first.shape
    fixed: dict[str, Any] = {}
    served = 1
    for name, operand in zip(("FIRST", "SECOND"), (first, second), strict=True):
        own = kind(replace(operand, transposed=False))
        fixed |= {
            name: own.form,
            f"{name}_DECODE": own.decode,
            f"{name}_ALIGNED": own.is_aligned,
            f"{name}_WHOLE": own.is_whole,
        }
        served = max(served, own.served)
    if len(operands) == 1:
        fixed["SECOND"] = 0
    grid = (-(-rows // _ROWS), -(-columns // COLUMNS))
    kernels.unpack[grid](
        *_pointers(first), first.group or 1, *_pointers(second), second.group or 1, out, rows, columns,
        **fixed, ADDS=adds, SERVED=served, ROWS=_ROWS // served, COLUMNS=COLUMNS, **FUSED,
    )  # fmt: skip


def _pointers(operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scales and levels; what there is none of is not read."""
    data, scales, levels = operand.data, operand.scales, card_levels(operand)
    return data, data if scales is None else scales, data if levels is None else levels


def _scatter(operand: Operand, out: Tensor) -> None:
    from moetool.kernels import triton_products as kernels

    operand, count = by_positions(operand), operand.data.numel()
    if count:
        kernels.scatter[(-(-count // 1024),)](operand.data, operand.scales, out, count, BLOCK=1024)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
