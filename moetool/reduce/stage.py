"""Base class of methods that leave a layer fewer experts: costs, one pass over a text, an ordinary checkpoint."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from moetool.costs.building_blocks import ModelSize, calibration_forward, moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.costs.phases import FORWARD, Phase, rewriting_phases
from moetool.errors import InvalidInputError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.result import Json
from moetool.job.writing import original_bytes
from moetool.numerics.work import Work
from moetool.reduce.choosing import Fewer, Merged
from moetool.reduce.costs import merging_work
from moetool.reduce.leaving import LOST, Leaving
from moetool.reduce.options import ReduceOptionsT
from moetool.reduce.plan import check_countable, experts_left, lost_names
from moetool.reduce.results import ReducedLayer, ReducedResult
from moetool.reduce.scores import TOKENS, Scores


class Reduction(Leaving[ReduceOptionsT]):
    """Stage that measures every layer's experts on a text, chooses which stay, and writes a checkpoint of the same
    family.

    Attributes:
        holds_all: whether all experts of a layer have to be in memory together.
        asks_router: whether the router is asked about what experts are given.
    """

    holds_all: ClassVar[bool] = False
    asks_router: ClassVar[bool] = False

    @abstractmethod
    def _scores(self, calibrated: CalibratedJob, index: int, layer: nn.Module) -> Scores:
        """Collector of a method's scores for one loaded layer."""

    @abstractmethod
    def _choose(self, measured: Mapping[str, Tensor]) -> list[Merged]:
        """The experts that are left of a layer, by what was measured."""

    def _measured(self, cost: CalibrationCost, size: ModelSize) -> Work:
        """Work of a method's measurements, beside running the model."""
        return Work()

    def _measuring(self) -> Measuring:
        """Memory that measuring and choosing take."""
        return Measuring()

    @property
    def needs_text(self) -> bool:
        return True

    @property
    def fewer(self) -> Fewer:
        return self._left[0]

    @cached_property
    def _left(self) -> tuple[Fewer, str | None]:
        check_countable(self.source)
        if self.asks_router and not (architecture := self.source.architecture).sees_inputs:
            raise InvalidInputError(
                f"The router of {architecture.name} does not choose by one matrix on what experts are given, as "
                f"{self.name} needs it. reap, frequency and hc-smoe ask the experts alone."
            )
        return experts_left(self.source, self.options)

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        return tuple(note for note in (self._left[1], LOST if lost_names(self.source) else None) if note is not None)

    @cached_property
    def _cost(self) -> CalibrationCost:
        return calibration_cost(self.source, self.options, self.options)

    @cached_property
    def _memory(self) -> LayerMemory:
        return self._cost.layer_memory(self.source.experts, self._measuring(), gradients=False)

    @cached_property
    def _experts_at_once(self) -> int:
        return self._memory.experts if self.holds_all else experts_at_once(self._memory, self.options)

    def plan(self) -> Plan:
        source, cost, at_once = self.source, self._cost, self._experts_at_once
        shape, size, output = source.experts.shape, moe_size(source.experts, at_once), self._output_plan.nbytes
        details: dict[str, Json] = {
            "original_bytes": original_bytes(source),
            "moe_layers": len(source.experts.moe_layers),
            "experts": shape.experts,
            "experts_left": self.fewer.kept,
            "experts_at_once": at_once,
        }
        if self._notes:
            details["note"] = " ".join(self._notes)
        forward = calibration_forward(cost, size) + self._measured(cost, size)
        merged = shape.experts - self.fewer.kept if self.merges else 0
        made = merging_work(size, shape, merged, align=self.aligns)
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=cost.forward_scratch(source.experts, at_once),
            memory_bytes=self._memory.nbytes(at_once),
            phases=(Phase(FORWARD, forward), *rewriting_phases(size, output, made)),
            details=details,
        )

    def run(self, job: Job) -> ReducedResult:
        for note in self._notes:
            job.progress.log(note)
        measured = self._measure(job)
        own = {layer: self._choose(tensors) for layer, tensors in measured[0].items()}
        said = {layer: [(one.members, one.shares) for one in left] for layer, left in own.items()}
        chosen = {layer: [Merged(*one) for one in left] for layer, left in job.ranks.broadcast(said).items()}
        _log_unreached(job, {layer: tensors[TOKENS] for layer, tensors in measured[0].items()})
        told = ReducedResult(
            calibration=measured[1].facts,
            ratio=self.options.ratio,
            experts_left=self.fewer.kept,
            notes=self._notes,
            layers={
                layer: ReducedLayer([sorted(one.members) for one in left], measured[0][layer][TOKENS].tolist())
                for layer, left in chosen.items()
            },
        )

        self._write(job, chosen, told)
        return told

    def _measure(self, job: Job) -> tuple[dict[int, dict[str, Tensor]], CalibratedJob]:
        """Scores by layer, measured on the calibration text."""
        calibrated = CalibratedJob(job, self.options, experts_at_once=self._experts_at_once)

        def measure(index: int, layer: nn.Module) -> dict[str, Tensor]:
            scores = self._scores(calibrated, index, layer)
            calibrated.sweep.forward(index, layer, [scores])
            return scores.tensors()

        return calibrated.measured("scores", measure), calibrated


def _log_unreached(job: Job, tokens: Mapping[int, Tensor]) -> None:
    missed = [
        f"layer {layer} expert {expert}"
        for layer, given in tokens.items()
        for expert, count in enumerate(given.tolist())
        if not count
    ]
    if missed:
        job.progress.log(
            f"No calibration token reached {len(missed)} expert{'s' * (len(missed) > 1)} ({', '.join(missed[:4])}"
            f"{', …' if len(missed) > 4 else ''}): more --samples may."
        )
