"""A square root L of a positive semi-definite matrix, L L^T = matrix, which may be singular."""

import torch
from torch import Tensor


def square_root(matrix: Tensor) -> Tensor:
    """Some L with L L^T = matrix, [n, n] fp64: the Cholesky factor, or for singular matrices U sqrt(max(lambda, 0)).

    No ridge is added: relative to the mean diagonal it would drown every ordinary channel beside an outlier.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) == 0 and bool(torch.isfinite(factor.diagonal()).all()):
        return factor
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = vectors * values.clamp_min(0).sqrt()
    return root
