"""Stage that stores the deltas of a decomposed checkpoint sparse (DeRS compression, arXiv:2503.01359, Eq. 4)."""

from typing import ClassVar

from moetool.bases.layer_base import LayerBase, stored_base
from moetool.checkpoint.experts import Weights
from moetool.compress.delta_encoding import SparsityOptions, encoded_layouts, encoding_plan, run_encoding, sparse
from moetool.compress.results import LayersResult
from moetool.format.layout import LayerLayout
from moetool.job.job import Job
from moetool.job.options import KeepOptions, RunOptions
from moetool.job.plan import Plan
from moetool.job.records import read_statistics
from moetool.job.stage import Effect, Stage


class SparsifyDeltaOptions(RunOptions, KeepOptions, SparsityOptions):
    """Options of sparse deltas: how much of each delta is dropped, and which elements."""


class SparsifyDelta(Stage[SparsifyDeltaOptions]):
    """Keep a random or the largest part of each full delta's elements, and drop the others."""

    name: ClassVar[str] = "sparsify-delta"
    summary: ClassVar[str] = "store the deltas of a decomposed checkpoint sparse"
    options_type: ClassVar[type[RunOptions]] = SparsifyDeltaOptions
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    effect: ClassVar[Effect] = "rescales"

    def _layouts(self) -> dict[int, LayerLayout]:
        return encoded_layouts(self.source, sparse(self.options))

    def plan(self) -> Plan:
        return encoding_plan(self.name, self.source, self.options, self._layouts(), drop=self.options.drop)

    def run(self, job: Job) -> LayersResult:
        reader = self.source.experts
        statistics = read_statistics(self.source)

        def base(layer: int, weights: Weights) -> LayerBase:
            return stored_base(reader, layer)

        return run_encoding(job, self.name, self._layouts(), base, statistics)
