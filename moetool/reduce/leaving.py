"""Base class of stages that leave a layer fewer experts: the ordinary checkpoint that they write, and its check."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from moetool.checkpoint.manifest import Provenance
from moetool.errors import VerificationError
from moetool.job.job import Job, Source
from moetool.job.origins import expert_origins, with_experts
from moetool.job.result import Sizes
from moetool.job.stage import Stage, StageOptionsT, refuse_lost
from moetool.job.writing import original_bytes, passed_on, with_the_rest, write_checkpoint
from moetool.reduce.choosing import Fewer, Merged
from moetool.reduce.merging import layer_tensors
from moetool.reduce.plan import CountedPlan, counted_config, lost_names
from moetool.reduce.results import ReducedResult
from moetool.reduce.stored import keeps_format

LOST = (
    "Its layers that predict further tokens have experts, too, which transformers does not run: the result is without "
    "these layers."
)


class Leaving(Stage[StageOptionsT]):
    """Stage that writes a checkpoint of the same family with fewer experts in every layer.

    Attributes:
        merges: whether experts that go are merged into others.
        aligns: whether neurons are matched before.
    """

    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    aligns: ClassVar[bool] = False

    def __init__(self, source: Source, options: StageOptionsT) -> None:
        super().__init__(source, options)
        keeps = self.source.keeps_stored and not self.merges and keeps_format(self.source)
        self.source = replace(self.source, keeps_stored=keeps)

    @property
    @abstractmethod
    def fewer(self) -> Fewer:
        """How many experts each layer keeps, and in which router groups; alike for all layers."""

    @property
    def top_k(self) -> int | None:
        """Experts per token of the result; `None` for as many as before."""
        return None

    @property
    def _output_plan(self) -> CountedPlan:
        return CountedPlan(self.source, self.fewer.kept, self.options.shard_size)

    def _write(
        self,
        job: Job,
        chosen: Mapping[int, Sequence[Merged]],
        told: ReducedResult,
        *,
        provenance: Provenance | None = None,
    ) -> None:
        """Write the checkpoint whose layers have the `chosen` experts: others in each, unless `provenance` is given."""
        source, plan = self.source, self._output_plan

        def tensors(layer: int) -> Iterator[tuple[str, Tensor]]:
            made = layer_tensors(source, layer, chosen[layer], align=self.aligns) if layer in chosen else ()
            return with_the_rest(plan.read, plan.unit(layer), made)

        write_checkpoint(
            job,
            plan,
            tensors,
            config=counted_config(source, plan.count, self.top_k),
            provenance=self._of_any_experts if provenance is None else provenance,
            calibration=told.calibration,
            layers=lambda: told.layers,
        )

    @property
    def _of_any_experts(self) -> Provenance:
        """The record of a model whose layers lose different experts: a number is one origin if all are."""
        source, upcycled = self.source, passed_on(self.source.checkpoint).upcycled
        top_k = source.experts.shape.top_k if self.top_k is None else self.top_k
        origins = set(expert_origins(source.checkpoint, source.experts.shape.experts))
        kept = (origins.pop() if len(origins) == 1 else None,) * self.fewer.kept
        return with_experts(source.checkpoint, kept, top_k, copies=upcycled is None or upcycled.granularity == 1)

    def verify(self, output: Path) -> Sizes:
        before, after = self.source, Source.open(output)
        kept = set(before.checkpoint.tensors) - before.experts.names - lost_names(before)
        refuse_lost(kept - set(after.checkpoint.tensors))
        if (found := after.experts.shape.experts) != self.fewer.kept:
            raise VerificationError(f"The output has {found} experts in a layer, not {self.fewer.kept}.")
        original, written = original_bytes(before), after.checkpoint.weight_bytes
        return Sizes(original, written, round(1 - written / original, 6))
