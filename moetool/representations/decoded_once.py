"""Codes that are decoded once for many passes, for training in which they stay and their scales move."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.representations.mixed_rows import MixedRowsWeight
from moetool.representations.quantized import QuantizedWeight

AnyCodes = QuantizedWeight | MixedRowsWeight


@contextmanager
def decoded_once(model: nn.Module) -> Iterator[None]:
    """Context manager in which the unscaled values of a model's codes are held in fp32, 4 bytes per weight: products
    are equal, and nothing is decoded again."""
    weights = [module for module in model.modules() if isinstance(module, AnyCodes)]
    for weight in weights:
        vars(weight)["forward"] = partial(_product, weight, _values(weight), _rows(weight))
    try:
        yield
    finally:
        for weight in weights:
            del vars(weight)["forward"]


@torch.no_grad()
def _values(weight: AnyCodes) -> Tensor:
    """The matrix `[out, groups, group]` with scales of one, fp32."""
    scales = weight.scales
    weight.scales = nn.Parameter(torch.ones_like(scales, dtype=torch.float32))
    try:
        return weight.dense().float().view(weight.shape[0], scales.shape[1], -1)
    finally:
        weight.scales = scales


def _rows(weight: AnyCodes) -> Tensor | None:
    """Which row each row of scales is of, where some rows have none or they are in another order."""
    if isinstance(weight, QuantizedWeight):
        return None
    return weight.places()[weight.shape[0] - len(weight.scales) :].long()


def _product(
    weight: AnyCodes, values: Tensor, rows: Tensor | None, inputs: Tensor, *, transposed: bool = False
) -> Tensor:
    """`[tokens, in]` → `[tokens, out]`, or `transposed` `[tokens, out]` → `[tokens, in]`."""
    scales: Tensor = weight.scales
    if rows is not None:
        scales = scales.new_zeros(weight.shape[0], scales.shape[1]).index_copy(0, rows, scales)
    matrix = (values.to(inputs.dtype) * scales.to(inputs.dtype).unsqueeze(2)).view(weight.shape)
    return inputs @ matrix if transposed else F.linear(inputs, matrix)
