"""Leading eigenpairs of a symmetric matrix, by whichever driver is fastest for the share that is wanted."""

import numpy as np
import torch
from torch import Tensor

from moetool.numerics.fortran import call, character, integer, routine

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

# Reduction to tridiagonal form costs the same in both drivers; bisection and inverse iteration (?syevr) grow with k,
# divide and conquer (torch) does not. The crossing was at 0.20 N on an Intel and at 0.35 N on an AMD machine.
PARTIAL_SHARE = 0.25
# Below this the call overhead and the unblocked reduction dominate, and torch wins at any k.
PARTIAL_MINIMUM = 256


def top_eigh(matrix: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues of a symmetric matrix, descending, with their eigenvectors.

    Args:
        matrix: [n, n] fp32 or fp64, symmetric; both triangles must be filled. It is left unchanged.
        k: how many pairs, 0 <= k <= n.

    Returns:
        values [k] and vectors [n, k] (orthonormal columns) in the dtype and on the device of `matrix`.

    Raises:
        ValueError: the matrix is not square, or k is out of range.
        torch.linalg.LinAlgError: the matrix holds NaN or infinity, or the solver did not converge.
    """
    n = matrix.shape[0]
    if matrix.shape != (n, n) or not 0 <= k <= n:
        raise ValueError(f"top_eigh needs a square matrix and 0 <= k <= n, got {tuple(matrix.shape)} and k={k}")
    if k == 0:
        return matrix.new_zeros(0), matrix.new_zeros(n, 0)
    if not bool(torch.isfinite(matrix.sum())):  # some drivers hand NaN back, some never return
        raise LinAlgError("the matrix holds values that are not finite")
    if matrix.device.type == "cpu" and n > PARTIAL_MINIMUM and k <= PARTIAL_SHARE * n:
        partial = _syevr(matrix, k)
        if partial is not None:
            return partial
    values, vectors = torch.linalg.eigh(matrix)
    return values[n - k :].flip(0), vectors[:, n - k :].flip(1)


def _syevr(matrix: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """LAPACK ?syevr for the index range [n-k+1, n], without the GIL; None where it cannot be reached."""
    function = routine({torch.float32: "ssyevr", torch.float64: "dsyevr"}[matrix.dtype], 21)
    if function is None:
        return None
    n = matrix.shape[0]
    work_matrix = matrix.clone(memory_format=torch.contiguous_format)  # destroyed by the reduction
    values, vectors = matrix.new_zeros(n), matrix.new_zeros(k, n)  # [k, n] row major is [n, k] for Fortran
    support = np.zeros(2 * k, np.int32)
    found, info, unused = integer(0), integer(0), matrix.new_zeros(1)

    def run(work: Tensor, work_size: int, integers: np.ndarray[tuple[int], np.dtype[np.int32]], size: int) -> None:
        call(
            function,
            *(character("V"), character("I"), character("L"), integer(n), work_matrix, integer(n)),
            *(unused, unused, integer(n - k + 1), integer(n), unused, found, values, vectors, integer(n)),
            *(support, work, integer(work_size), integers, integer(size), info),
        )

    work, integers = matrix.new_zeros(1), np.zeros(1, np.int32)
    run(work, -1, integers, -1)  # asks for the sizes of the workspaces
    work_size, size = int(work.item()), int(integers[0])
    run(matrix.new_empty(work_size), work_size, np.empty(size, np.int32), size)
    if info[0] != 0 or found[0] != k:
        raise LinAlgError(f"?syevr returned info={info[0]} and {found[0]} of {k} eigenpairs")
    return values[:k].flip(0), vectors.flip(0).T
