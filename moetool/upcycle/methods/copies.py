"""Upcycling to experts that are copies of the dense FFN, partly redrawn copies, or pieces of copies."""

import torch
from pydantic import Field

from moetool.checkpoint.sizes import Part
from moetool.errors import UsageError
from moetool.runtime.dense import DenseModel
from moetool.upcycle.experts import Copies, PartlyRedrawn, Pieces
from moetool.upcycle.stage import Start, UpcycleOptions, method


@method("vanilla", "every expert a copy of the dense FFN; computes what the dense model computes", UpcycleOptions)
def vanilla(dense: DenseModel, options: UpcycleOptions, dtype: torch.dtype) -> Start:
    """Sparse Upcycling (arXiv:2212.05055): every expert starts as a copy of the dense feed-forward network."""
    return Start(Copies([dense]))


class DropOptions(UpcycleOptions):
    """Options of Drop-Upcycling: the share of each copy's channels that is drawn anew."""

    drop: Part = Field(0.5, ge=0, le=1, description="Share of the intermediate channels that is drawn anew.")


@method("drop", "copies, a share of whose channels is drawn anew", DropOptions)
def drop(dense: DenseModel, options: DropOptions, dtype: torch.dtype) -> Start:
    """Drop-Upcycling (arXiv:2502.19261): copies that differ from the start."""
    redrawn = PartlyRedrawn(dense, options.drop, options.seed)
    return Start(redrawn, preserves=round(options.drop * dense.intermediate) == 0)


class FineGrainedOptions(UpcycleOptions):
    """Options of fine-grained upcycling: how many copies there are, and into how many pieces each is cut."""

    experts: int | None = Field(8, ge=2, description="Copies of the FFN per layer, each cut in pieces.")
    top_k: int = Field(2, ge=1, description="Copies per token.")
    granularity: int = Field(4, ge=1, description="Pieces per copy: the model has experts × granularity experts.")


@method(
    "fine-grained", "copies cut in pieces, each an expert; computes what the dense model computes", FineGrainedOptions
)
def fine_grained(dense: DenseModel, options: FineGrainedOptions, dtype: torch.dtype) -> Start:
    """Virtual groups (arXiv:2410.07524): many narrow experts that together are the copies."""
    pieces, width = options.granularity, dense.intermediate
    if width % pieces:
        near = sorted((d for d in range(1, width + 1) if width % d == 0), key=lambda d: (abs(d - pieces), d))[:4]
        raise UsageError(
            f"--granularity {pieces} does not divide the FFN's {width} channels. Near it: "
            f"{', '.join(map(str, sorted(near)))}."
        )
    if pieces & (pieces - 1) and dtype != torch.float32:
        raise UsageError(
            f"--granularity {pieces} multiplies down matrices by {pieces}, which {dtype} cannot hold exactly. Take a "
            "power of two, or --dtype float32."
        )
    return Start(Pieces(dense, pieces, dtype), pieces=pieces)
