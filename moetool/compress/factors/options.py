"""Options of low-rank factors, which `svd-compress`, `compress --method d2moe` and others share."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from moetool.compress.budget.spending import Allocation
from moetool.compress.factors.sensitivity import Sensitivity
from moetool.compress.factors.svd import SharedFactor, Svd
from moetool.job.options import KeepOptions, RunOptions, SizeOptions, TextOptions


class FactorOptions(RunOptions, SizeOptions, KeepOptions, TextOptions):
    """Options of methods that store deltas as low-rank factors: ranks, their budget, and the error to make least."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "size", "rank")

    rank: int | None = Field(None, ge=0, description="Instead of --ratio: one rank for every matrix.")
    svd: Svd = Field(
        "truncation-aware",
        description="Factors of least error: of outputs on the text (truncation-aware), of weights scaled by their "
        "inputs (activation-aware), or of weights (vanilla).",
    )
    allocation: Allocation = Field(
        "water-filling", description="How ranks are shared out: where a byte removes most loss, by layer, or equally."
    )
    sensitivity: Sensitivity = Field(
        "channel",
        description="Weigh errors by what they cost in loss: by output channel, by matrix, or not at all. By channel, "
        "what errors of several channels cost together counts, too, except with --share or --svd vanilla.",
    )
    share: SharedFactor = Field(
        "none", description="Let all experts of a layer share the factor V, or U, of their deltas (Appendix A.6)."
    )
    trim: int = Field(
        0, ge=0, description="Drop the deltas of so many experts per layer, those with the fewest tokens."
    )
    rank_multiple: int = Field(1, ge=1, description="Ranks are multiples of this; 8 suits tensor cores.")
    factor_bits: Literal[8, 16] = Field(
        16, description="Bits per number of the factors: 16 stores the model's own dtype, 8 stores codes and allows "
        "twice the rank at the same size."
    )  # fmt: skip

    @model_validator(mode="after")
    def _apart_from_share(self) -> "FactorOptions":
        if self.share != "none" and self.trim:
            raise ValueError(f"--share {self.share} and --trim exclude each other: what is shared cannot be dropped")
        if self.share != "none" and self.factor_bits == 8:
            raise ValueError(f"--share {self.share} and --factor-bits 8 exclude each other")
        if self.share != "none" and self.svd == "activation-aware":
            raise ValueError(f"--share {self.share} goes with --svd truncation-aware or vanilla")
        return self

    @property
    def links_outputs(self) -> bool:
        """Whether errors at the outputs of a delta count together, where gradients were taken; else by channel at
        most."""
        return self.sensitivity == "channel" and self.share == "none" and self.svd != "vanilla"

    @property
    def coded_bits(self) -> int | None:
        """Bits of the codes that factors are stored in; `None` if they are stored in the model's dtype."""
        return None if self.factor_bits == 16 else self.factor_bits
