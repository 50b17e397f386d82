"""The options that all methods share which leave a layer fewer experts."""

from typing import ClassVar, TypeVar

from pydantic import Field

from moetool.checkpoint.sizes import Ratio
from moetool.job.options import KeepOptions, RunOptions, SizeOptions, TextOptions


class ReduceOptions(RunOptions, SizeOptions, KeepOptions, TextOptions):
    """Options of reducing experts: how many are kept, and the calibration text that chooses."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "size", "experts")

    ratio: Ratio | None = Field(
        None,
        description="Share of the weight files' bytes to save, at least (0.4 or 40%): every layer keeps as many "
        "experts as this allows.",
    )
    experts: int | None = Field(None, ge=1, description="Instead of a ratio: experts that every layer keeps.")


ReduceOptionsT = TypeVar("ReduceOptionsT", bound=ReduceOptions)
