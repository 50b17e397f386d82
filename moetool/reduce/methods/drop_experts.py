"""Experts taken out of a model by number, as when a contributor of data opts out (FlexOlmo, arXiv:2507.07024)."""

from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from moetool.costs.building_blocks import moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import rewriting_phases
from moetool.errors import UsageError
from moetool.job.job import Job
from moetool.job.options import KeepOptions, RunOptions, split_names
from moetool.job.origins import expert_origins, model_names, with_experts
from moetool.job.plan import Plan
from moetool.job.result import Json
from moetool.job.writing import original_bytes, passed_on
from moetool.reduce.choosing import Fewer, pruned
from moetool.reduce.leaving import LOST, Leaving
from moetool.reduce.plan import check_countable, limits, lost_names, possible_counts
from moetool.reduce.results import DroppedResult, ReducedLayer


def _listed(given: object) -> object:
    return (given,) if isinstance(given, int) else split_names(given)


class DropExpertsOptions(RunOptions, KeepOptions):
    """Options of dropping experts: which ones, and how many a token is then given."""

    drop: Annotated[tuple[int, ...], BeforeValidator(_listed)] = Field(
        description="Numbers of the experts that every layer loses, from 0, with commas: 3,5."
    )
    top_k: int | None = Field(None, ge=1, description="Experts per token of the result [default: as many as before].")


class DropExperts(Leaving[DropExpertsOptions]):
    """Removes experts by number from every layer, with their rows of the router; every other tensor stays as it is.

    The result computes what the original does when its router may not choose these experts: their logits are −∞. That
    holds for softmax over all experts before or after the choice, renormalized or not, and for sigmoids, as long as
    `top_k` stays.
    """

    name: ClassVar[str] = "drop-experts"
    summary: ClassVar[str] = "take experts out by their numbers; all else stays as it is"
    options_type: ClassVar[type[RunOptions]] = DropExpertsOptions

    @cached_property
    def _dropped(self) -> tuple[int, ...]:
        """Numbers of the experts to drop, ascending.

        Raises:
            UsageError: none, one that there is not, or so many that the model would not work.
        """
        check_countable(self.source, custom=True)
        count, asked = self.source.experts.shape.experts, self.options.drop
        dropped = tuple(sorted(set(asked)))
        if not dropped:
            raise UsageError(f"--drop names no expert: give numbers from 0 to {count - 1}, with commas.")
        if wrong := [expert for expert in dropped if not 0 <= expert < count]:
            raise UsageError(f"--drop {wrong[0]}: there are experts 0 to {count - 1}.")
        self._check_left(count - len(dropped), dropped)
        return dropped

    def _check_left(self, left: int, dropped: tuple[int, ...]) -> None:
        """Raise `UsageError` if so few experts are left that a router cannot choose among them as it did."""
        shape, (groups, chosen) = self.source.experts.shape, self.source.architecture.groups
        if left < 2:
            raise UsageError(
                f"--drop leaves {left} of {shape.experts} experts, and a router needs two. `export --format dense "
                "--expert N` makes a dense model of one."
            )
        if (top_k := self.top_k) is not None and top_k > shape.top_k:
            raise UsageError(f"--top-k {top_k}: the router takes {shape.top_k}, and can take fewer of what is left.")
        lost = [sum(expert in group for expert in dropped) for group in Fewer(shape.experts, left, groups).ranges]
        if len(set(lost)) > 1:
            size = shape.experts // groups
            raise UsageError(
                f"--drop takes {', '.join(map(str, lost))} experts from the router's {groups} groups, of {size} each "
                f"(0 to {size - 1} and so on). It has to take as many from each. {limits(self.source)}"
            )
        if left not in possible_counts(self.source, self.top_k):
            fewer = f" With --top-k {left // groups * chosen} it takes fewer." if left >= 2 * groups else ""
            raise UsageError(f"--drop leaves {left} of {shape.experts} experts, too few. {limits(self.source)}{fewer}")

    @property
    def fewer(self) -> Fewer:
        shape, groups = self.source.experts.shape, self.source.architecture.groups[0]
        return Fewer(shape.experts, shape.experts - len(self._dropped), groups)

    @property
    def top_k(self) -> int | None:
        return self.options.top_k

    @property
    def _top_k(self) -> int:
        return self.source.experts.shape.top_k if self.top_k is None else self.top_k

    @cached_property
    def _left(self) -> tuple[int, ...]:
        """Numbers of the experts that stay, in their order."""
        return tuple(expert for expert in range(self.source.experts.shape.experts) if expert not in self._dropped)

    @cached_property
    def _sources(self) -> tuple[str | None, ...]:
        names = model_names(expert_origins(self.source.checkpoint, self.source.experts.shape.experts))
        return tuple(names[expert] for expert in self._left)

    @property
    def _drops_copies(self) -> bool:
        """Whether the experts that go are whole copies of an FFN, where each was cut into several experts."""
        upcycled = passed_on(self.source.checkpoint).upcycled
        pieces = 1 if upcycled is None else upcycled.granularity
        first = {expert - expert % pieces for expert in self._dropped}
        return len(first) * pieces == len(self._dropped)

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        shape, notes = self.source.experts.shape, []
        if self._top_k < shape.top_k:
            notes.append(f"Every token is given {self._top_k} experts, no longer {shape.top_k}.")
        if not self._drops_copies:
            notes.append(
                "Experts of this model are pieces of copies of an FFN, and some of these copies are no longer whole."
            )
        if lost_names(self.source):
            notes.append(LOST)
        return tuple(notes)

    def plan(self) -> Plan:
        source, output = self.source, self._output_plan.nbytes
        details: dict[str, Json] = {
            "original_bytes": original_bytes(source),
            "moe_layers": len(source.experts.moe_layers),
            "experts": source.experts.shape.experts,
            "experts_left": self.fewer.kept,
            "dropped": list(self._dropped),
            "top_k": self._top_k,
        }
        if any(self._sources):
            details["sources"] = list(self._sources)
        if self._notes:
            details["note"] = " ".join(self._notes)
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=0,
            memory_bytes=CalibrationCost(0, 1, source.dtype.itemsize).layer_memory(source.experts).nbytes(),
            phases=rewriting_phases(moe_size(source.experts), output),
            details=details,
        )

    def run(self, job: Job) -> DroppedResult:
        source = self.source
        for note in self._notes:
            job.progress.log(note)
        layer = ReducedLayer([[expert] for expert in self._left])
        told = DroppedResult(
            experts_left=self.fewer.kept,
            notes=self._notes,
            layers=dict.fromkeys(source.experts.moe_layers, layer),
            dropped=self._dropped,
            top_k=self._top_k,
            sources=self._sources,
        )
        origins = expert_origins(source.checkpoint, source.experts.shape.experts)
        record = with_experts(
            source.checkpoint,
            tuple(origins[expert] for expert in self._left),
            self._top_k,
            copies=self._drops_copies,
        )
        self._write(job, dict.fromkeys(told.layers, pruned(self._left)), told, provenance=record)
        return told
