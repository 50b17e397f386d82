"""Pass of a text through a dense model, on which each layer's neurons are measured and then settled."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.calibration.activations import ActivationFile
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import save_tensors, write_json
from moetool.convert.results import Activations
from moetool.costs.phases import FORWARD
from moetool.errors import InvalidInputError
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import DenseSource, Job
from moetool.job.progress import phase
from moetool.job.result import CalibrationFacts
from moetool.moefy.clusters import LayerPlan, order_by_activations, order_by_weights
from moetool.moefy.selector import needed_tokens
from moetool.moefy.settling import Settling
from moetool.moefy.statistics import NeuronStatistics, SampledNetwork

_SETTLED = "neurons"  # units, by layer


@dataclass(frozen=True)
class LayerFiles:
    """Files of one layer in the work directory: its inputs and statistics on the text, and what follows from them.

    Attributes:
        work: the directory.
        layer: which one.
    """

    work: Path
    layer: int

    @property
    def inputs(self) -> Path:
        """The file with a sample of the inputs of the layer's network."""
        return self.work / f"inputs-{self.layer:05d}.bin"

    @property
    def sums(self) -> Path:
        """Path of the file with the layer's activation sums over the whole calibration text."""
        return self.work / f"sums-{self.layer:05d}.safetensors"

    @property
    def settled(self) -> list[Path]:
        """The files with the layer's plan, and with what the result tells of it."""
        plan = self.work / f"neurons-{self.layer:05d}.safetensors"
        return [plan, plan.with_suffix(".json")]

    def plan(self) -> LayerPlan:
        return LayerPlan(**load_file(self.settled[0]))

    def activations(self) -> Activations:
        return Activations(**json.loads(self.settled[1].read_text()))


class NeuronMeasuring:
    """Runs the text on which a dense model's neurons are measured, layer by layer.

    All processes run windows of it, layer by layer. With clusters, each then settles layers of its own, as soon as
    there is one for every process; a layer whose neurons gradients rank is settled by the first on the way back.
    """

    def __init__(self, job: Job[DenseSource], settling: Settling) -> None:
        options, dense = settling.options, job.source.dense
        self._job, self._settling, self._dense = job, settling, dense
        self._gradients = options.baseline == "snip"
        encoder = dense.architecture.is_encoder
        self._calibrated = CalibratedJob(job, options, encoder=encoder, gradients=self._gradients)
        self._tokens = self._calibrated.sweep.windows.numel()
        if settling.selector == "mlp" and self._tokens < needed_tokens(settling.experts):
            raise InvalidInputError(
                f"The calibration text has {self._tokens:,} tokens; the selectors of {settling.experts} experts need "
                f"{needed_tokens(settling.experts):,}."
            )

    def run(self, layers: Sequence[int]) -> CalibrationFacts:
        """Measure the neurons of these layers and settle their experts."""
        if self._gradients:
            self._calibrated.reverse(self._backward, 1, layers)
        else:
            self._forward_through(layers)
        return self._calibrated.facts

    def _forward_through(self, layers: Sequence[int]) -> None:
        job = self._job
        job.meet()
        due = [layer for layer in layers if not job.workspace.is_done(f"{_SETTLED}/{layer}")]
        passing = self._calibrated.forward_pass(self._forward, due)
        groups = [layers[first : first + job.ranks.size] for first in range(0, len(layers), job.ranks.size)]
        batches = (layers[-1] + 2) * self._calibrated.sweep.batch_count  # none beyond the last layer that is split
        with phase(job.progress, FORWARD, batches + len(layers), "batches and layers"):
            for group in groups:
                passing.through(group[-1])
                for index in job.share(_SETTLED, dict.fromkeys(group, 1.0), dict.fromkeys(group, 1)):
                    with self._calibrated.model.layer(index) as layer:
                        self._settle(index, layer)
                    files = LayerFiles(job.work, index)
                    job.finish(f"{_SETTLED}/{index}", made=files.settled, spent=[files.inputs, files.sums])
                    job.progress.advance()

    def _forward(self, index: int, layer: nn.Module) -> None:
        sweep = self._calibrated.sweep
        statistics = self._statistics(layer, sweep)
        with statistics.watching():
            sweep.forward(index, layer)
        self._keep(index, statistics, sweep)

    def _backward(self, index: int, layer: nn.Module) -> None:
        sweep = self._calibrated.gradient_sweep
        statistics = self._statistics(layer, sweep)
        with statistics.watching(gradients=True, loss_scale=sweep.loss_scale):
            sweep.backward(index, layer)
        self._keep(index, statistics, sweep)
        if self._job.ranks.is_first:
            files = LayerFiles(self._job.work, index)
            self._settle(index, layer, statistics.saliency.argsort(descending=True, stable=True))
            files.inputs.unlink()
            files.sums.unlink()

    def _statistics(self, layer: nn.Module, sweep: Sweep) -> NeuronStatistics:
        most, before = self._settling.options.selector_tokens, sweep.own.start * sweep.length
        return NeuronStatistics(layer, self._dense.architecture, most, self._tokens, before)

    def _keep(self, index: int, statistics: NeuronStatistics, sweep: Sweep) -> None:
        """What was seen of one layer, into its files: all processes their inputs, the first the sums."""
        statistics.reduce(sweep.peers)
        file = self._inputs(index, statistics.size)
        if sweep.peers.size > 1:
            file.replace_together(iter(statistics.inputs), statistics.first, sweep.peers)
        else:
            sweep.digests[file.path] = file.replace(iter(statistics.inputs))
        if sweep.peers.is_first:
            save_tensors(LayerFiles(self._job.work, index).sums, {"mean": statistics.mean})

    def _inputs(self, index: int, count: int) -> ActivationFile:
        model = self._calibrated.model
        return ActivationFile(LayerFiles(self._job.work, index).inputs, (count, 1, self._dense.hidden), model.dtype)

    def _settle(self, index: int, layer: nn.Module, order: Tensor | None = None) -> None:
        """Everything that is to be known of one loaded layer, into its files. Without an `order`, cluster neurons."""
        files, count = LayerFiles(self._job.work, index), min(self._settling.options.selector_tokens, self._tokens)
        inputs = self._inputs(index, count).read(0, count)[:, 0].to(self._calibrated.model.device)
        network = SampledNetwork(layer, self._dense.architecture, inputs)
        mean = load_file(files.sums)["mean"]
        if order is None:
            order = self._clustered(index, network, mean)
        tensors, told = self._settling.settled(index, network, mean, order)
        save_tensors(files.settled[0], tensors)
        write_json(files.settled[1], told)

    def _clustered(self, index: int, network: SampledNetwork, mean: Tensor) -> Tensor:
        options, experts = self._settling.options, self._settling.experts
        if self._settling.selector == "projection":
            return torch.arange(len(mean))
        if options.as_published:
            return order_by_weights(self._dense, index, experts, options.seed)
        return order_by_activations(network, self._settling.centre(mean), index, experts, options.seed)
