"""Second moments of activations: the Gram matrix that whitening, merging, shrinkage and error feedback read."""

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from moetool.numerics.congruence import mirror_lower, symmetric_blocks
from moetool.numerics.fortran import call, character, integer, routine
from moetool.numerics.precision import bf16_products, fp32_products_are_exact, has_fast_bf16

_TOKENS = 4096  # rows widened at a time
_TOKENS_FP64 = 512  # fewer for fp64: the widened rows should stay in the cache


class Gram:
    """The sum of x x^T over the rows given to `add`.

    In fp64, bf16 rows are multiplied in fp32, which holds their products exactly (on bf16 units where the processor
    has them), and chunks of them summed in fp64; relative error about 1e-6. Other rows are multiplied in fp64:
    whitening takes the Gram's smallest eigenvalues seriously, and fp32 would lose them below 1e-7 of the largest.

    In fp32, half the memory and a half to a third of the time, everything has a relative error of about 1e-6. That is
    enough where the matrix is damped by more, as error feedback does.

    Holds one [size, size] matrix. Not safe for concurrent `add` calls on the same object.

    Args:
        size: length of a row.
        device: where the rows come from and the matrix lives.
        dtype: float64 or float32.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> None:
        self.count = 0  #: tokens seen
        self._sum = torch.zeros(size, size, dtype=dtype, device=device)  # lower triangle is current

    def add(self, rows: Tensor) -> None:
        """Add the outer products of `rows` [tokens, size], any floating dtype.

        Raises:
            ValueError: the rows have another length, or are no floating point matrix.
        """
        size = len(self._sum)
        if rows.ndim != 2 or rows.shape[1] != size or not rows.is_floating_point():
            raise ValueError(f"Gram needs floating point rows [tokens, {size}], got {rows.dtype} {list(rows.shape)}")
        rows = rows.detach()
        self.count += len(rows)
        on_cpu, is_bf16 = self._sum.device.type == "cpu", rows.dtype == torch.bfloat16
        if self._sum.dtype == torch.float32:
            in_fp32 = not on_cpu or fp32_products_are_exact()
        else:
            in_fp32 = on_cpu and is_bf16 and fp32_products_are_exact()
        step = _TOKENS if in_fp32 or not on_cpu else _TOKENS_FP64
        for chunk in rows.split(step):
            if in_fp32:
                with bf16_products() if on_cpu and is_bf16 and has_fast_bf16() else nullcontext():
                    self._add_lower(chunk.float())
            elif not (on_cpu and torch.get_num_threads() == 1 and self._dsyrk(chunk.double())):
                self._add_lower(chunk.double())

    @property
    def size(self) -> int:
        """Length of a row."""
        return len(self._sum)

    def matrix(self) -> Tensor:
        """The symmetric [size, size] sum so far. It is the accumulator itself: clone it to go on adding."""
        return mirror_lower(self._sum)

    def forget(self) -> None:
        """Free the matrix, which cannot be read any more; `count` stays."""
        self._sum = self._sum.new_empty(0, 0)

    def _add_lower(self, chunk: Tensor) -> None:
        """Add chunk^T chunk to the lower triangle, slab by slab."""
        for start, stop in symmetric_blocks(len(self._sum)):
            own, left, right = self._sum[start:stop, :stop], chunk[:, start:stop].T, chunk[:, :stop]
            if own.dtype == chunk.dtype:
                own.addmm_(left, right)
            else:
                own += left @ right

    def _dsyrk(self, chunk: Tensor) -> bool:
        """Add chunk^T chunk in place by BLAS dsyrk, half the operations of a product, but on one thread; False where
        unavailable."""
        function = routine("dsyrk", 10)
        if function is None or self._sum.dtype != chunk.dtype:
            return False
        size, one = integer(len(self._sum)), np.ones(1)
        # Fortran reads row major rows as their transpose, and the row major lower triangle as the upper one.
        call(
            function,
            *(character("U"), character("N"), size, integer(len(chunk)), one),
            *(chunk.contiguous(), size, one, self._sum, size),
        )
        return True
