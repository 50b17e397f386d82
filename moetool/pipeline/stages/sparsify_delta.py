"""Differences of which few elements are stored (DeRS compression, arXiv:2503.01359, Eq. 4)."""

from typing import Any, ClassVar

from moetool.pipeline.bases import LayerBase, stored_base
from moetool.pipeline.encoding import SparsityOptions, encoded_layouts, encoding_plan, run_encoding, sparse
from moetool.pipeline.job import Job
from moetool.pipeline.options import RunOptions
from moetool.pipeline.output import read_statistics
from moetool.pipeline.plan import Plan
from moetool.pipeline.stage import Stage
from moetool.representations.layout import LayerLayout


class SparsifyDeltaOptions(RunOptions, SparsityOptions):
    """How few."""


class SparsifyDelta(Stage[SparsifyDeltaOptions]):
    """Drops most of each full difference."""

    name: ClassVar[str] = "sparsify-delta"
    summary: ClassVar[str] = "store few elements of the differences of a decomposed checkpoint"
    options_type: ClassVar[type[RunOptions]] = SparsifyDeltaOptions

    def _layouts(self) -> dict[int, LayerLayout]:
        return encoded_layouts(self.source, sparse(self.options))

    def plan(self) -> Plan:
        return encoding_plan(self.name, self.source, self.options, self._layouts(), drop=self.options.drop)

    def run(self, job: Job) -> dict[str, Any]:
        reader = self.source.experts
        statistics = read_statistics(self.source)

        def base(layer: int) -> LayerBase:
            return stored_base(reader, layer)

        return run_encoding(job, self.name, self._layouts(), base, statistics, self.options.seed)
