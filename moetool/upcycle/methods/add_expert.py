"""One more expert in every layer of an MoE model: the FFNs of another dense model fine-tuned from the same base (as in
FlexOlmo, arXiv:2507.07024)."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.calibration.mixing import TextCounts
from moetool.checkpoint.manifest import ExpertOrigin
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.building_blocks import calibration_forward, moe_size, router_moments
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.costs.phases import FORWARD, Phase, rewriting_phases
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.job.blueprint import open_for_planning
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, Source
from moetool.job.options import TEXTS, Listed, RunOptions, TextOptions
from moetool.job.origins import expert_origins, model_names, with_experts
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.progress import phase
from moetool.job.result import CalibrationFacts, Json, Sizes
from moetool.job.stage import Stage, found_here, refuse_lost
from moetool.job.writing import with_the_rest, write_checkpoint
from moetool.numerics.seeding import linear_std
from moetool.numerics.work import Work
from moetool.reduce.plan import CountedPlan, check_countable, counted_config, whole_dtype
from moetool.upcycle.contributed import Contributed
from moetool.upcycle.contributed_row import DomainInputs, added_row
from moetool.upcycle.results import AddedResult
from moetool.upcycle.router import random_router

COMPARE = "Compare with the source"
_DIFFERENCE = "difference"


class AddExpertOptions(RunOptions, TextOptions):
    """Options of adding an expert: the dense model that it comes from, and what its router row is made of."""

    source: str = Field(
        description="The dense model whose FFNs become the new expert: a checkpoint, fine-tuned from the same base."
    )
    top_k: int | None = Field(None, ge=1, description="Experts per token of the result [default: as many as before].")
    router_std: float | None = Field(
        None, gt=0, description="Standard deviation of a random router row [default: 1/√(3·hidden)]."
    )
    calibration: Listed | None = Field(
        None,
        description=f"Text of the new expert's domain, to fit its router row to [default: a random row]: {TEXTS}",
    )
    samples: int = Field(64, ge=2, description="Windows of calibration text.")
    sequence_length: int = Field(512, ge=2, description="Tokens per window; by default no more than the context.")


class AddExpert(Stage[AddExpertOptions]):
    """Gives every layer one more expert and its router one more row; every other tensor stays as it is.

    With a random row the result is the model that Branch-Train-MiX makes of all sources at once, if that draws its
    routers without a text and takes all other weights from the same model.
    """

    name: ClassVar[str] = "add-expert"
    summary: ClassVar[str] = "one more expert in an MoE model, from another fine-tuned dense model"
    options_type: ClassVar[type[RunOptions]] = AddExpertOptions
    method_of: ClassVar[str | None] = "upcycle"
    is_parallel: ClassVar[bool] = True

    @property
    def measures(self) -> bool:
        """Whether a text runs through the model, to fit the router row to it."""
        return self.options.calibration is not None

    @cached_property
    def contributed(self) -> Contributed:
        """The dense model that the expert comes from, checked against INPUT. Raises `InvalidInputError`."""
        check_countable(self.source, custom=True)
        architecture, source = self.source.architecture, self.source
        routers = [
            name for name in source.checkpoint.tensors if architecture.is_router(source.experts.moe_layers[0], name)
        ]
        if len(routers) > 1 or not architecture.sees_inputs:
            raise InvalidInputError(
                f"The router of {architecture.name} is no single matrix: no row can be added to it."
            )
        opened = open_for_planning if source.checkpoint.is_imagined else Checkpoint.open
        return Contributed(source, self.options.source, opened(self.options.source))

    @property
    def _count(self) -> int:
        """Number of experts that there are, and so that of the new one."""
        return self.source.experts.shape.experts

    @cached_property
    def _top_k(self) -> int:
        top_k = self.options.top_k or self.source.experts.shape.top_k
        if top_k > self._count + 1:
            raise UsageError(f"--top-k {top_k}: there will be only {self._count + 1} experts.")
        return top_k

    @cached_property
    def _texts(self) -> TextCounts:
        """How many windows are of the expert's domain, and how many of other text.

        Raises:
            UsageError: one of both is missing.
        """
        counts = super().due_windows
        assert counts is not None
        if not sum(counts.given.values()):
            raise UsageError(
                "--calibration has to name a text of the new expert's domain; the bundled text is what it is told from."
            )
        if not sum(counts.bundled.values()):
            raise UsageError(
                "The row of the new expert is what tells its text from other text: leave out --mix 0, or name the "
                "bundled text beside yours (--calibration my-text.txt,bundled)."
            )
        return counts

    @property
    def due_windows(self) -> TextCounts | None:
        return self._texts if self.measures else None

    @cached_property
    def _sources(self) -> list[str | None]:
        known = expert_origins(self.source.checkpoint, self._count)
        return [*model_names(known), self.options.source]

    def inputs(self) -> Mapping[str, Checkpoint]:
        return {**super().inputs(), "source": self.contributed.dense.checkpoint}

    def reads(self) -> list[Path]:
        return [*super().reads(), *found_here([self.options.source])]

    # What it will cost.

    @property
    def _output_plan(self) -> CountedPlan:
        return CountedPlan(self.source, self._count + 1, self.options.shard_size)

    @cached_property
    def _cost(self) -> CalibrationCost:
        text = self.options if self.measures else None
        return calibration_cost(self.source, self.options, text)

    @cached_property
    def _memory(self) -> LayerMemory:
        moments = Measuring(common=4 * 8 * self.source.experts.shape.hidden**2)
        return self._cost.layer_memory(self.source.experts, moments if self.measures else Measuring())

    @cached_property
    def _experts_at_once(self) -> int:
        return experts_at_once(self._memory, self.options)

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        notes = self.contributed.notes()
        if not self.measures:
            notes.append(
                "The new expert's router row is random, so that it is chosen by chance until the model is tuned. "
                "--calibration TEXT fits the row to a text of its domain."
            )
        return tuple(notes)

    def plan(self) -> Plan:
        source, output, at_once = self.source, self._output_plan.nbytes, self._experts_at_once
        contributed = self.contributed
        size = moe_size(source.experts, at_once)
        details: dict[str, Json] = {
            "moe_layers": len(source.experts.moe_layers),
            "experts": self._count + 1,
            "top_k": self._top_k,
            "sources": self._sources,
            "router": "text" if self.measures else "random",
        }
        if self.measures:
            details["experts_at_once"] = at_once
        if self._notes:
            details["note"] = " ".join(self._notes)
        added = Work(read=contributed.dense.checkpoint.weight_bytes, moved=8 * contributed.rest_bytes)
        forward = calibration_forward(self._cost, size) + router_moments(self._cost, size)
        measuring = (Phase(FORWARD, forward),) if self.measures else ()
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes + contributed.dense.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=self._cost.forward_scratch(source.experts, at_once) if self.measures else 0,
            memory_bytes=self._memory.nbytes(at_once if self.measures else self._count),
            phases=(Phase(COMPARE, added), *measuring, *rewriting_phases(size, output)),
            details=details,
        )

    # Doing it.

    def run(self, job: Job) -> AddedResult:
        difference = self._difference(job)
        rows, facts = self._rows(job)
        notes = (*self._notes, _left_out(self.options.source, difference))
        for note in notes:
            job.progress.log(note)
        source, plan = self.source, self._output_plan

        def tensors(layer: int) -> Iterator[tuple[str, Tensor]]:
            made = self._layer_tensors(layer, rows[layer]) if layer in rows else ()
            return with_the_rest(plan.read, plan.unit(layer), made)

        fingerprint = self.contributed.dense.checkpoint.fingerprint()
        known = expert_origins(source.checkpoint, self._count)
        origins = (*known, ExpertOrigin(model=self.options.source, fingerprint=fingerprint))
        write_checkpoint(
            job,
            plan,
            tensors,
            config=counted_config(source, plan.count, self._top_k),
            provenance=with_experts(source.checkpoint, origins, self._top_k),
            calibration=facts,
        )
        return AddedResult(
            calibration=facts,
            experts=plan.count,
            top_k=self._top_k,
            added=self._count,
            router="text" if self.measures else "random",
            rest_difference=difference,
            sources=self._sources,
            notes=notes,
        )

    def _difference(self, job: Job) -> float:
        """How far what is left out of the source is from what stands in its place."""
        if job.unit(_DIFFERENCE):
            with phase(job.progress, COMPARE):
                found = self.contributed.difference()
            job.finish(_DIFFERENCE, told={"relative": found})
        job.meet()
        relative = job.workspace.told(_DIFFERENCE)["relative"]
        assert isinstance(relative, float)
        return relative

    def _layer_tensors(self, layer: int, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a layer's experts and router with one more, by full name on disk."""
        reader, new, dense = self.source.experts, self._count, self.contributed.dense
        dtypes = {role: whole_dtype(reader, layer, role) for role in reader.shape.roles}

        def matrix(role: Role, expert: int) -> Tensor:
            own = self.contributed.matrix(layer, role) if expert == new else reader.dense(layer, expert, role)
            return own.to(dtypes[role])

        def bias(role: Role, expert: int) -> Tensor:
            return dense.bias(layer, role) if expert == new else reader.bias(layer, expert, role)

        for roles in reader.shape.groups:
            yield from reader.native_tensors(layer, roles, new + 1, matrix)
            yield from reader.bias_tensors(layer, roles, new + 1, bias)
        name = self.source.architecture.router_name(layer)
        router = self.source.checkpoint.read(name)
        yield name, torch.cat([router, row[None].to(router.dtype)])

    # The router.

    def _rows(self, job: Job) -> tuple[Mapping[int, Tensor], CalibrationFacts | None]:
        """The new expert's row `[hidden]` in every MoE layer, and the text that these were fitted to."""
        layers, hidden = self.source.experts.moe_layers, self.source.experts.shape.hidden
        if not self.measures:
            options, std = self.options, self.options.router_std or linear_std(hidden)
            count = self._count + 1  # as one router of all experts would be drawn
            return {layer: random_router(count, hidden, std, options.seed, layer)[-1] for layer in layers}, None
        calibrated = CalibratedJob(job, self.options, experts_at_once=self._experts_at_once)
        sweep = calibrated.sweep
        given = torch.tensor([kind in self._texts.given for kind in sweep.kinds])
        is_own = given[sweep.of_kind]
        if is_own.all() or not is_own.any():
            raise InvalidInputError("The calibration text has no windows of the new expert's domain, or no others.")

        def measure(index: int, layer: nn.Module) -> dict[str, Tensor]:
            inputs = DomainInputs(is_own, sweep.length, sweep.own.start, hidden)
            sweep.forward(index, layer, [inputs])
            router = self.source.checkpoint.read(self.source.architecture.router_name(index))
            return {"row": added_row(router, inputs.moments)}

        return {layer: own["row"] for layer, own in calibrated.measured("row", measure).items()}, calibrated.facts

    def verify(self, output: Path) -> Sizes:
        before, after = self.source, Source.open(output)
        refuse_lost(before.checkpoint.tensors.keys() - after.checkpoint.tensors.keys())
        if (found := after.experts.shape.experts) != self._count + 1:
            raise VerificationError(f"The output has {found} experts in a layer, not {self._count + 1}.")
        return Sizes(before.checkpoint.weight_bytes, after.checkpoint.weight_bytes)


def _left_out(name: str, difference: float) -> str:
    """Sentence that says what becomes of the source's attention, norms and embeddings."""
    if not difference:
        return f"Attention, norms and embeddings of {name} are those of the model, bit for bit."
    return (
        f"Attention, norms and embeddings stay those of the model. Those of {name} differ by {difference:.2%} "
        "of their size, and what it has learnt there is left out."
    )
