"""Stage that stores the deltas of a decomposed checkpoint sparse (DeRS compression, arXiv:2503.01359, Eq. 4)."""

from typing import ClassVar

from moetool.compress.delta_encoding import EncodedDeltas
from moetool.compress.delta_forms import Form, SparsityOptions, sparse
from moetool.job.options import KeepOptions, RunOptions
from moetool.job.plan import Plan
from moetool.job.stage import Effect


class SparsifyDeltaOptions(RunOptions, KeepOptions, SparsityOptions):
    """Options of sparse deltas: how much of each delta is dropped, and which elements."""


class SparsifyDelta(EncodedDeltas[SparsifyDeltaOptions]):
    """Keep a random or the largest part of each full delta's elements, and drop the others."""

    name: ClassVar[str] = "sparsify-delta"
    summary: ClassVar[str] = "store the deltas of a decomposed checkpoint sparse"
    options_type: ClassVar[type[RunOptions]] = SparsifyDeltaOptions
    effect: ClassVar[Effect] = "rescales"

    def _form(self) -> Form:
        return sparse(self.options)

    def plan(self) -> Plan:
        return self._plan(drop=self.options.drop)
