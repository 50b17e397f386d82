"""Compression ratios as the D²-MoE paper counts them (Table 12), to compare with its numbers and for nothing else.

The paper counts parameters, takes channels of the base that are only skipped at run time as gone although the file
still holds them, and rounds ranks up. What it calls 80 % is 72.8 % on disk.
"""

import math
from dataclasses import dataclass

from moetool.architectures import MoEShape
from moetool.checkpoint.sizes import format_most_share
from moetool.errors import UsageError


@dataclass(frozen=True)
class PaperRank:
    """One rank for every delta, and the share of a delta's parameters that its factors keep."""

    rank: int
    kept: float


def paper_rank(ratio: float, pruned: float, shape: MoEShape, moe_layers: int, total: int) -> PaperRank:
    """The rank with which the paper reaches a ratio.

    Args:
        ratio: share of all parameters that are counted as gone.
        pruned: share of the base that is pruned, statically and dynamically together.
        shape: of every MoE layer.
        moe_layers: how many there are.
        total: parameters of the model, every expert in full.

    Raises:
        UsageError: bases and everything that is not an expert are already more.
    """
    matrix = shape.hidden * shape.intermediate
    experts = shape.expert_parameters * shape.experts * moe_layers
    kept = 1 - ratio * total / experts - (1 - pruned) / shape.experts
    if kept <= 0:
        highest = (1 - (1 - pruned) / shape.experts) * experts / total
        most = format_most_share(highest)
        raise UsageError(f"By the paper's counting --ratio {ratio:g} is not possible here; at most {most} is.")
    per_rank = (shape.hidden + shape.intermediate) / matrix
    rank = math.ceil(kept / per_rank)
    return PaperRank(rank, rank * per_rank)
