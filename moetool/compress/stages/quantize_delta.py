"""Stage that quantizes deltas (DeRS compression, arXiv:2503.01359, Eq. 5), alone or on top of low-rank factors."""

from typing import ClassVar

from moetool.compress.delta_encoding import EncodedDeltas
from moetool.compress.delta_forms import CodeOptions, Form, quantized
from moetool.job.options import KeepOptions, RunOptions, TextOptions
from moetool.job.plan import Plan


class QuantizeDeltaOptions(RunOptions, KeepOptions, CodeOptions, TextOptions):
    """Bits per number; with calibration text, codes make up for each other's errors on it."""


class QuantizeDelta(EncodedDeltas[QuantizeDeltaOptions]):
    """Stores full deltas, or the factors of low-rank ones, as packed codes and scales."""

    name: ClassVar[str] = "quantize-delta"
    summary: ClassVar[str] = "store the deltas of a decomposed checkpoint quantized"
    options_type: ClassVar[type[RunOptions]] = QuantizeDeltaOptions

    def _form(self) -> Form:
        return quantized(self.options.bits, self.options.group_size, self.source.experts.shape)

    def plan(self) -> Plan:
        return self._plan(bits=self.options.bits)
