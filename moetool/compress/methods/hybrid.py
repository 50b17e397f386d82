"""A quantized base, and every delta in whichever form loses least for its bytes."""

from functools import cached_property
from typing import ClassVar

from pydantic import Field

from moetool.bases.choices import Merge
from moetool.compress.encoding import BaseBits
from moetool.compress.factors.ranking import check_ratio
from moetool.compress.mixing.choosing import Choosing
from moetool.compress.mixing.footings import Footing, average_bits, on_base
from moetool.compress.mixing.mixing import Mixing
from moetool.compress.mixing.options import MixingOptions
from moetool.compress.mixing.stage import MixingStage
from moetool.compress.told import MixedTold
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.writing import in_format, original_bytes


class HybridOptions(MixingOptions):
    """A budget of bytes, and what may be bought with it."""

    ratio: float = Field(
        gt=0, lt=1, description="Share of the weight files' bytes to save: 0.8 makes the model 80 % smaller."
    )
    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    base_bits: BaseBits = Field(
        "2", description="Bits of the base: 1, 2, 3, 4, 8, nf4 or int8. Deltas correct its errors."
    )
    rotate: bool = Field(
        False,
        description="Rotate inputs by a random Hadamard matrix before quantizing: less error in few bits, for a "
        "small product per token.",
    )


class Hybrid(MixingStage[HybridOptions]):
    """Bits and ranks together: each form of each matrix is made and measured, and the budget buys the best mix."""

    name: ClassVar[str] = "hybrid"
    summary: ClassVar[str] = "a quantized base, and per delta the bits or ranks that lose least"
    options_type: ClassVar[type[RunOptions]] = HybridOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    @property
    def _target(self) -> int:
        return round(original_bytes(self.source) * (1 - self.options.ratio))

    def _footing(self, bits: float) -> Footing:
        options = self.options
        rotated_by = options.seed if options.rotate else None
        return on_base(
            self.source.experts.shape, options.base_bits, bits, options.group_size, rotated_by, options.trellis
        )

    @cached_property
    def _smallest(self) -> int:
        return self._choosing(1.0).smallest

    def _choosing(self, bits: float) -> Choosing:
        return Choosing(self.source, [self._footing(bits)], "matrix", self.options.shard_size)

    @cached_property
    def _bits(self) -> float:
        """Bits that the budget leaves for every number of a delta."""
        return average_bits(self.source.experts, self._target - self._smallest)

    @cached_property
    def mixing(self) -> Mixing:
        return Mixing(self.name, self.source, self.options, [self._footing(self._bits)], self.options.merge)

    def plan(self) -> Plan:
        self.mixing.check()
        stored = in_format(self.source.checkpoint)
        check_ratio(self.options.ratio, self._smallest, original_bytes(self.source), stored)
        details = {"smallest_possible_bytes": self._smallest, "bits_per_number": round(self._bits, 2)}
        return self.mixing.plan(self._target, details)

    def run(self, job: Job) -> MixedTold:
        mixing = self.mixing
        choosing = Choosing(self.source, mixing.footings, "matrix", self.options.shard_size)
        return mixing.run(job, lambda losses: choosing.mix(self._target, losses), self.options.ratio)
