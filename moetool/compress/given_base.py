"""What stages share that store experts relative to a base which `--base` names."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field
from typing_extensions import TypeVar

from moetool.bases.given import GivenBase, in_few_bits, kinship_warning, open_base
from moetool.checkpoint.reader import Checkpoint
from moetool.compress.delta_encoding import LoadBase
from moetool.compress.delta_forms import BaseBits
from moetool.job.job import Job
from moetool.job.options import KeepOptions, Options, RunOptions
from moetool.job.stage import Stage, found_here


class BaseOptions(Options):
    """Options of the base: where it comes from, and how it is stored."""

    base: str = Field(
        "mean",
        description="What deltas are taken to: `mean` or `ties` of the experts, a base written by fisher-merge, "
        "or the dense checkpoint that the experts were upcycled from.",
    )
    base_bits: BaseBits | None = Field(
        None,
        description="Store the base quantized: in 1, 2, 3, 4, 5, 6 or 8 bits, or in bitsandbytes' formats nf4 and "
        "int8; deltas then make up for its errors.",
    )
    shared_expert: bool = Field(
        False, description="Store the shared expert, if it is as wide as the others, as a delta to the same base."
    )


class GivenBaseOptions(RunOptions, KeepOptions, BaseOptions):
    """Options of a stage that starts from a given base."""


GivenBaseOptionsT = TypeVar("GivenBaseOptionsT", bound=GivenBaseOptions)


class OnGivenBase(Stage[GivenBaseOptionsT]):
    """A stage that stores experts relative to a given base."""

    @property
    def _base_group(self) -> int:
        """Inputs that share a scale in a quantized base, where deltas have no groups."""
        return 128

    def _base(self) -> GivenBase:
        options = self.options
        return open_base(options.base, self.source.experts, shared_expert=options.shared_expert)

    def inputs(self) -> Mapping[str, Checkpoint]:
        return {**super().inputs(), **self._base().inputs()}

    def sources(self) -> Mapping[str, str]:
        return {**super().sources(), "base": self._base().fingerprint}

    def reads(self) -> list[Path]:
        return [*super().reads(), *found_here([self.options.base])]

    def _opened(self, job: Job) -> GivenBase:
        """The base; warns of one that the experts are far from."""
        given = self._base()
        if warning := kinship_warning(given):
            job.progress.log(warning)
        return given

    def _loading(self, given: GivenBase) -> LoadBase:
        """What gives the base of a layer, in the bits that were asked for."""
        bits = self.options.base_bits
        return lambda layer, weights: in_few_bits(given.layer(layer, weights), bits, self._base_group)
