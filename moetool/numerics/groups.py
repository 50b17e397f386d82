"""Matrices [out, in] cut along their inputs into groups of equal length, as scales are shared."""

from collections.abc import Iterator

import torch
from torch import Tensor

ELEMENTS = 1 << 18  # worked on at a time


def check_group(columns: int, group: int) -> None:
    """Raises ValueError if groups of so many inputs do not divide `columns`."""
    if group < 1 or columns % group:
        raise ValueError(f"groups of {group} do not divide {columns} columns")


def weights_of(importance: Tensor | None, columns: int, group: int, device: torch.device) -> Tensor:
    """Weights of the inputs' squared errors, about 1 on average: [1, groups, group] fp32.

    Args:
        importance: [columns], finite and not negative, or `None` for all the same.
        columns: inputs.
        group: that share a scale.
        device: of the result.

    Raises:
        ValueError: `importance` is of another shape, or has other values.
    """
    weights = torch.ones(columns, device=device) if importance is None else importance.to(device).float()
    if weights.shape != (columns,) or not bool((weights >= 0).all()) or not bool(weights.isfinite().all()):
        raise ValueError(f"importance must be [{columns}], finite and not negative")
    mean = weights.double().mean()
    # Inputs that were never active still get sensible codes.
    weights = (weights / mean).clamp(1e-4, 1e30).float() if mean > 0 else torch.ones_like(weights)
    return weights.view(1, -1, group)


def in_parts(matrix: Tensor, group: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a matrix [out, in], a few at a time: which, and their groups [rows, groups, group] fp32.

    Raises:
        ValueError: values that are not finite.
    """
    rows, columns = matrix.shape
    step = max(1, ELEMENTS // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = matrix[part].detach().float().contiguous().view(-1, columns // group, group)
        if not bool(values.isfinite().all()):
            raise ValueError("a matrix with values that are not finite cannot be quantized")
        yield part, values
