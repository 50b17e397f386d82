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
        description="Codes of 1 to 4 bits in a trellis, where several together say what a number is: a third to a half "
        "less is lost in the same bytes, for more time when they are chosen and when they run.",
    )
    refine: int = Field(
        0,
        ge=0,
        description="Steps in which each expert's codes and scales are then moved by gradients of its own output's "
        "error; windows held out tell whether it got better.",
    )
