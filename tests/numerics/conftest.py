"""Synthetic deltas and Gram matrices with the spectra that whitening meets."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Build = Callable[..., Tensor]


def _haar(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64)).Q


@pytest.fixture
def make_delta() -> Build:
    def build(rows: int, columns: int, beta: float = 0.3, seed: int = 0) -> Tensor:
        """fp32 [rows, columns] with singular values i^-beta."""
        generator = torch.Generator().manual_seed(1000 + seed)
        rank = min(rows, columns)
        values = torch.arange(1, rank + 1, dtype=torch.float64) ** -beta
        return ((_haar(rows, rank, generator) * values) @ _haar(columns, rank, generator).T).float()

    return build


@pytest.fixture
def make_gram() -> Build:
    def build(n: int, condition: float, seed: int = 0, base: float = 1e3) -> Tensor:
        """fp64 [n, n]: power-law eigenvalues, lifted to `condition` by four outlier channels."""
        generator = torch.Generator().manual_seed(seed)
        base = min(base, condition)
        q = _haar(n, n, generator)
        values = torch.arange(1, n + 1, dtype=torch.float64) ** (-math.log(base) / math.log(n))
        scale = torch.ones(n, dtype=torch.float64)
        if condition > base:
            top = math.sqrt(condition / base / float(values.mean()))
            scale[torch.randperm(n, generator=generator)[:4]] = torch.logspace(0.5, math.log10(top), 4).double()
        matrix = scale[:, None] * ((q * values) @ q.T) * scale
        return (matrix + matrix.T) / 2

    return build
