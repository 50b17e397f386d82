"""A job that measures what every form of every matrix loses, buys the mix that loses least, and writes it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.bases.choices import Merge
from moetool.bases.delta import Deltas
from moetool.bases.layer_base import LayerBase, agreed, base_path, measured_base
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Owned
from moetool.calibration.routed_tokens import RoutedTokens
from moetool.calibration.sweep import Sweep
from moetool.compress.encoded import Encoding, encoded_bytes
from moetool.compress.encoding import agreed_layouts, refuse_compressed
from moetool.compress.mixing.choosing import Choosing, FormLosses, Mix, notes_on, notes_on_size
from moetool.compress.mixing.footings import Footing
from moetool.compress.mixing.measuring import encoded, loss_name, losses_path, measure
from moetool.compress.mixing.options import MixingOptions
from moetool.compress.refining.codes import BATCH_TOKENS
from moetool.compress.refining.layer import MOST_TOKENS, LayerRefining, Refining
from moetool.compress.refining.metric import OutputGradients, metric_path
from moetool.compress.told import MixedLayer, MixedTold
from moetool.costs.building_blocks import moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.costs.matrix_work import refine
from moetool.costs.phases import menu_phases
from moetool.format.layout import LayerLayout
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, Source
from moetool.job.options import CalibrationOptions, IncludeOptions
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.result import Json
from moetool.job.shards import OutputPlan
from moetool.job.writing import entry_for, original_bytes, write_model

Choose = Callable[[FormLosses], Mix]  # by what every form loses
_MEASURING = {
    *CalibrationOptions.model_fields,
    *IncludeOptions.model_fields,
    "compute_dtype",
    "group_size",
    "sensitivity",
    "trellis",
}


@dataclass(frozen=True)
class Mixing:
    """What is mixed.

    Attributes:
        name: of the method.
        source: the model.
        options: of the job.
        footings: that experts may get.
        merge: how bases are made of the experts.
        given: layouts by layer, if there is nothing to choose.
    """

    name: str
    source: Source
    options: MixingOptions
    footings: Sequence[Footing]
    merge: Merge
    given: Mapping[int, LayerLayout] | None = None

    def plan(self, output: int, details: Mapping[str, Json]) -> Plan:
        """For a result of so many bytes, if forms on offer take so many."""
        source, options, reader = self.source, self.options, self.source.experts
        if self.given is None:
            output = min(output, Choosing(source, self.footings, "matrix", options.shard_size).largest)
        cost, shape, at_once = self._cost, reader.shape, self.experts_at_once
        layers = source.architecture.layers(source.checkpoint.settings)
        stored = [(role, form) for footing in self.footings for role, form in footing.base.items()]
        bases = sum(form.nbytes(shape.matrix(role), reader.dtype) for role, form in stored)
        forward = cost.forward_bytes(shape.hidden) + encoded_bytes(reader, output, options.shard_size)
        backward = cost.gradient_bytes(shape.hidden, layers)
        forward += cost.recorded_bytes(shape, at_once, gradients=False, sums=False)
        backward += cost.recorded_bytes(shape, at_once, gradients=True, sums=True)
        if options.refine:
            forward += RoutedTokens.nbytes(cost.samples, cost.length, shape.hidden)
        metrics = 4 * shape.hidden**2 if options.refine else 0
        forms = {role: [form for footing in self.footings for form in footing.forms[role]] for role in shape.roles}
        refining = refine(shape, options.refine, BATCH_TOKENS) if options.refine else None
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=max(backward, forward) + len(reader.moe_layers) * (bases + metrics),
            memory_bytes=self._memory.nbytes(at_once),
            phases=menu_phases(cost, moe_size(reader, at_once), output, forms, self.footings[0].base, refining),
            details={
                "original_bytes": original_bytes(source),
                **details,
                "moe_layers": len(reader.moe_layers),
                "experts": shape.experts,
                "experts_at_once": at_once,
                "forms_per_matrix": len(forms["down"]),
            },
        )

    def check(self) -> None:
        """Raise `UsageError` for a model that is no ordinary one, or for inputs that cannot be rotated as was asked."""
        refuse_compressed(self.source)
        for footing in self.footings:
            footing.rotation(self.source.experts.shape, 0)

    @cached_property
    def _cost(self) -> CalibrationCost:
        return calibration_cost(self.source, self.options, self.options, gradients=True)

    @cached_property
    def _memory(self) -> LayerMemory:
        reader, regression = self.source.experts, self.merge == "regmean"
        base = Measuring.fisher(reader.shape, regression=regression)
        codes = Measuring.codes(reader.shape, refined_on=MOST_TOKENS if self.options.refine else 0)
        return self._cost.layer_memory(reader, base, codes, gradients=True)

    @cached_property
    def experts_at_once(self) -> int:
        """How many of a layer's experts are in memory together."""
        return experts_at_once(self._memory, self.options)

    def shared_recipe(self) -> Mapping[str, object] | None:
        """The options that decide what a form loses, whatever else is offered; `None` if there is nothing to choose."""
        if self.given is not None:
            return None
        own = self.options.model_dump(mode="json", include=_MEASURING)
        return {"stage": "mixing", **own, "merge": self.merge, "refined": self.options.refine > 0}

    def beside(self, others: Iterable["Mixing"]) -> "Mixing":
        """The same with what others of the same `shared_recipe` measure."""
        footings = {own.menu: own for mixing in (self, *others) for own in mixing.footings}
        return replace(self, footings=list(footings.values()))

    def measure(self, job: Job) -> "_Running":
        """What comes before the choice."""
        calibrated = CalibratedJob(job, self.options, gradients=True, experts_at_once=self.experts_at_once)
        running = _Running(self, job, calibrated)
        calibrated.reverse(running.visit, passes=2 if self.given is None else 1)
        return running

    def run(self, job: Job, choose: Choose, ratio: float) -> MixedTold:
        """Do it; `ratio` was asked for."""
        reader, options, running = self.source.experts, self.options, self.measure(job)
        calibrated = running.calibrated
        if self.given is None:
            mix = choose(running.losses())
            footings, losses = job.ranks.broadcast((dict(mix.footings), dict(mix.losses)))
            mix = Mix(agreed_layouts(job.ranks, mix.layouts), footings, losses)
            if job.ranks.is_first:
                running.keep_bases(mix)
            job.ranks.barrier()
        else:
            mix = Mix(self.given, {}, {layer: {} for layer in self.given})
        encoding = Encoding(job, mix.layouts, running.encode, calibrated, whole_experts=running.refining is not None)
        statistics = {
            layer: own
            for layer in reader.moe_layers
            if (own := LayerBase.load(base_path(job.work, layer)).statistics) is not None
        }
        output = OutputPlan(self.source, mix.layouts, options.shard_size)
        write_model(
            job,
            output,
            encoding.tensors,
            entry=entry_for(mix.layouts, self.source, method=self.name),
            statistics=statistics,
            calibration=calibrated.facts_with_loss,
            layers=lambda: running.told(mix),
            seed=options.seed,
            making=encoding,
        )
        notes = [
            *(notes_on(mix) if len(self.footings) > 1 else ()),
            *notes_on_size(output.nbytes, original_bytes(self.source), ratio),
        ]
        return MixedTold(calibration=calibrated.facts_with_loss, ratio=ratio, layers=running.told(mix), notes=notes)


class _Running:
    """The same at work."""

    def __init__(self, mixing: Mixing, job: Job, calibrated: CalibratedJob) -> None:
        self._mixing, self._job, self.calibrated = mixing, job, calibrated
        self._reader, options = mixing.source.experts, mixing.options
        self.refining = (
            Refining(self._reader, job.work, job.device, options.refine, options.seed) if options.refine else None
        )

    def _grams(
        self, sweep: Sweep, layer: int, module: nn.Module, owned: Owned, *others: Collector, keep: bool
    ) -> InputGramCollector:
        job, calibrated = self._job, self.calibrated
        grams = InputGramCollector(self._reader.shape, job.device, owned, calibrated.experts_at_once)
        sweep.forward(layer, module, [grams, *others], keep=keep)
        return grams

    def visit(self, index: int, layer: nn.Module) -> None:
        """Make a layer's base, and measure."""
        mixing, job, calibrated = self._mixing, self._job, self.calibrated
        blamed = [OutputGradients(calibrated.gradient_sweep, job.device)] if self.refining else []
        merged = measured_base(calibrated, index, layer, mixing.merge, blamed)
        if blamed and job.ranks.is_first:
            blamed[0].save(metric_path(job.work, index))
        if mixing.given is not None:
            layout = mixing.given[index]
            agreed(job.ranks, base_path(job.work, index), merged.encoded(layout.base, layout.rotation))
            return
        weights, path, deltas = calibrated.weights(index, layer), losses_path(job.work, index), dict[str, Deltas]()
        for footing in mixing.footings:
            if footing.name not in deltas:
                own = footing.under(self._reader.shape, index, merged)
                base = agreed(job.ranks, self._base_path(index, footing), own)
                deltas[footing.name] = Deltas(weights, base, job.device)
        owned = Owned(self._reader.shape, job.ranks)
        grams = self._grams(calibrated.gradient_sweep, index, layer, owned, keep=False)
        measured = [(footing, deltas[footing.name]) for footing in mixing.footings]
        choice, refined = mixing.options.sensitivity, self.refining is not None
        measure(self._reader, index, measured, grams, choice, path, owned, refined=refined)

    def _base_path(self, layer: int, footing: Footing) -> Path:
        return self._job.work / f"base-{layer:05d}-{footing.name.replace(', ', '-')}.safetensors"

    def losses(self) -> FormLosses:
        """What every form loses, as it was measured."""
        found = {layer: load_file(losses_path(self._job.work, layer)) for layer in self._reader.moe_layers}

        def of(layer: int, footing: Footing, role: Role, expert: int) -> Sequence[float]:
            own: list[float] = found[layer][loss_name(footing, role, expert)].tolist()
            return own

        return of

    def keep_bases(self, mix: Mix) -> None:
        """Leave each layer's base, by role that of the footing it got, in its place in the work directory."""
        for layer, by_role in mix.footings.items():
            bases = {
                footing.name: LayerBase.load(self._base_path(layer, footing))
                for footing in self._mixing.footings
                if footing.name in by_role.values()
            }
            one = next(iter(bases.values()))
            matrices = {role: bases[name].matrices[role] for role, name in by_role.items()}
            compact = {role: bases[name].compact[role] for role, name in by_role.items() if role in bases[name].compact}
            rotation = {
                role: bases[name].rotation[role] for role, name in by_role.items() if role in bases[name].rotation
            }
            whole = replace(one, matrices=matrices, compact=compact, rotation=rotation)
            whole.save(base_path(self._job.work, layer))

    def encode(self, index: int, layer: nn.Module, layout: LayerLayout, owned: Owned) -> Iterator[tuple[str, Tensor]]:
        """The deltas of a layer that this process has."""
        job, calibrated, choice = self._job, self.calibrated, self._mixing.options.sensitivity
        base, weights = LayerBase.load(base_path(job.work, index)), calibrated.weights(index, layer)
        deltas = Deltas(weights, base, job.device)
        if self.refining is None:
            grams = self._grams(calibrated.sweep, index, layer, owned, keep=True)
            yield from encoded(self._reader, deltas, layout, grams, choice, owned)
            return
        with RoutedTokens(calibrated.sweep, index).kept() as examples:
            grams = self._grams(calibrated.sweep, index, layer, owned, examples, keep=True)
            native = calibrated.experts(layer)
            moved = LayerRefining(self.refining, index, native, weights, base, layout, examples)
            yield from encoded(self._reader, deltas, layout, grams, choice, owned, moved)

    def told(self, mix: Mix) -> dict[int, MixedLayer]:
        """Of every layer; what refinement made of it once it is written."""
        several = len(self._mixing.footings) > 1
        return {
            layer: MixedLayer(
                loss,
                self.refining.told(layer) if self.refining is not None else None,
                mix.footings.get(layer) if several else None,
            )
            for layer, loss in mix.losses.items()
        }
