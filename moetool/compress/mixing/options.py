"""Options of all methods that mix forms within a budget."""

from pydantic import Field

from moetool.compress.choices import Sensitivity
from moetool.job.options import CalibrationOptions, IncludeOptions, RunOptions


class MixingOptions(RunOptions, IncludeOptions, CalibrationOptions):
    """How forms are made and measured."""

    group_size: int = Field(
        128, ge=1, description="Inputs that share a scale; the largest divisor below if it does not divide a row."
    )
    sensitivity: Sensitivity = Field(
        "channel", description="Weigh errors by what they cost in loss: by output channel, by matrix, or not at all."
    )
    trellis: bool = Field(
        False,
        description="Trellis-coded quantization (1 to 4 bits): less error at the same size; slower to compress and "
        "to run.",
    )
    refine: int = Field(
        0,
        ge=0,
        description="Fine-tune each expert's codes and scales for so many steps; kept only where the held-out error "
        "improves (0: off).",
    )
