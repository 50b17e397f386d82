"""The MoE layers of one job: measured in all forms on the way back, encoded in the chosen ones on the way forward."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.bases.choices import Merge
from moetool.bases.delta import Deltas
from moetool.bases.layer_base import LayerBase, agreed, base_path, measured_base, no_base
from moetool.calibration.collectors import LayerStatistics
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.observation import Collector
from moetool.calibration.output_gradients import metric_path
from moetool.calibration.output_metric import LayerMetric
from moetool.calibration.peers import Owned
from moetool.calibration.recorded import spread
from moetool.calibration.routed_tokens import RoutedTokens
from moetool.calibration.slopes import SlopeSamples
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.files import place
from moetool.compress.encoded_layers import Encoding
from moetool.compress.mixing.choosing import FormLosses, Mix
from moetool.compress.mixing.measuring import (
    MixingOptions,
    encoded,
    loss_name,
    losses_path,
    measure,
    measuring_steps,
)
from moetool.compress.mixing.schemes import StorageScheme
from moetool.compress.refining.layer import LayerRefining, Refining
from moetool.compress.results import MixedLayer
from moetool.format.layout import LayerLayout
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job


class MixedLayers:
    """Bases, estimated losses and encoded deltas of a job's layers, which wait in its work directory.

    Attributes:
        job: the job, or the part of it that encodes.
        facts: calibration text and loss, for the manifest.
    """

    def __init__(
        self,
        job: Job,
        calibrated: CalibratedJob,
        options: MixingOptions,
        schemes: Sequence[StorageScheme],
        merge: Merge,
        given: Mapping[int, LayerLayout] | None,
        *,
        gradients: bool,
    ) -> None:
        """Measure all layers, as far as an earlier run has not; with `given` layouts only make their bases. Without
        `gradients` no scheme has a base, and errors of all outputs count alike."""
        self.job, self._calibrated, self._options = job, calibrated, options
        self._schemes, self._merge, self._given, self._gradients = schemes, merge, given, gradients
        self._reader, self._measured = calibrated.source.experts, job.work
        self._refining = (
            Refining(self._reader, job.work, job.device, options.refine, options.seed) if options.refine else None
        )
        if gradients:
            calibrated.reverse(self._visit, passes=2 + self._measuring_passes if given is None else 1)
        else:
            fewer, passes = calibrated.on_fewer_windows(), 1 + self._measuring_passes
            fewer.forward_visiting(self._visit, name="measured", passes=passes)
        self.facts = calibrated.facts

    def within(self, part: Job) -> "MixedLayers":
        """Return the same measured layers for a part of the job that encodes a model of its own."""
        other = copy(self)
        other.job, other._calibrated = part, self._calibrated.within(part)
        if self._refining is not None:
            other._refining = replace(self._refining, work=part.work)
        if self._has_metrics:
            for layer in self._reader.moe_layers:
                place(metric_path(self._measured, layer), metric_path(part.work, layer))
        return other

    def encoding(self, layouts: Mapping[int, LayerLayout]) -> Encoding:
        """The encoding of all deltas in the forms of these layouts, done as `write_model` asks for layers."""
        return Encoding(self.job, layouts, self._encode, self._calibrated, whole_experts=self._refining is not None)

    @property
    def statistics(self) -> dict[int, LayerStatistics]:
        """Statistics of the layers whose bases have some, once bases are kept."""
        return {
            layer: own
            for layer in self._reader.moe_layers
            if base_path(self.job.work, layer).exists()  # else its experts stay as they are
            and (own := LayerBase.load(base_path(self.job.work, layer)).statistics) is not None
        }

    def losses(self) -> FormLosses:
        """Read the estimated losses of all forms of all matrices from the files that were measured."""
        found = {layer: load_file(losses_path(self._measured, layer)) for layer in self._reader.moe_layers}

        def of(layer: int, scheme: StorageScheme, role: Role, expert: int) -> Sequence[float]:
            own: list[float] = found[layer][loss_name(scheme, role, expert)].tolist()
            return own

        return of

    def keep_bases(self, mix: Mix) -> None:
        """Write each layer's base to its place in the work directory, every role as in the scheme that it got."""
        for layer, by_role in mix.schemes.items():
            bases = {
                scheme.name: LayerBase.load(self._base_path(layer, scheme))
                for scheme in self._schemes
                if scheme.name in by_role.values()
            }
            one = next(iter(bases.values()))
            matrices = {role: bases[name].matrices[role] for role, name in by_role.items()}
            compact = {role: bases[name].compact[role] for role, name in by_role.items() if role in bases[name].compact}
            rotation = {
                role: bases[name].rotation[role] for role, name in by_role.items() if role in bases[name].rotation
            }
            whole = replace(one, matrices=matrices, compact=compact, rotation=rotation)
            whole.save(base_path(self.job.work, layer))

    def results(self, mix: Mix, *, with_schemes: bool) -> dict[int, MixedLayer]:
        """Estimated losses by layer, with what refinement changed once it is written, and its schemes if asked for."""
        return {
            layer: MixedLayer(
                loss,
                self._refining.result(layer) if self._refining is not None else None,
                mix.schemes.get(layer) if with_schemes else None,
            )
            for layer, loss in mix.losses.items()
        }

    @property
    def _has_metrics(self) -> bool:
        """Whether it is measured how errors at the output of a layer count together."""
        return self._refining is not None or self._options.in_turn

    @property
    def _measuring_passes(self) -> int:
        """Passes over the text that measuring a layer counts as in progress: about one for each storage scheme."""
        return len(self._schemes)

    def _visit(self, index: int, layer: nn.Module) -> None:
        """Make a layer's base in every scheme, and measure all forms of its deltas."""
        job, calibrated = self.job, self._calibrated
        if self._gradients:
            merged = measured_base(calibrated, index, layer, self._merge, metric=self._has_metrics)
        else:
            merged = no_base(self._reader.shape, self._reader.dtype)
        if self._given is not None:
            if (layout := self._given.get(index)) is not None:
                agreed(job.ranks, base_path(job.work, index), merged.encoded(layout.base, layout.rotation))
            return
        weights, deltas = calibrated.weights(index, layer), dict[str, Deltas]()
        for scheme in self._schemes:
            if scheme.name not in deltas:
                own = merged.encoded(scheme.base, scheme.rotation_seeds(self._reader.shape, index))
                base = agreed(job.ranks, self._base_path(index, scheme), own)
                deltas[scheme.name] = Deltas(weights, base, job.device)
        owned = Owned(self._reader.shape, job.ranks)
        grams = self._grams(calibrated.gradient_sweep, index, layer, owned, keep=not self._gradients)
        schemes = [(scheme, deltas[scheme.name]) for scheme in self._schemes]
        choice, path, refined = self._options.sensitivity, losses_path(job.work, index), self._refining is not None
        sweep, shape = calibrated.gradient_sweep, self._reader.shape
        tick = spread(sweep.tick, self._measuring_passes * sweep.batch_count, measuring_steps(shape))
        measure(self._reader, index, schemes, grams, choice, path, owned, tick, refined=refined)

    def _base_path(self, layer: int, scheme: StorageScheme) -> Path:
        return self._measured / f"base-{layer:05d}-{scheme.name.replace(', ', '-')}.safetensors"

    def _encode(self, index: int, layer: nn.Module, layout: LayerLayout, owned: Owned) -> Iterator[tuple[str, Tensor]]:
        """Encode the deltas of a layer that this process has."""
        job, calibrated, choice = self.job, self._calibrated, self._options.sensitivity
        base, weights = LayerBase.load(base_path(job.work, index)), calibrated.weights(index, layer)
        deltas = Deltas(weights, base, job.device)
        if self._refining is None:
            grams = self._grams(calibrated.sweep, index, layer, owned, keep=True)
            metric = self._metric(index, grams, weights)
            yield from encoded(self._reader, deltas, layout, grams, choice, owned, None, metric)
            return
        with RoutedTokens(calibrated.sweep, index).kept() as examples:
            grams = self._grams(calibrated.sweep, index, layer, owned, examples, keep=True)
            native = calibrated.experts(layer)
            moved = LayerRefining(self._refining, index, native, weights, base, layout, examples)
            metric = self._metric(index, grams, weights)
            yield from encoded(self._reader, deltas, layout, grams, choice, owned, moved, metric)

    def _metric(self, layer: int, grams: InputGramCollector, weights: Weights) -> LayerMetric | None:
        """How errors in the matrices of a layer's experts count together; `None` if each row counts by itself."""
        if not self._options.in_turn:
            return None
        return LayerMetric.of_layer(self.job.work, layer, self.job.device, grams, self._reader.shape, weights)

    def _grams(
        self, sweep: Sweep, layer: int, module: nn.Module, owned: Owned, *others: Collector, keep: bool
    ) -> InputGramCollector:
        """Gram matrices of the inputs of a layer's experts, from running it over the text of the sweep."""
        grams = InputGramCollector(
            self._reader.shape,
            self.job.device,
            owned,
            self._calibrated.experts_at_once,
            slopes=SlopeSamples.within(sweep, self._reader.shape) if keep and self._options.in_turn else None,
            first=sweep.own.start,
        )
        sweep.forward(layer, module, [grams, *others], keep=keep)
        return grams
