"""Products of tokens with the matrices of a `Table`, wherever they are: `cpu` and `card` have the kernels."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.compiled import compiler
from moetool.kernels import card, cpu
from moetool.kernels.table import Table
from moetool.representations.operand import Operand, Products

_ONCE = 32  # with 1 TFLOP/s: a number of a base is added in .2 ns, and multiplied by 64 tokens in .13


def problem(device: torch.device) -> str:
    """Why there are no kernels for a device, in a sentence; nothing if there are. Tries them when asked first."""
    if device.type == "cuda":
        return card.problem(device)
    return compiler.problem() if device.type == "cpu" else f"there are none for {device.type}"


def routed(table: Table, chosen: Tensor, inputs: Tensor) -> Tensor:
    """Each input times the matrix that it chose, in fp32: `[pairs, in]` → `[pairs, out]`. For few tokens.

    No matrix is written out. `chosen` [pairs] int64 names rows of the table; the result is zero where it names none.
    """
    found: Tensor = _kernels(inputs).routed(table, chosen, inputs)
    return found


def linear(products: Products, inputs: Tensor, out_features: int) -> Tensor:
    """Inputs times a matrix `[out, in]`, in their dtype: `[tokens, in]` → `[tokens, out]`. For many tokens.

    What has to be unpacked is unpacked in one; factors stay factors. Products for some outputs stand for all there is.
    A processor without products of 16-bit numbers computes in fp32, and rounds once.
    """
    if inputs.device.type == "cpu" and cpu.lacks_products(inputs.dtype):
        return linear(products, inputs.float(), out_features).to(inputs.dtype)
    singles = [chain[0] for chain in products if len(chain) == 1 and chain[0].places is None]
    output: Tensor | None = None
    if is_packed(products):
        output = _kernels(inputs).unpacked_linear(singles, inputs)
        singles = []
    chains = [(single,) for single in singles] + [chain for chain in products if len(chain) > 1]
    for chain in chains:
        output = _add(output, _chain(chain, inputs))
    if output is None:
        output = inputs.new_zeros(len(inputs), out_features)
        for chain in products:  # no two of them in the same places
            if (places := chain[0].places) is not None:
                output.index_copy_(1, places.long(), _chain(chain, inputs))
    return output


def tokens_met_once(inputs: Tensor) -> int:
    """Tokens per expert up to which it is faster to multiply all of them by a base of plain numbers once than to add it
    to the matrix of every expert that `linear` writes out."""
    return _ONCE if inputs.device.type == "cpu" and cpu.multiplies(inputs.dtype) else 0


def is_packed(products: Products) -> bool:
    """Whether `linear` writes out all of the matrix on its way, so that another one can be added at no cost."""
    return any(len(chain) == 1 and chain[0].kind != "numbers" and chain[0].places is None for chain in products)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _chain(chain: Sequence[Operand], inputs: Tensor) -> Tensor:
    for operand in chain:
        if operand.kind == "numbers":
            inputs = _times(inputs, operand.data.t() if operand.transposed else operand.data)
        elif operand.transposed:
            inputs = inputs @ _kernels(inputs).unpacked(operand, inputs.dtype)
        else:
            inputs = _kernels(inputs).unpacked_linear([operand], inputs)
    return inputs


def _times(inputs: Tensor, matrix: Tensor) -> Tensor:
    """Inputs times a matrix `[out, in]` of numbers, converted to their dtype where it has another."""
    if inputs.dtype != matrix.dtype and inputs.device.type == "cpu":
        return cpu.converted_linear(inputs, matrix)
    return F.linear(inputs, matrix.to(inputs.dtype))


def _kernels(inputs: Tensor) -> ModuleType:
    """The kernels of the device that the inputs are on."""
    return cpu if inputs.device.type == "cpu" else card
