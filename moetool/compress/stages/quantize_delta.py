"""Stage that quantizes deltas (DeRS compression, arXiv:2503.01359, Eq. 5), alone or on top of low-rank factors."""

from functools import cached_property
from typing import ClassVar

from moetool.bases.layer_base import LayerBase, stored_base
from moetool.checkpoint.experts import Weights
from moetool.compress.coding_text import CodingText
from moetool.compress.delta_encoding import (
    CodeOptions,
    encoded_layouts,
    encoding_plan,
    quantized,
    run_encoding,
)
from moetool.compress.results import LayersResult
from moetool.format.layout import LayerLayout
from moetool.job.job import Job
from moetool.job.options import KeepOptions, RunOptions, TextOptions
from moetool.job.plan import Plan
from moetool.job.records import read_statistics
from moetool.job.stage import Stage


class QuantizeDeltaOptions(RunOptions, KeepOptions, CodeOptions, TextOptions):
    """Bits per number; with calibration text, codes make up for each other's errors on it."""


class QuantizeDelta(Stage[QuantizeDeltaOptions]):
    """Stores full deltas, or the factors of low-rank ones, as packed codes and scales."""

    name: ClassVar[str] = "quantize-delta"
    summary: ClassVar[str] = "store the deltas of a decomposed checkpoint quantized"
    options_type: ClassVar[type[RunOptions]] = QuantizeDeltaOptions
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    def _layouts(self) -> dict[int, LayerLayout]:
        form = quantized(self.options.bits, self.options.group_size, self.source.experts.shape)
        return encoded_layouts(self.source, form)

    def plan(self) -> Plan:
        options = self.options
        return encoding_plan(self.name, self.source, options, self._layouts(), self._text, bits=options.bits)

    @cached_property
    def _text(self) -> CodingText | None:
        return CodingText.of(self.source, self.options)

    def run(self, job: Job) -> LayersResult:
        reader = self.source.experts
        statistics = read_statistics(self.source)

        def base(layer: int, weights: Weights) -> LayerBase:
            return stored_base(reader, layer)

        return run_encoding(job, self.name, self._layouts(), base, statistics, self._text)
