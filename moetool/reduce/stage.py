"""Base class of methods that leave a layer fewer experts: costs, one pass over a text, an ordinary checkpoint."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.checkpoint.files import save_tensors
from moetool.costs.building_blocks import ModelSize, calibration_forward, moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.costs.phases import FORWARD, Phase, rewriting_phases
from moetool.errors import InvalidInputError, VerificationError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, Source
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.result import Json, Sizes
from moetool.job.stage import Stage
from moetool.job.writing import original_bytes, with_the_rest, write_checkpoint
from moetool.numerics.work import Work
from moetool.reduce.choosing import Fewer, Merged
from moetool.reduce.costs import merging_work
from moetool.reduce.merging import layer_tensors
from moetool.reduce.options import ReduceOptionsT
from moetool.reduce.plan import ReducedPlan, check_reducible, experts_left, lost_names, reduced_config
from moetool.reduce.results import ReducedLayer, ReducedResult
from moetool.reduce.scores import TOKENS, Scores
from moetool.reduce.stored import keeps_format

LOST = (
    "Its layers that predict further tokens have experts, too, of which nothing can be measured: the result is without "
    "them."
)


class Reduction(Stage[ReduceOptionsT]):
    """Stage that measures every layer's experts on a text, chooses which stay, and writes a checkpoint of the same
    family.

    Attributes:
        holds_all: whether all experts of a layer have to be in memory together.
        merges: whether experts that go are merged into others.
        aligns: whether neurons are matched before.
        asks_router: whether the router is asked about what experts are given.
    """

    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True
    holds_all: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    aligns: ClassVar[bool] = False
    asks_router: ClassVar[bool] = False

    def __init__(self, source: Source, options: ReduceOptionsT) -> None:
        super().__init__(source, options)
        keeps = self.source.keeps_stored and not self.merges and keeps_format(self.source)
        self.source = replace(self.source, keeps_stored=keeps)

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
        """How many experts each layer keeps, and in which router groups; alike for all layers."""
        return self._left[0]

    @cached_property
    def _left(self) -> tuple[Fewer, str | None]:
        check_reducible(self.source)
        if self.asks_router and not (architecture := self.source.architecture).sees_inputs:
            raise InvalidInputError(
                f"The router of {architecture.name} does not choose by one matrix on what experts are given, as "
                f"{self.name} needs it. reap, frequency and hc-smoe ask the experts alone."
            )
        return experts_left(self.source, self.options)

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        return tuple(note for note in (self._left[1], LOST if lost_names(self.source) else None) if note is not None)

    @property
    def _output_plan(self) -> ReducedPlan:
        return ReducedPlan(self.source, self.fewer.kept, self.options.shard_size)

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
        source, plan = self.source, self._output_plan
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
            experts_left=plan.kept,
            notes=self._notes,
            layers={
                layer: ReducedLayer(measured[0][layer][TOKENS].tolist(), [sorted(one.members) for one in left])
                for layer, left in chosen.items()
            },
        )

        def tensors(layer: int) -> Iterator[tuple[str, Tensor]]:
            made = layer_tensors(source, layer, chosen[layer], align=self.aligns) if layer in chosen else ()
            return with_the_rest(plan.read, plan.unit(layer), made)

        write_checkpoint(
            job,
            plan,
            tensors,
            config=reduced_config(source, plan.kept),
            calibration=told.calibration,
            layers=lambda: told.layers,
            seed=self.options.seed,
        )
        return told

    def _measure(self, job: Job) -> tuple[dict[int, dict[str, Tensor]], CalibratedJob]:
        """Scores by layer, measured on the calibration text."""
        calibrated = CalibratedJob(job, self.options, experts_at_once=self._experts_at_once)
        files = {layer: job.work / f"scores-{layer:05d}.safetensors" for layer in self.source.experts.moe_layers}

        def visit(index: int, layer: nn.Module) -> None:
            scores = self._scores(calibrated, index, layer)
            calibrated.sweep.forward(index, layer, [scores])
            if job.ranks.is_first:
                save_tensors(files[index], scores.tensors())

        calibrated.forward_visiting(visit)
        job.meet()
        return {layer: load_file(file) for layer, file in files.items()}, calibrated

    def verify(self, output: Path) -> Sizes:
        before, after = self.source, Source.open(output)
        kept = set(before.checkpoint.tensors) - before.experts.names - lost_names(before)
        if missing := sorted(kept - set(after.checkpoint.tensors)):
            raise VerificationError(f"The output lacks {len(missing)} tensors of the input, the first {missing[0]}.")
        if (found := after.experts.shape.experts) != self.fewer.kept:
            raise VerificationError(f"The output has {found} experts in a layer, not {self.fewer.kept}.")
        original, written = original_bytes(before), after.checkpoint.weight_bytes
        return Sizes(original, written, round(1 - written / original, 6))


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
