"""The text on which codes are chosen: its costs, its way through the model, and what it says of a layer's experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.output_metric import LayerMetric
from moetool.calibration.peers import Owned
from moetool.calibration.slopes import SlopeSamples
from moetool.checkpoint.experts import Weights
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.job.calibrated import CalibratedJob
from moetool.job.including import included_bytes, included_shapes
from moetool.job.job import Job, Source
from moetool.job.options import RunOptions, TextOptions
from moetool.job.plan import calibration_cost, experts_at_once

NEAREST = "Without a text numbers are rounded to the nearest codes: --calibration bundled takes longer and loses less."


@dataclass(frozen=True)
class CodingText:
    """The text on which a job chooses codes, layer by layer.

    Attributes:
        options: which text it is.
        in_turn: whether rows make good for each other's errors, which takes gradients first.
        cost: of the text's way through the model.
        memory: peak bytes, by parts.
        experts_at_once: of a layer, in memory together.
    """

    options: TextOptions
    in_turn: bool
    cost: CalibrationCost
    memory: LayerMemory
    experts_at_once: int

    @classmethod
    def of(
        cls,
        source: Source,
        options: RunOptions,
        *,
        in_turn: bool = True,
        beside: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> Self | None:
        """Return the text of a job on this model; `None` if its options have no text, or `--calibration` names none.
        `beside` are the shapes of matrices beside the experts that are coded on it, by layer: by default of what the
        job includes."""
        text: object = options  # mypy takes no options for both kinds at once
        if not isinstance(text, TextOptions) or text.calibration is None:
            return None
        cost = calibration_cost(source, options, text, gradients=in_turn)
        codes = Measuring.codes(source.experts.shape, in_turn=in_turn)
        beside = beside if beside is not None else included_shapes(source) if in_turn else []
        memory = cost.layer_memory(source.experts, codes, Measuring.beside(beside), gradients=in_turn)
        return cls(text, in_turn, cost, memory, experts_at_once(memory, options))

    def scratch(self, source: Source) -> int:
        """Most bytes of the work directory that the text takes on its way."""
        reader = source.experts
        forward = self.cost.forward_scratch(reader, self.experts_at_once)
        if not self.in_turn:
            return forward
        metrics = 4 * reader.shape.hidden**2 * len(reader.moe_layers) + included_bytes(source)
        return metrics + max(forward, self.cost.backward_scratch(reader, self.experts_at_once))

    def calibrated(self, job: Job) -> CalibratedJob:
        """Open the model before its calibration text, of which nothing has passed through it yet."""
        return CalibratedJob(job, self.options, gradients=self.in_turn, experts_at_once=self.experts_at_once)

    def opened(self, job: Job) -> CalibratedJob:
        """Open the model with the text, and take gradients if rows are to be coded in turn."""
        found = self.calibrated(job)
        if self.in_turn:
            found.measure_outputs()
        return found

    def grams(self, calibrated: CalibratedJob, layer: int, module: nn.Module, owned: Owned) -> InputGramCollector:
        """Run the text through a loaded layer and measure what its experts are given."""
        shape, device = calibrated.source.experts.shape, calibrated.job.device
        slopes = SlopeSamples.within(calibrated.sweep, shape) if self.in_turn else None
        grams = InputGramCollector(
            shape, device, owned, self.experts_at_once, slopes=slopes, first=calibrated.sweep.own.start
        )
        calibrated.sweep.forward(layer, module, [grams])
        return grams

    def metric(self, calibrated: CalibratedJob, layer: int, grams: InputGramCollector, weights: Weights) -> LayerMetric:
        """Read how errors in the matrices of a layer count together, if gradients were taken."""
        job, shape = calibrated.job, calibrated.source.experts.shape
        return LayerMetric.of_layer(job.work, layer, job.device, grams, shape, weights)
