"""The best that a budget of bytes can buy: a base or none, rotated inputs or not, bits and ranks.

Every form of every matrix is measured on every footing, in one pass; then each group of matrices gets the footing, and
each matrix the form, with which all lose least together. Whether a base earns its bytes is thereby measured and not
assumed: experts that were upcycled from one network have one in common, experts that were trained as such mostly do not
(arXiv:2606.03465).
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from moetool.bases.choices import Merge
from moetool.checkpoint.files import atomically
from moetool.checkpoint.sizes import ByteSize, format_bytes
from moetool.checkpoint.source import local_path
from moetool.compress.encoding import BaseBits
from moetool.compress.mixing.choosing import Choosing, FormLosses, Mix
from moetool.compress.mixing.footings import Footing, average_bits, on_base, without_base
from moetool.compress.mixing.mixing import Mixing
from moetool.compress.mixing.options import MixingOptions
from moetool.compress.mixing.plan_file import plan_text, read_plan
from moetool.compress.told import MixedTold
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.stage import Stage
from moetool.job.writing import OutputPlan, original_bytes


class AutoOptions(MixingOptions):
    """A budget, and what it may be spent on."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "bytes", "plan")  # one typed replaces the others of a preset

    ratio: float | None = Field(
        None, gt=0, lt=1, description="Share of the weight files' bytes that disappears: 0.8 makes them 80 % smaller."
    )
    bytes: ByteSize | None = Field(None, description="Instead of a ratio: how large weight files may be, e.g. 20GB.")
    plan: str | None = Field(
        None, description="Instead of either: a file that --save-plan wrote, edited or not, to be followed."
    )
    save_plan: str | None = Field(None, description="Write what was chosen to this YAML file, which --plan reads.")
    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    base_bits: BaseBits = Field("2", description="Bits of the base that is offered: 1, 2, 3, 4, 8, nf4 or int8.")
    rotate: bool = Field(
        False,
        description="Offer everything for rotated inputs, too, which takes about twice the time to measure; inputs are "
        "rotated by blocks of a Hadamard matrix with random signs.",
    )

    @model_validator(mode="after")
    def _one_budget(self) -> "AutoOptions":
        if sum(given is not None for given in (self.ratio, self.bytes, self.plan)) != 1:
            raise ValueError("give --ratio, --bytes or --plan, one of them")
        if self.plan is not None and self.save_plan is not None:
            raise ValueError("--save-plan writes what was chosen; with --plan nothing is")
        return self


class Auto(Stage[AutoOptions]):
    """What loses least for its bytes."""

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "a base or none, bits and ranks: whatever loses least within a budget"
    options_type: ClassVar[type[RunOptions]] = AutoOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    def reads(self) -> list[Path]:
        own = [] if self.options.plan is None else [local_path(self.options.plan)]
        return [*super().reads(), *own]

    def plan(self) -> Plan:
        mixing, original = self._mixing, original_bytes(self.source)
        mixing.check()
        if self.given is None and not self._smallest <= self._target < original:
            raise UsageError(
                f"{format_bytes(self._target)} are not possible here: the weight files take {format_bytes(original)}, "
                f"and {format_bytes(self._smallest)} at the least, so the ratio must be above 0 and at most "
                f"{int((1 - self._smallest / original) * 1000) / 1000:g}."
            )
        details = {"smallest_possible_bytes": self._smallest, "bits_per_number": round(self._bits_on(0), 2)}
        return mixing.plan(self._target, details if self.given is None else {})

    def run(self, job: Job) -> MixedTold:
        mixing = self._mixing

        def choose(losses: FormLosses) -> Mix:
            mix = Choosing(self.source, mixing.footings, "matrix", self.options.shard_size).mix(self._target, losses)
            if self.options.save_plan is not None and job.ranks.is_first:
                file = local_path(self.options.save_plan)
                with atomically(file) as temporary:
                    temporary.write_text(plan_text(mix.layouts), encoding="utf-8")
            return mix

        return mixing.run(job, choose, 1 - self._target / original_bytes(self.source))

    @cached_property
    def given(self) -> Mapping[int, LayerLayout] | None:
        """The layouts of a plan that is to be followed."""
        if self.options.plan is None:
            return None
        reader = self.source.experts
        return read_plan(local_path(self.options.plan), reader.shape, tuple(reader.moe_layers))

    @cached_property
    def _target(self) -> int:
        if self.given is not None:
            return OutputPlan(self.source, self.given, self.options.shard_size).nbytes
        ratio = self.options.ratio
        return self.options.bytes or round(original_bytes(self.source) * (1 - (ratio or 0)))

    def _footings(self, on: float, alone: float) -> list[Footing]:
        """What is offered where numbers of deltas, and of matrices on their own, can have so many bits on average."""
        options, shape = self.options, self.source.experts.shape
        turns = [None, options.seed] if options.rotate else [None]
        return [
            footing
            for seed in turns
            for footing in (
                on_base(shape, options.base_bits, on, options.group_size, seed, options.trellis),
                without_base(shape, alone, options.group_size, seed, trellis=options.trellis),
            )
        ]

    @cached_property
    def _least(self) -> tuple[int, int]:
        """Bytes of the smallest forms: of no deltas to a base, and of one bit for every number without one."""
        first, second = self._footings(1.0, 1.0)[:2]
        on, alone = (Choosing(self.source, [own], "matrix", self.options.shard_size) for own in (first, second))
        return on.smallest, alone.smallest

    @property
    def _smallest(self) -> int:
        return min(self._least)

    def _bits_on(self, place: int) -> float:
        return average_bits(self.source.experts, self._target - self._least[place])

    @property
    def _mixing(self) -> Mixing:
        footings = self._footings(self._bits_on(0), 1 + self._bits_on(1))
        return Mixing(self.name, self.source, self.options, footings, self.options.merge, self.given)
