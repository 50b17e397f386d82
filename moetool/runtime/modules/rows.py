"""Adding to some rows of a tensor, in place."""

from typing import Any

import torch
from torch import Tensor


def add_rows(total: Tensor, rows: Tensor, parts: Tensor) -> Tensor:
    """Add `parts` [routed, columns] to the rows `rows` [routed] of `total` [tokens, columns], in place; returns it.

    As `index_add_`, but keeps no `parts` for the backward, which `index_add_` does to know their shape.
    """
    added: Tensor = _AddRows.apply(total, rows, parts)
    return added


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, rows: Tensor, parts: Tensor) -> Tensor:
        ctx.mark_dirty(total)
        ctx.save_for_backward(rows)
        return total.index_add_(0, rows, parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        (rows,) = ctx.saved_tensors
        return gradient, None, gradient.index_select(0, rows)
