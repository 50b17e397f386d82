"""From a difference to the tensors of the form it is to be stored in, by whichever form that is."""

import torch
from torch import Tensor

from moetool.numerics.factorize import factorize, truncate
from moetool.representations import Representation
from moetool.representations.low_rank import LowRank
from moetool.representations.low_rank_sparse import LowRankSparse
from moetool.representations.quantised import Quantised
from moetool.representations.quantised_low_rank import QuantisedLowRank
from moetool.representations.sparse import MagnitudeSparse, Sparse


def encode(
    representation: Representation,
    delta: Tensor,
    dtype: torch.dtype,
    *,
    gram: Tensor | None = None,
    basis: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """What is stored of a difference Δ `[out, in]` in a model of `dtype`.

    Args:
        representation: the form.
        delta: fp32.
        dtype: the model's storage dtype.
        gram: `[in, in]`, second moments of the inputs; with it, codes of full matrices make up for each other's errors,
            and scales and magnitudes count inputs by their energy. `None`: every input counts the same.
        basis: `[out, rank]`, for quantised factors: what U should span.
        row_scale: `[out]`, for quantised factors: how much each output counts.

    Raises:
        ValueError: the form does not fit the matrix.
    """
    if representation == LowRank(0):  # the base alone
        return {}
    if isinstance(representation, Quantised):
        return representation.encode(delta, dtype, gram=gram)
    if isinstance(representation, Sparse):
        return representation.encode(delta, dtype)
    if isinstance(representation, MagnitudeSparse):
        return representation.encode(delta, dtype, importance=None if gram is None else gram.diagonal())
    if isinstance(representation, QuantisedLowRank):
        assert basis is not None
        return representation.encode(delta, dtype, basis=basis, row_scale=row_scale, gram=gram)
    if isinstance(representation, LowRankSparse):
        found = factorize(delta, gram=gram, rank=representation.rank)
        u, v = truncate(delta, found, representation.rank, dtype)
        return representation.encode(delta, dtype, u=u, v=v, importance=None if gram is None else gram.diagonal())
    raise ValueError(f"deltas are not stored as '{representation.spec}' by this stage")
