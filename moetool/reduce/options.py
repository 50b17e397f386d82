"""The options that all methods share which leave a layer fewer experts."""

from typing import ClassVar, TypeVar

from pydantic import Field

from moetool.job.options import RunOptions, TextOptions


class ReduceOptions(RunOptions, TextOptions):
    """Options of reducing experts: how many are kept, and the calibration text that chooses."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "experts")

    ratio: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the weight files' bytes that disappears, at least: every layer keeps as many experts as "
        "this allows.",
    )
    experts: int | None = Field(None, ge=1, description="Instead of a ratio: experts that every layer keeps.")


ReduceOptionsT = TypeVar("ReduceOptionsT", bound=ReduceOptions)
