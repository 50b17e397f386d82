"""Compression that chooses everything within a byte budget: a base or none, rotated inputs or not, bits and ranks.

Every form of every matrix is measured in every storage scheme, in one pass; then each group of matrices gets the
scheme, and each matrix the form, with which all lose least together. Whether a base earns its bytes is thereby measured
and not assumed: experts that were upcycled from one network have one in common, experts that were trained as such
mostly do not (arXiv:2606.03465).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from moetool.bases.choices import Merge
from moetool.checkpoint.files import atomically
from moetool.checkpoint.source import local_path
from moetool.compress.delta_forms import BaseBits
from moetool.compress.mixing.layers import MixedLayers
from moetool.compress.mixing.measuring import MixingOptions
from moetool.compress.mixing.plan_file import plan_text, read_included, read_plan
from moetool.compress.mixing.schemes import StorageScheme, on_base, without_base
from moetool.compress.mixing.stage import MixingStage
from moetool.compress.mixing.trials import EVALUATE, MOST_TRIALS, Increase, SizeSearch, Trials, in_words
from moetool.compress.results import MixedResult, Trial
from moetool.costs.building_blocks import calibration_forward, moe_size
from moetool.costs.phases import ENCODE, Phase
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout
from moetool.job.estimate import estimate
from moetool.job.including import FEW_BITS, worth_including
from moetool.job.job import Job, Source
from moetool.job.options import INCLUDE_HELP, Names, RunOptions, names_of_included
from moetool.job.plan import Plan, calibration_cost
from moetool.job.processes import processes
from moetool.job.result import Json, PhaseTime
from moetool.job.shards import OutputPlan
from moetool.job.windows import held_out
from moetool.job.writing import original_bytes

_BASES = ("2", "4", "6", "8")  # bits of the bases that are tried; what few bits lose, every delta has to make up for
_TIMES = MOST_TRIALS + 1  # encodings: the trials, and the result; evaluations: the original, and the trials


_EFFORTS: Mapping[str, Mapping[str, object]] = {
    "fast": {"samples": 32},
    "normal": {},
    "best": {"trellis": True, "refine": 120},
}


class AutoOptions(MixingOptions):
    """Options of `auto`: a budget of bytes or of perplexity, and what it may be spent on."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "size", "max_increase", "plan")

    effort: Literal["fast", "normal", "best"] = Field(
        "normal",
        description="How much time to spend. fast: --samples 32. best: --trellis --refine 120, which loses least and "
        "is slowest to compress and to run. These options can also be typed, and then count.",
    )

    max_increase: Increase | None = Field(
        None,
        description="Instead of --ratio or --size: limit on the growth of perplexity on held-out windows of the "
        "calibration text (2% lets 10.0 become 10.2). Up to six sizes are made and measured; the smallest within the "
        "limit is kept.",
    )
    held_out: int = Field(
        32, ge=2, description="With --max-increase: how many windows to measure it on, besides --samples."
    )
    plan: str | None = Field(
        None,
        description="Instead of --ratio, --size or --max-increase: follow a file that --save-plan wrote.",
    )
    save_plan: str | None = Field(None, description="Write what was chosen to this YAML file, which --plan reads.")
    include: Names | None = Field(
        None,
        description=f"{INCLUDE_HELP} none: neither [default: both, in 8, 6 or 5 bits, where experts "
        f"would otherwise have fewer than {FEW_BITS:g} bits per number; with --plan what it says].",
    )
    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    base_bits: BaseBits | None = Field(
        None,
        description="Bits of the base, where one is used: 1, 2, 3, 4, 5, 6, 8, nf4 or int8 [default: 2, 4, 6 or 8, "
        "whichever loses least].",
    )
    rotate: bool = Field(
        False,
        description="Try each form with randomly rotated inputs, too (Hadamard matrix), in about twice the time.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_effort(cls, given: object) -> object:
        """Add the options that `effort` stands for; those that are given as well take precedence."""
        if not isinstance(given, Mapping):
            return given
        effort = given.get("effort")
        return {**(_EFFORTS.get(effort, {}) if isinstance(effort, str) else {}), **given}

    @model_validator(mode="after")
    def _either_plan(self) -> Self:
        if self.plan is not None and self.save_plan is not None:
            raise ValueError("--save-plan writes what was chosen; with --plan nothing is")
        return self


class Auto(MixingStage[AutoOptions]):
    """Chooses whatever loses least for its bytes, with a base or without."""

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "a base or none, bits and ranks: whatever loses least within a budget"
    options_type: ClassVar[type[RunOptions]] = AutoOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    def include_by_default(self, source: Source, options: AutoOptions) -> tuple[str, ...]:
        if options.plan is not None:
            return read_included(local_path(options.plan))
        if options.ratio is None:
            return ()
        return names_of_included(worth_including(source, round(original_bytes(source) * (1 - options.ratio))))

    def schemes(self, delta_bits: float | None, matrix_bits: float | None) -> Sequence[StorageScheme]:
        options, shape = self.options, self.source.experts.shape
        seeds = [None, options.seed] if options.rotate else [None]
        bases = _BASES if options.base_bits is None else (options.base_bits,)
        return [
            scheme
            for seed in seeds
            for scheme in (
                *(on_base(shape, bits, delta_bits, options.group_size, seed, options.trellis) for bits in bases),
                without_base(shape, matrix_bits, options.group_size, seed, trellis=options.trellis),
            )
        ]

    @property
    def ratio(self) -> float | None:
        return self.options.ratio

    @property
    def merge(self) -> Merge:
        return self.options.merge

    @cached_property
    def given(self) -> Mapping[int, LayerLayout] | None:
        if self.options.plan is None:
            return None
        reader = self.source.experts
        storable = self.choosing(()).storable
        return read_plan(local_path(self.options.plan), reader.shape, tuple(reader.moe_layers), storable)

    @cached_property
    def target(self) -> int:
        if self.given is not None:
            return OutputPlan(self.source, self.given, self.options.shard_size).nbytes
        if self._is_search:
            alone = next(scheme for scheme in self.offered if not scheme.has_base)
            return min(self.choosing([alone]).largest, original_bytes(self.source) - 1)
        return super().target

    @cached_property
    def offered(self) -> Sequence[StorageScheme]:
        return self.schemes(None, None) if self._is_search else super().offered

    @property
    def asked(self) -> str | None:
        return "--max-increase" if self._is_search else super().asked

    @property
    def _is_search(self) -> bool:
        """Whether the size is to be found that keeps to a limit on perplexity."""
        return self.options.max_increase is not None

    def files(self) -> list[Path]:
        own = [] if self.options.plan is None else [local_path(self.options.plan)]
        return [*super().files(), *own]

    def plan(self) -> Plan:
        if self._is_search and processes() > 1:
            raise UsageError(f"--max-increase runs in one process; this is one of {processes()}.")
        plan = super().plan()
        return self._plan_of_trials(plan) if self._is_search else plan

    def budget_details(self) -> Mapping[str, Json]:
        if self.given is not None:
            return {}
        return {"smallest_possible_bytes": self.smallest} if self._is_search else super().budget_details()

    def _plan_of_trials(self, plan: Plan) -> Plan:
        """The plan with the costs of as many trials as there can be, each of the largest size, and of the result."""
        cost = calibration_cost(self.source, self.options, self.options, gradients=True)
        size = moe_size(self.source.experts, self.experts_at_once)
        evaluated = calibration_forward(replace(cost, samples=self.options.held_out), size)
        phases = {phase.name: phase.work for phase in plan.phases}
        phases = {**phases, EVALUATE: evaluated * _TIMES, ENCODE: phases[ENCODE] * _TIMES}
        return replace(
            plan,
            scratch_bytes=2 * plan.scratch_bytes + plan.output_bytes,
            phases=tuple(Phase(name, work) for name, work in phases.items()),
            details={**plan.details, "most_trials": MOST_TRIALS},
        )

    def shared_recipe(self) -> Mapping[str, object] | None:
        return None if self._is_search else super().shared_recipe()

    def run(self, job: Job) -> MixedResult:
        windows = held_out(self.source, self.options, self.options.held_out) if self._is_search else None
        layers = self.measured(job)
        trials = () if windows is None else self._search(job, layers, windows)
        target = trials[-1].bytes if trials else self.target
        mix = self.mix(layers, target)
        if self.options.save_plan is not None and job.ranks.is_first:
            with atomically(local_path(self.options.save_plan)) as temporary:
                temporary.write_text(
                    plan_text(mix.layouts, self.source.experts.moe_layers, self.options.include or ()), encoding="utf-8"
                )
        told = self.write(job, layers, mix, target)
        kept = [f"Kept of {len(trials)} sizes: {in_words(trials[-1])}"] if trials else []
        return replace(told, notes=[*told.notes, *kept], trials=trials)

    def _search(self, job: Job, layers: MixedLayers, windows: Tensor) -> Sequence[Trial]:
        """Try sizes on windows held out, until the smallest within the limit is found, which comes last."""
        assert self.options.max_increase is not None

        def make(size: int, part: Job) -> None:
            self._expect(job, (ENCODE, EVALUATE) * next(left))
            within = layers.within(part)
            self.write(part, within, self.mix(within, size), size)

        reader = self.source.experts
        per_bit = reader.shape.expert_parameters * reader.shape.experts * len(reader.moe_layers) / 8
        search = SizeSearch(self.options.max_increase, self.smallest, self.target, per_bit)
        left = count(MOST_TRIALS, -1)
        self._expect(job, (EVALUATE, *(ENCODE, EVALUATE) * MOST_TRIALS))
        trials = Trials(job, windows, make, self.experts_at_once).search(search)
        self._expect(job, ())
        return trials

    def _expect(self, job: Job, trials: Sequence[str]) -> None:
        """Tell what is still to come: phases of `trials`, as many as there can be, and of the result."""
        told = estimate(self.plan(), self.options, job.output)
        seconds = {phase.name: phase.seconds / _TIMES for phase in told.phases}
        if seconds:
            job.progress.expect([PhaseTime(name, round(seconds[name], 2)) for name in (*trials, ENCODE)])
