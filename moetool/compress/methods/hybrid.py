"""A quantized base, and every delta in whichever form loses least for its bytes."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import MoEShape, Role
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Owned
from moetool.calibration.routed_tokens import RoutedTokens
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.files import save_tensors
from moetool.checkpoint.writer import TensorSpec, entry_nbytes
from moetool.compress.base.given import in_few_bits
from moetool.compress.base.layer_base import LayerBase, agreed, base_path, measured_base
from moetool.compress.budget.items import Forms, Group, Key, offered
from moetool.compress.budget.spending import fit
from moetool.compress.choices import Merge, Sensitivity
from moetool.compress.delta import Deltas
from moetool.compress.encoded import Encoding, encoded_bytes
from moetool.compress.encoding import BaseBits, base_representations, in_groups
from moetool.compress.factors.ranking import check_ratio
from moetool.compress.factors.sensitivity import LayerSensitivity
from moetool.compress.menu import losses, prepared
from moetool.compress.refining.expert import BATCH_TOKENS
from moetool.compress.refining.layer import MOST_TOKENS, LayerRefining, Refining
from moetool.compress.refining.metric import OutputGradients, metric_path
from moetool.compress.told import MixedLayer, MixedTold
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.building_blocks import moe_size, refine
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, pick_compute_dtype, pick_device, to_cpu
from moetool.job.layer_memory import LayerMemory, Measuring
from moetool.job.options import CalibrationOptions, RunOptions
from moetool.job.phases import menu_phases
from moetool.job.plan import CalibrationCost, Plan
from moetool.job.stage import Stage
from moetool.job.writing import OutputPlan, entry_for, original_bytes, write_model
from moetool.representations import Measured, Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank, break_even_rank
from moetool.representations.quantized import Quantized
from moetool.representations.quantized_low_rank import QuantizedLowRank

# Forms are offered from a third to three times the bits that every number of a delta can have on average.
_REACH = 3.0
_LOW_RANK_BITS = 3  # of factors; 3 bits of twice the rank beat 4 and 8 bits on trained experts
# Of the rank at which full-precision factors break even. With all of it, factors would take as much as codes of the
# whole matrix in so many bits, which lose less.
_LOW_RANK_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


class HybridOptions(RunOptions, CalibrationOptions):
    """A budget of bytes, and what may be bought with it."""

    ratio: float = Field(
        gt=0, lt=1, description="Share of the weight files' bytes that disappears: 0.8 makes the model 80 % smaller."
    )
    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    base_bits: BaseBits = Field(
        "2", description="Bits of the base: 1, 2, 3, 4, 8, nf4 or int8. Deltas make up for its errors."
    )
    group_size: int = Field(
        128, ge=1, description="Inputs that share a scale; the largest divisor below if it does not divide a row."
    )
    sensitivity: Sensitivity = Field(
        "channel", description="Weigh errors by what they cost in loss: by output channel, by matrix, or not at all."
    )
    refine: int = Field(
        0,
        ge=0,
        description="Steps in which each expert's codes and scales are then moved by gradients of its own output's "
        "error; windows held out tell whether it got better.",
    )


class Hybrid(Stage[HybridOptions]):
    """Bits and ranks together: each form of each matrix is made and measured, and the budget buys the best mix."""

    name: ClassVar[str] = "hybrid"
    summary: ClassVar[str] = "a quantized base, and per delta the bits or ranks that lose least"
    options_type: ClassVar[type[RunOptions]] = HybridOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    def plan(self) -> Plan:
        source, options, reader = self.source, self.options, self.source.experts
        if reader.layouts:
            raise UsageError(f"{source.checkpoint.path} is already a moetool checkpoint: start from an ordinary one.")
        if options.calibration is None:
            raise UsageError("--method hybrid measures what every form loses: give --calibration.")
        smallest = self._planned({layer: self._layout(LowRank(0)) for layer in reader.moe_layers})
        original = original_bytes(source)
        check_ratio(options.ratio, smallest, original)
        cost, shape, at_once = self._cost, reader.shape, self._experts_at_once
        layers = source.architecture.layers(source.checkpoint.config)
        forms = forms_for(reader.shape, self._average_bits(), options.group_size)
        bases = sum(form.nbytes(reader.shape.matrix(role), reader.dtype) for role, form in self._base.items())
        output = round(original * (1 - options.ratio))
        forward = cost.forward_bytes(shape.hidden) + encoded_bytes(reader, output, options.shard_size)
        backward = cost.gradient_bytes(shape.hidden, layers)
        refining = refine(shape, options.refine, BATCH_TOKENS) if options.refine else None
        if at_once < shape.experts:
            forward += cost.recorded_bytes(shape, gradients=False, sums=False)
        if options.refine:
            forward += RoutedTokens.nbytes(cost.samples, cost.length, shape.hidden)
            backward += cost.recorded_bytes(shape, gradients=True, sums=True)
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=max(backward, forward) + len(reader.moe_layers) * bases,
            memory_bytes=self._memory.nbytes(at_once),
            phases=menu_phases(cost, moe_size(reader), output, forms, self._base, refining),
            details={
                "original_bytes": original,
                "smallest_possible_bytes": smallest,
                "moe_layers": len(reader.moe_layers),
                "experts": shape.experts,
                "experts_at_once": at_once,
                "bits_per_number": round(self._average_bits(), 2),
                "forms_per_matrix": len(forms["down"]),
            },
        )

    @cached_property
    def _cost(self) -> CalibrationCost:
        options, dtype = self.options, self.source.experts.dtype
        device = pick_device(options.device)
        return CalibrationCost.of(
            options, pick_compute_dtype(options.compute_dtype, device, dtype, gradients=True), dtype
        )

    @cached_property
    def _memory(self) -> LayerMemory:
        reader, regression = self.source.experts, self.options.merge == "regmean"
        base, codes = (
            Measuring.fisher(reader.shape, regression=regression),
            Measuring.codes(reader.shape, refined_on=MOST_TOKENS if self.options.refine else 0),
        )
        return self._cost.layer_memory(reader, base, codes, gradients=True)

    @cached_property
    def _experts_at_once(self) -> int:
        return self._memory.at_once(self.options.memory)

    def _layout(self, form: Representation) -> LayerLayout:
        return LayerLayout.uniform(self.source.experts.shape, form, base=self._base)

    @property
    def _base(self) -> dict[Role, Representation]:
        """How the base of each role is stored."""
        options = self.options
        return base_representations(self.source.experts.shape, options.base_bits, options.group_size)

    def _planned(self, layouts: Mapping[int, LayerLayout]) -> int:
        return OutputPlan(self.source, layouts, self.options.shard_size).nbytes

    def _average_bits(self) -> float:
        """Bits that the budget leaves for every number of a delta."""
        reader = self.source.experts
        smallest = self._planned({layer: self._layout(LowRank(0)) for layer in reader.moe_layers})
        left = original_bytes(self.source) * (1 - self.options.ratio) - smallest
        numbers = reader.shape.expert_parameters * reader.shape.experts * len(reader.moe_layers)
        return max(8 * left / numbers, 1e-3)

    def run(self, job: Job) -> MixedTold:
        options, reader = self.options, self.source.experts
        calibrated = CalibratedJob(job, options, gradients=True, experts_at_once=self._experts_at_once)
        forms = forms_for(reader.shape, self._average_bits(), options.group_size)

        refining = Refining(reader, job.work, job.device, options.refine, options.seed) if options.refine else None

        def grams_of(
            sweep: Sweep, layer: int, module: nn.Module, owned: Owned, *others: Collector, keep: bool
        ) -> InputGramCollector:
            grams = InputGramCollector(reader.shape, job.device, owned, calibrated.experts_at_once)
            sweep.forward(layer, module, [grams, *others], keep=keep)
            return grams

        def visit(index: int, layer: nn.Module) -> None:
            blamed = [OutputGradients(calibrated.gradient_sweep, job.device)] if refining else []
            base = measured_base(calibrated, index, layer, options.merge, blamed)
            if blamed and job.ranks.is_first:
                blamed[0].save(metric_path(job.work, index))
            base = in_few_bits(base, options.base_bits, options.group_size)
            base = agreed(job.ranks, base_path(job.work, index), base)
            owned = Owned(reader.shape, job.ranks)
            grams = grams_of(calibrated.gradient_sweep, index, layer, owned, keep=False)
            deltas = Deltas(calibrated.weights(index, layer), base, job.device)
            cook(reader, deltas, forms, grams, options.sensitivity, losses_path(job.work, index), owned)

        def encode(index: int, layer: nn.Module, layout: LayerLayout, owned: Owned) -> Iterator[tuple[str, Tensor]]:
            base, weights = LayerBase.load(base_path(job.work, index)), calibrated.weights(index, layer)
            deltas = Deltas(weights, base, job.device)
            if refining is None:
                grams = grams_of(calibrated.sweep, index, layer, owned, keep=True)
                yield from encoded(reader, deltas, layout, grams, options.sensitivity, owned)
                return
            with RoutedTokens(calibrated.sweep, index).kept() as examples:
                grams = grams_of(calibrated.sweep, index, layer, owned, examples, keep=True)
                moved = refining.layer(index, calibrated.experts(layer), weights, base, layout, examples)
                yield from encoded(reader, deltas, layout, grams, options.sensitivity, owned, moved)

        calibrated.reverse(visit, passes=2)
        layouts, lost = job.ranks.broadcast(self._choose(job, forms))
        encoding = Encoding(job, layouts, encode, calibrated, whole_experts=refining is not None)

        def told() -> dict[int, MixedLayer]:
            if refining is None:
                return lost
            return {layer: replace(own, refined=refining.told(layer)) for layer, own in lost.items()}

        statistics = {
            layer: own
            for layer in reader.moe_layers
            if (own := LayerBase.load(base_path(job.work, layer)).statistics) is not None
        }
        write_model(
            job,
            OutputPlan(self.source, layouts, options.shard_size),
            encoding.tensors,
            entry=entry_for(layouts, self.source, method=self.name),
            statistics=statistics,
            calibration=calibrated.facts_with_loss,
            layers=told,
            seed=options.seed,
            making=encoding,
        )
        return MixedTold(calibration=calibrated.facts_with_loss, ratio=options.ratio, layers=told())

    def _choose(
        self, job: Job, forms: Mapping[Role, list[Representation]]
    ) -> tuple[dict[int, LayerLayout], dict[int, MixedLayer]]:
        """Layouts within the budget, and what their forms lose."""
        reader = self.source.experts
        target = round(original_bytes(self.source) * (1 - self.options.ratio))
        start = min(target, self.options.shard_size)  # of a tensor's data, no further: entries have so many digits
        experts = range(reader.shape.experts)
        items, losses = {}, {}
        for layer in reader.moe_layers:
            measured = load_file(losses_path(job.work, layer))
            for role in reader.shape.roles:
                for expert in experts:
                    key = layer, role, expert
                    losses[key] = measured[f"{role}.{expert}"].tolist()
                    sizes = [_bytes_in_file(reader, key, form, start) for form in forms[role]]
                    items[key] = offered(forms[role], sizes, losses[key])

        def layouts(chosen: Forms) -> dict[int, LayerLayout]:
            return {
                layer: LayerLayout(
                    reader.shape,
                    {role: tuple(chosen[layer, role, expert] for expert in experts) for role in reader.shape.roles},
                    reader.shape.intermediate,
                    base=self._base,
                )
                for layer in reader.moe_layers
            }

        chosen = fit("water-filling", [Group(items)], target, lambda forms: self._planned(layouts(forms)))
        lost = summed((key, losses[key][forms[key[1]].index(form)]) for key, form in chosen.items())
        return layouts(chosen), {layer: MixedLayer(by_role) for layer, by_role in lost.items()}


def summed(losses: Iterable[tuple[Key, float]]) -> dict[int, dict[Role, float]]:
    """What all experts lose together, by layer and role, to four digits; given by layer, role and expert."""
    parts: dict[int, dict[Role, list[float]]] = {}
    for (layer, role, _), loss in losses:
        parts.setdefault(layer, {}).setdefault(role, []).append(loss)
    return {
        layer: {role: float(f"{math.fsum(own):.4g}") for role, own in by_role.items()}
        for layer, by_role in parts.items()
    }


def losses_path(work: Path, layer: int) -> Path:
    """Where what the forms of a layer's deltas lose waits for the choice."""
    return work / f"losses-{layer:05d}.safetensors"


def forms_for(shape: MoEShape, bits: float, group: int) -> dict[Role, list[Representation]]:
    """The forms that every delta of a role is offered in, if each of its numbers can have `bits` on average."""
    near = [b for b in (1, 2, 3, 4, 8) if bits / _REACH <= b <= bits * _REACH] or [1 if bits < 1 else 8]
    if bits <= _LOW_RANK_BITS:
        near = sorted({*near, _LOW_RANK_BITS})
    forms: dict[Role, list[Representation]] = {}
    for role in shape.roles:
        matrix = shape.matrix(role)
        own: list[Representation] = [LowRank(0), *(in_groups(Quantized(b, group), matrix, group) for b in near)]
        if bits <= _LOW_RANK_BITS:
            ranks = sorted({max(1, math.floor(break_even_rank(matrix) * share)) for share in _LOW_RANK_SHARES})
            own += [in_groups(QuantizedLowRank(rank, _LOW_RANK_BITS, group), matrix, group) for rank in ranks]
        if bits * _REACH >= 16 or not near[1:]:
            own.append(Dense())
        forms[role] = own
    return forms


def _bytes_in_file(reader: ExpertReader, key: Key, form: Representation, start: int) -> int:
    """Bytes of a form with its entries in the file's header, which small matrices notice."""
    layer, role, expert = key
    prefix = reader.architecture.experts_prefix(layer)
    specs = [
        TensorSpec(prefix + delta_name(expert, role, name), stored.dtype or reader.dtype, stored.shape)
        for name, stored in form.tensors(reader.shape.matrix(role)).items()
    ]
    return sum(spec.nbytes + entry_nbytes(spec, start) for spec in specs)


def cook(
    reader: ExpertReader,
    deltas: Deltas,
    forms: Mapping[Role, list[Representation]],
    grams: InputGramCollector,
    choice: Sensitivity,
    path: Path,
    owned: Owned,
) -> None:
    """Leave in the work directory what every form of every delta of a layer would lose, by all processes together."""
    shape = reader.shape
    sensitivity = LayerSensitivity(choice, deltas.base.statistics, grams.energy(), grams.tokens())
    lost: dict[str, Tensor] = {}
    for expert in (expert for experts in grams.sets() for expert in experts):
        for group in shape.groups:
            if not owned.has(group[0], expert):
                continue
            inputs = Measured(grams.gram(expert, group[0])).with_feedback()
            for role in group:
                delta = deltas.of(role, expert)
                counts = sensitivity.of(role, expert, shape.matrix(role)[1], whitened=True)
                measured = prepared(delta, forms[role], replace(inputs, row_scale=counts.row_scale))
                own = losses(delta, forms[role], reader.dtype, measured, counts)
                lost[f"{role}.{expert}"] = torch.tensor(own, dtype=torch.float64)
    found = {name: own for others in owned.peers.gather(lost) for name, own in others.items()}
    if owned.peers.is_first:
        save_tensors(path, found)


def encoded(
    reader: ExpertReader,
    deltas: Deltas,
    layout: LayerLayout,
    grams: InputGramCollector,
    choice: Sensitivity,
    owned: Owned,
    refining: LayerRefining | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of every delta of a layer that this process has in the form it got, by name relative to the
    experts; with `refining` moved, for which it has whole experts."""
    sensitivity = LayerSensitivity(choice, deltas.base.statistics, grams.energy(), grams.tokens())
    roles = reader.shape.roles

    def own(expert: int) -> dict[Role, dict[str, Tensor]]:
        inputs: dict[bool, Measured] = {}
        found = {}
        for role in roles:
            if not owned.has(role, expert):
                continue
            form, matrix = (layout.weights[role] or ())[expert], reader.shape.matrix(role)
            if form.is_whole:
                found[role] = form.encode(deltas.weight(role, expert), reader.dtype)
                continue
            counts = sensitivity.of(role, expert, matrix[1], whitened=True)
            if (role == "down") not in inputs:  # gate and up of an expert are given the same
                inputs = {role == "down": Measured(grams.gram(expert, role)).with_feedback()}
            delta, known = deltas.of(role, expert), inputs[role == "down"]
            measured = prepared(delta, [form], replace(known, row_scale=counts.row_scale))
            found[role] = form.encode(delta, reader.dtype, measured)
        return found

    for expert in (expert for experts in grams.sets() for expert in experts):
        made: Mapping[Role, Mapping[str, Tensor]] = own(expert)
        if refining is not None and made:
            made = refining.refined(expert, made)
        for role, tensors in made.items():
            for name, tensor in tensors.items():
                yield delta_name(expert, role, name), to_cpu(tensor)
    if refining is not None:
        refining.save(owned.peers)
