"""A dense model into a mixture of experts: copies, partly redrawn copies, or pieces of them."""

from typing import Any, ClassVar

import torch
from pydantic import Field

from moetool.errors import UsageError
from moetool.job.options import RunOptions
from moetool.upcycle.experts import Copies, Experts, PartlyRedrawn, Pieces
from moetool.upcycle.stage import Upcycle, UpcycleOptions


class Vanilla(Upcycle):
    """Sparse Upcycling: every expert is a copy of the dense FFN."""

    name: ClassVar[str] = "vanilla"
    summary: ClassVar[str] = "every expert a copy of the dense FFN; computes what the dense model computes"

    def experts(self) -> Experts:
        return Copies(self.dense)


class DropOptions(UpcycleOptions):
    """How much of each copy is drawn anew."""

    drop: float = Field(0.5, ge=0, le=1, description="Share of the intermediate channels that is drawn anew.")


class Drop(Upcycle):
    """Drop-Upcycling: copies that differ from the start."""

    name: ClassVar[str] = "drop"
    summary: ClassVar[str] = "copies, a share of whose channels is drawn anew"
    options_type: ClassVar[type[RunOptions]] = DropOptions
    options: DropOptions

    def experts(self) -> Experts:
        return PartlyRedrawn(self.dense, self.options.drop, self.options.seed)

    @property
    def preserves(self) -> bool:
        return super().preserves and round(self.options.drop * self.dense.intermediate) == 0


class FineGrainedOptions(UpcycleOptions):
    """Into how many pieces each copy is cut."""

    experts: int | None = Field(8, ge=2, description="Copies of the FFN per layer, each cut in pieces.")
    top_k: int = Field(2, ge=1, description="Copies per token.")
    granularity: int = Field(4, ge=1, description="Pieces per copy: the model has experts × granularity experts.")


class FineGrained(Upcycle):
    """Virtual groups: many narrow experts that together are the copies."""

    name: ClassVar[str] = "fine-grained"
    summary: ClassVar[str] = "copies cut in pieces, each an expert; computes what the dense model computes"
    options_type: ClassVar[type[RunOptions]] = FineGrainedOptions
    options: FineGrainedOptions

    @property
    def granularity(self) -> int:
        pieces, width = self.options.granularity, self.dense.intermediate
        if width % pieces:
            near = sorted((d for d in range(1, width + 1) if width % d == 0), key=lambda d: (abs(d - pieces), d))[:4]
            raise UsageError(
                f"--granularity {pieces} does not divide the FFN's {width} channels. Near it: "
                f"{', '.join(map(str, sorted(near)))}."
            )
        if pieces & (pieces - 1) and self.stored_dtype != torch.float32:
            raise UsageError(
                f"--granularity {pieces} multiplies down matrices by {pieces}, which {self.stored_dtype} cannot hold "
                "exactly. Take a power of two, or --dtype float32."
            )
        return pieces

    def experts(self) -> Experts:
        return Pieces(self.dense, self.granularity, self.stored_dtype)

    def notes(self, config: dict[str, Any]) -> list[str]:
        notes = super().notes(config)
        if self.granularity > 1 and self.target.architecture is not None:
            notes.append(
                "run in 16 bits, two copies' logits are sometimes equal (bfloat16: for about 1 token in 300 per layer) "
                f"and top-k may then take pieces of both: {self.target.name} routes in the model's dtype, --target "
                "moetool in fp32"
            )
        return notes
