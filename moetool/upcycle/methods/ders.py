"""Upcycling to experts that share the dense FFN and differ by small deltas, which are all that training adds (DeRS)."""

import torch
from pydantic import Field

from moetool.checkpoint.sizes import Part
from moetool.errors import UsageError
from moetool.representations.low_rank import LowRank
from moetool.representations.sparse import Sparse
from moetool.runtime.dense import DenseModel
from moetool.upcycle.experts import Copies
from moetool.upcycle.stage import Start, UpcycleOptions, method


class DeltaOptions(UpcycleOptions):
    """Options of DeRS upcycling: whether the shared expert is a delta, too."""

    shared_expert: bool = Field(False, description="Make the shared expert of --shared a delta to the same FFN, too.")


class LowRankOptions(DeltaOptions):
    """Options of upcycling to low-rank deltas: the rank that all of them have."""

    rank: int = Field(1, ge=1, description="Rank of every delta.")


@method("ders-lowrank", "the dense FFN once, and low-rank deltas that training fills", LowRankOptions)
def ders_lowrank(dense: DenseModel, options: LowRankOptions, dtype: torch.dtype) -> Start:
    """DeRS-LM upcycling (arXiv:2503.01359, §3.3): experts are low-rank deltas to the dense network.

    Raises:
        UsageError: the rank is larger than the matrices allow.
    """
    if options.rank > min(dense.hidden, dense.intermediate):
        raise UsageError(
            f"--rank {options.rank}: matrices of {dense.intermediate} × {dense.hidden} have no more than "
            f"{min(dense.hidden, dense.intermediate)}."
        )
    form = LowRank(options.rank)
    return Start(Copies([dense]), form=lambda layer, expert, role: form, shared_on_base=options.shared_expert)


class SparseOptions(DeltaOptions):
    """Options of sparse deltas: the share of their elements that stays zero."""

    drop: Part = Field(0.9999, ge=0, lt=1, description="Share of every delta's elements that stay zero.")


@method("ders-sparse", "the dense FFN once, and sparse deltas that training fills", SparseOptions)
def ders_sparse(dense: DenseModel, options: SparseOptions, dtype: torch.dtype) -> Start:
    """DeRS-SM (arXiv:2503.01359, §3.3): the places of the elements follow from the seed."""
    return Start(
        Copies([dense]),
        form=lambda layer, expert, role: Sparse.derived(options.drop, options.seed, layer, expert, role),
        shared_on_base=options.shared_expert,
    )
