"""The best that a budget of bytes can buy: a base or none, rotated inputs or not, bits and ranks.

Every form of every matrix is measured on every footing, in one pass; then each group of matrices gets the footing, and
each matrix the form, with which all lose least together. Whether a base earns its bytes is thereby measured and not
assumed: experts that were upcycled from one network have one in common, experts that were trained as such mostly do not
(arXiv:2606.03465).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from moetool.bases.choices import Merge
from moetool.checkpoint.files import atomically
from moetool.checkpoint.sizes import ByteSize, format_bytes
from moetool.checkpoint.source import local_path
from moetool.compress.encoding import BaseBits
from moetool.compress.mixing.choosing import Choosing, FormLosses, Mix
from moetool.compress.mixing.footings import Footing, average_bits, on_base, without_base
from moetool.compress.mixing.increase import MOST_TRIALS, Increase, SizeSearch
from moetool.compress.mixing.mixing import Mixing
from moetool.compress.mixing.options import MixingOptions
from moetool.compress.mixing.plan_file import plan_text, read_plan
from moetool.compress.mixing.stage import MixingStage
from moetool.compress.mixing.trials import Trials, in_words
from moetool.compress.told import MixedTold, Trial
from moetool.costs.building_blocks import calibration_forward, moe_size
from moetool.costs.phases import ENCODE
from moetool.costs.work import Phase
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout
from moetool.job.calibrated import EVALUATE, held_out
from moetool.job.estimate import estimate
from moetool.job.execute import run_stage
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan, calibration_cost
from moetool.job.processes import processes
from moetool.job.result import Json, PhaseTime
from moetool.job.shards import OutputPlan
from moetool.job.writing import original_bytes, original_size

_TIMES = MOST_TRIALS + 1  # of encoding: the trials, and the result; of evaluating: the original, and the trials


class AutoOptions(MixingOptions):
    """A budget, and what it may be spent on."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "bytes", "max_increase", "plan")

    ratio: float | None = Field(
        None, gt=0, lt=1, description="Share of the weight files' bytes to save: 0.8 makes them 80 % smaller."
    )
    bytes: ByteSize | None = Field(None, description="Instead of --ratio: largest size of the weight files, e.g. 20GB.")
    max_increase: Increase | None = Field(
        None,
        description="Instead of --ratio or --bytes: limit on the growth of perplexity on held-out windows of the "
        "calibration text (2% lets 10.0 become 10.2). Up to six sizes are made and measured; the smallest within the "
        "limit is kept.",
    )
    held_out: int = Field(
        32, ge=2, description="With --max-increase: how many windows to measure it on, besides --samples."
    )
    plan: str | None = Field(None, description="Instead of these: follow a file that --save-plan wrote, edited or not.")
    save_plan: str | None = Field(None, description="Write what was chosen to this YAML file, which --plan reads.")
    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    base_bits: BaseBits = Field("2", description="Bits of the base, where one is used: 1, 2, 3, 4, 8, nf4 or int8.")
    rotate: bool = Field(
        False,
        description="Try each form with randomly rotated inputs, too (Hadamard matrix), in about twice the time.",
    )

    @model_validator(mode="after")
    def _one_alternative(self) -> Self:
        if sum(getattr(self, name) is not None for name in self.alternatives) != 1:
            raise ValueError("give --ratio, --bytes or --plan, or --max-increase: one of them")
        if self.plan is not None and self.save_plan is not None:
            raise ValueError("--save-plan writes what was chosen; with --plan nothing is")
        return self


class Auto(MixingStage[AutoOptions]):
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
        mixing, original = self.mixing, original_bytes(self.source)
        mixing.check()
        if self._is_search and processes() > 1:
            raise UsageError(f"--max-increase runs in one process; this is one of {processes()}.")
        if self.given is None and not self._smallest <= self._target < original:
            ratio, highest = self.options.ratio, int((1 - self._smallest / original) * 1000) / 1000
            asked = f"--bytes {format_bytes(self._target)}" if ratio is None else f"--ratio {ratio:g}"
            raise UsageError(
                f"{asked} is not possible here: the weight files take {original_size(self.source)}, and "
                f"{format_bytes(self._smallest)} at the least, so the ratio must be above 0 and at most {highest:g}."
            )
        details: dict[str, Json] = {"smallest_possible_bytes": self._smallest}
        if not self._is_search:
            details["bits_per_number"] = round(self._bits_on(0), 2)
        plan = mixing.plan(self._target, details if self.given is None else {})
        return self._plan_of_trials(plan) if self._is_search else plan

    def _plan_of_trials(self, plan: Plan) -> Plan:
        """Costs of as many trials as there can be, each of the largest size, and of the result."""
        cost = calibration_cost(self.source, self.options, self.options, gradients=True)
        size = moe_size(self.source.experts, self.mixing.experts_at_once)
        evaluated = calibration_forward(replace(cost, samples=self.options.held_out), size)
        phases = {phase.name: phase.work for phase in plan.phases}
        phases = {**phases, EVALUATE: evaluated * _TIMES, ENCODE: phases[ENCODE] * _TIMES}
        return replace(
            plan,
            scratch_bytes=2 * plan.scratch_bytes + plan.output_bytes,
            phases=tuple(Phase(name, work) for name, work in phases.items()),
            details={**plan.details, "most_trials": MOST_TRIALS},
        )

    @property
    def _is_search(self) -> bool:
        """Whether the budget is to be found: that of a trial is given."""
        return self.options.max_increase is not None and self.options.bytes is None

    def shared_recipe(self) -> Mapping[str, object] | None:
        return None if self.options.max_increase is not None else super().shared_recipe()

    def _tried(self, job: Job) -> Sequence[Trial]:
        """Sizes that were tried, once everything is measured that they need; the one to keep comes last."""
        options, mixing = self.options, self.mixing
        assert options.max_increase is not None
        windows = held_out(self.source, options, options.held_out)
        mixing.measure(job)

        def make(size: int, directory: Path) -> None:
            self._expect(job, (ENCODE, EVALUATE) * next(left))
            own = options.model_copy(update={"bytes": size, "save_plan": None})
            path = self.source.checkpoint.path
            run_stage(
                type(self),
                path,
                directory,
                own,
                resume=True,
                progress=job.progress,
                measured=job.output,
                same_input=True,  # or this job would not have gone on
            )

        reader = self.source.experts
        per_bit = reader.shape.expert_parameters * reader.shape.experts * len(reader.moe_layers) / 8
        search = SizeSearch(options.max_increase, self._smallest, self._target, per_bit)
        left = count(MOST_TRIALS, -1)
        self._expect(job, (EVALUATE, *(ENCODE, EVALUATE) * MOST_TRIALS))
        tried = Trials(job, windows, make, mixing.experts_at_once).search(search)
        self._expect(job, ())
        return tried

    def _expect(self, job: Job, trials: Sequence[str]) -> None:
        """Tell what is still to come: phases of `trials`, as many as there can be, and of the result."""
        told = estimate(self.plan(), self.options, job.output)
        seconds = {phase.name: phase.seconds / _TIMES for phase in told.phases}
        if seconds:
            job.progress.expect([PhaseTime(name, round(seconds[name], 2)) for name in (*trials, ENCODE)])

    def run(self, job: Job) -> MixedTold:
        mixing, trials = self.mixing, self._tried(job) if self._is_search else ()
        target = trials[-1].bytes if trials else self._target

        def choose(losses: FormLosses) -> Mix:
            mix = self._choosing(mixing.footings).mix(target, losses)
            if self.options.save_plan is not None and job.ranks.is_first:
                file = local_path(self.options.save_plan)
                with atomically(file) as temporary:
                    temporary.write_text(plan_text(mix.layouts), encoding="utf-8")
            return mix

        told = mixing.run(job, choose, 1 - target / original_bytes(self.source))
        kept = [f"Kept of {len(trials)} sizes: {in_words(trials[-1])}"] if trials else []
        return replace(told, notes=[*told.notes, *kept], trials=trials)

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
        options, original = self.options, original_bytes(self.source)
        if self._is_search:
            return min(self._choosing([self._offered[1]]).largest, original - 1)
        return options.bytes or round(original * (1 - (options.ratio or 0)))

    def _choosing(self, footings: Sequence[Footing]) -> Choosing:
        return Choosing(self.source, footings, "matrix", self.options.shard_size)

    @cached_property
    def _offered(self) -> list[Footing]:
        """What suits the budget; everything where that is to be found."""
        if self.options.max_increase is not None:
            return self._footings(None, None)
        return self._footings(self._bits_on(0), 1 + self._bits_on(1))

    def _footings(self, on: float | None, alone: float | None) -> list[Footing]:
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
        """Bytes of the smallest forms: of no deltas to a base, and of the fewest bits without one."""
        first, second = self._footings(1.0, 1.0)[:2]
        on, alone = self._choosing([first]), self._choosing([second])
        return on.smallest, alone.smallest

    @property
    def _smallest(self) -> int:
        return min(self._least)

    def _bits_on(self, place: int) -> float:
        return average_bits(self.source.experts, self._target - self._least[place])

    @cached_property
    def mixing(self) -> Mixing:
        return Mixing(self.name, self.source, self.options, self._offered, self.options.merge, self.given)
