"""Plans and writing of low-rank factors, which `svd-compress`, `compress --method d2moe` and others share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from moetool.architectures import ROLES, Role
from moetool.bases.choices import Merge
from moetool.bases.delta import Deltas
from moetool.bases.layer_base import LayerBase, base_path
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Owned
from moetool.calibration.routed_tokens import RoutedTokens
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.sizes import format_bytes
from moetool.compress.budget.items import factors_of
from moetool.compress.delta_forms import agreed_layouts
from moetool.compress.encoded_layers import Encoding, encoded_bytes
from moetool.compress.factors.files import LayerFactors, SpectrumFile
from moetool.compress.factors.options import FactorOptions
from moetool.compress.factors.ranking import (
    FACTORS,
    LayerSpectra,
    build_groups,
    check_ratio,
    fit_layouts,
    layouts_from,
    least_routed,
    same_rank,
)
from moetool.compress.refining.factors import TOKENS_PER_STEP
from moetool.compress.refining.layer import MOST_KEPT, LayerRefining, Refining
from moetool.compress.results import RankedLayer, RankedResult
from moetool.costs.building_blocks import moe_size, refine_together
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.costs.phases import FACTORIZE, factor_phases, with_codes_beside
from moetool.errors import UsageError
from moetool.format.layout import DENSE_BASE, LayerLayout
from moetool.job.calibrated import CalibratedJob
from moetool.job.including import included_bytes, included_shapes
from moetool.job.job import Job, Source
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.progress import phase
from moetool.job.result import significant
from moetool.job.shards import OutputPlan
from moetool.job.writing import entry_for, original_bytes, write_model
from moetool.representations import Representation
from moetool.representations.low_rank import LowRank


def measure_layers(job: Job, options: FactorOptions, base_of: Callable[[int, Weights], LayerBase]) -> None:
    """Write base and spectra of every layer to the work directory without a text; processes share the layers."""
    reader = job.source.experts
    once = dict.fromkeys(reader.moe_layers, 1)
    with phase(job.progress, FACTORIZE, len(once), "layers"):
        for layer in job.share("measure", once, once):
            weights, file = reader.weights(layer), SpectrumFile(job.work, layer, reader.shape, options.share)
            base = base_of(layer, weights)
            base.save(path := base_path(job.work, layer))
            LayerFactors(reader.shape, Deltas(weights, base, job.device), options, None).measure(file)
            job.finish(f"measure/{layer}", made=[path, file.path])
            job.progress.advance()


class FactoredLayers:
    """All MoE layers of a job, from bases and spectra in the work directory to ranks and weight files."""

    def __init__(self, job: Job, dynamic_channels: int | Mapping[int, int], options: FactorOptions) -> None:
        self._job, self._reader, self._options = job, job.source.experts, options
        self._spectra = []
        for layer in self._reader.moe_layers:
            base = LayerBase.load(base_path(job.work, layer))
            dynamic = dynamic_channels if isinstance(dynamic_channels, int) else dynamic_channels[layer]
            file = SpectrumFile(job.work, layer, self._reader.shape, options.share)
            tokens = file.tokens()
            if base.statistics is not None and not bool(tokens.any()):
                tokens = base.statistics.tokens
            self._spectra.append(
                LayerSpectra(
                    layer,
                    file,
                    len(base.channels),
                    dynamic,
                    base.statistics,
                    base.representations,
                    least_routed(tokens, options.trim),
                    options.coded_bits,
                )
            )

    def finish(self, method: str, calibrated: CalibratedJob | None, refine: int = 0) -> RankedResult:
        """Choose ranks, encode, write, and report; base and factors are refined in `refine` steps per layer."""
        job, reader, options = self._job, self._reader, self._options
        missed = [f"layer {entry.layer} expert {expert}" for entry in self._spectra for expert in unreached(entry)]
        if missed:
            job.progress.log(
                f"No calibration token reached {len(missed)} expert{'s' * (len(missed) > 1)} ({', '.join(missed[:4])}"
                f"{', …' if len(missed) > 4 else ''}): each counts as one average token. More --samples may reach more."
            )
        layouts = agreed_layouts(job.ranks, self._layouts())
        refining = Refining(reader, job.work, job.device, refine, options.seed) if refine else None

        def factors(
            layer: int,
            module: nn.Module,
            layout: LayerLayout,
            base: LayerBase,
            owned: Owned,
            others: Sequence[Collector] = (),
        ) -> Iterator[tuple[str, Tensor]]:
            if calibrated is None:
                deltas = Deltas(reader.weights(layer), base, job.device)
                found = LayerFactors(reader.shape, deltas, options, None, owned)
            else:
                sweep = calibrated.sweep
                found = LayerFactors.on_text(
                    calibrated, sweep, layer, module, base, owned, options, keep=True, others=others
                )
            return found.encode(layout, reader.dtype)

        def encode(layer: int, module: nn.Module, layout: LayerLayout, owned: Owned) -> Iterator[tuple[str, Tensor]]:
            if refining is None or calibrated is None:
                yield from factors(layer, module, layout, LayerBase.load(base_path(job.work, layer)), owned)
                return
            base = refining.unmoved_base(layer, owned.peers)
            with RoutedTokens(calibrated.sweep, layer).kept() as examples:
                encoded = factors(layer, module, layout, base, owned, [examples])
                native, weights = calibrated.experts(module), calibrated.weights(layer, module)
                moved = LayerRefining(refining, layer, native, weights, base, layout, examples)
                yield from moved.refined_together(encoded, owned)

        lost = self._lost(layouts)

        def layers() -> dict[int, RankedLayer]:
            if refining is None:
                return lost
            return {layer: replace(own, refined=refining.result(layer)) for layer, own in lost.items()}

        encoding, facts = Encoding(job, layouts, encode, calibrated), None if calibrated is None else calibrated.facts
        write_model(
            job,
            self._plan(layouts),
            encoding.tensors,
            entry=entry_for(layouts, job.source, method=method),
            statistics={entry.layer: entry.statistics for entry in self._spectra if entry.statistics is not None},
            calibration=facts,
            layers=layers,
            making=encoding,
        )
        return RankedResult(
            calibration=facts,
            ratio=options.ratio,
            unreached_experts=missed,
            depends_on_batch=any(layout.dynamic_channels for layout in layouts.values()),
            notes=() if (note := self._trim_note(layouts)) is None else (note,),
            layers=layers(),
        )

    def _plan(self, layouts: Mapping[int, LayerLayout]) -> OutputPlan:
        return OutputPlan(self._job.source, layouts, self._job.options.shard_size)

    def _layouts(self) -> dict[int, LayerLayout]:
        """The layout of every layer, with ranks that keep to a ratio of the original's bytes, or with one rank."""
        shape, options = self._reader.shape, self._options
        if options.rank is not None:
            return layouts_from(self._spectra, shape, same_rank(self._spectra, shape, options.rank))
        assert options.ratio is not None
        groups = build_groups(self._spectra, shape, self._reader.dtype, options.rank_multiple)
        target = round(original_bytes(self._job.source) * (1 - options.ratio))
        return fit_layouts(
            options.allocation, self._spectra, groups, shape, target, lambda layouts: self._plan(layouts).nbytes
        )

    def _trim_note(self, layouts: Mapping[int, LayerLayout]) -> str | None:
        """The note that the result is smaller than was asked for, if all deltas that `--trim` has left are whole."""
        dropped = sum(_is_cut(form) for layout in layouts.values() for _, _, form in layout.deltas())
        if dropped > self._options.trim * len(self._reader.shape.roles) * len(layouts):
            return None
        return _trim_note(self._options, self._plan(layouts).nbytes, original_bytes(self._job.source))

    def _lost(self, layouts: Mapping[int, LayerLayout]) -> dict[int, RankedLayer]:
        """The tokens of each expert, and the share of each delta's energy that its rank loses, by layer."""
        lost = {}
        for entry in self._spectra:
            layout = layouts[entry.layer]
            tokens = entry.factors.tokens()
            given = tokens if bool(tokens.any()) else None if entry.statistics is None else entry.statistics.tokens
            errors: dict[Role, list[float]] = {role: [] for role, own in layout.weights.items() if own is not None}
            for expert, role, form in layout.deltas():
                error = 0.0
                if _is_cut(form):
                    spectrum, energy = entry.factors.spectrum(role, min(expert, entry.factors.count - 1))
                    error = 1 - spectrum[: form.directions].sum().item() / energy if energy > 0 else 0.0
                errors[role].append(significant(max(error, 0.0)))
            lost[entry.layer] = RankedLayer(tokens=None if given is None else given.tolist(), lost_energy=errors)
        return lost


def _is_cut(form: Representation) -> bool:
    """Whether the form of a delta loses some or all of its directions."""
    return form.uses_base and (form.is_plain or form.directions > 0)


def _trim_note(options: FactorOptions, largest: int, original: int) -> str | None:
    """The note that `--trim` alone, which leaves at most `largest` of `original` bytes, takes more than `--ratio`."""
    if not options.trim or options.ratio is None or largest >= round(original * (1 - options.ratio)):
        return None
    return (
        f"--trim {options.trim} alone makes {format_bytes(original)} {1 - largest / original:.1%} smaller, more than "
        f"the {options.ratio:.1%} that were asked for: all other deltas stay whole. Trim fewer experts to come closer."
    )


def unreached(entry: LayerSpectra) -> list[int]:
    """Experts of a layer to which no calibration token was routed; none if the layer was not calibrated at all."""
    energy = entry.factors.input_energy()[ROLES.index("up")]
    return [expert for expert, given in enumerate(energy.tolist()) if given == 0] if bool(energy.any()) else []


def factor_cost(source: Source, options: FactorOptions, *, gradients: bool) -> CalibrationCost:
    """Cost of the calibration passes in which the statistics for low-rank factors are measured."""
    return calibration_cost(source, options, options if options.calibration else None, gradients=gradients)


def factor_memory(source: Source, options: FactorOptions, merge: Merge | None, *, refine: int = 0) -> LayerMemory:
    """The memory that a layer takes while it is calibrated and factorized, and, with a `merge`, its base is made.

    With `refine`, base and factors are then refined."""
    reader, gradients = source.experts, merge is not None
    factors = Measuring.factors(reader.shape, jointly=options.share != "none", linked=options.links_outputs)
    if refine:
        tokens = min(options.samples * options.sequence_length, MOST_KEPT)
        share = _share_of_numbers(1 - (options.ratio or 0), options)
        factors = factors.refined(reader.shape, share, tokens)
    measuring = [factors]
    if gradients:
        measuring.append(Measuring.fisher(reader.shape, regression=merge == "regmean"))
        measuring.append(Measuring.beside(included_shapes(source)))
    return factor_cost(source, options, gradients=gradients).layer_memory(reader, *measuring, gradients=gradients)


def _share_of_numbers(kept: float, options: FactorOptions) -> float:
    """The share of the experts' numbers that deltas have at most, in a result that has `kept` a share of the bytes."""
    return min(1.0, kept * 16 / options.factor_bits)


def factors_at_once(memory: LayerMemory, options: FactorOptions) -> int:
    """The number of experts of a layer that are in memory together: all if they share a factor."""
    return memory.experts if options.share != "none" else experts_at_once(memory, options)


def factor_plan(
    stage: str,
    source: Source,
    options: FactorOptions,
    base_channels: int,
    memory: LayerMemory,
    at_once: int,
    *,
    gradients: bool,
    base: Mapping[Role, Representation] | None,
    refine: int = 0,
) -> Plan:
    """The plan of a stage that calibrates and factorizes.

    Raises:
        UsageError: the ratio cannot be reached.
    """
    reader, checkpoint = source.experts, source.checkpoint
    original = original_bytes(source)
    if options.trim > reader.shape.experts:
        raise UsageError(f"--trim {options.trim} is more than the {reader.shape.experts} experts of a layer.")

    def form(role: Role, rank: int) -> Representation:
        try:
            return factors_of(reader.shape.matrix(role), rank, FACTORS[options.share], options.coded_bits)
        except ValueError as error:
            raise UsageError(f"--factor-bits {options.factor_bits}: {error}.") from error

    def size(rank: int, trim: int = 0) -> int:
        kept = reader.shape.experts - trim
        forms = {role: (LowRank(0),) * trim + (form(role, rank),) * kept for role in reader.shape.roles}
        layout = LayerLayout(reader.shape, dict(forms), base_channels, base=base or DENSE_BASE)
        return OutputPlan(source, dict.fromkeys(reader.moe_layers, layout), options.shard_size).nbytes

    every = min(reader.shape.hidden, reader.shape.intermediate)  # directions: nothing is lost
    largest, note = size(every, options.trim), None
    if options.ratio is not None:
        check_ratio(options, size(0), original, checkpoint.in_format, checkpoint.weight_bytes)
        output = round(original * (1 - options.ratio))
        if options.trim:
            output, note = min(output, largest), _trim_note(options, largest, original)
    else:
        output = size(options.rank or 0, options.trim)
    cost = factor_cost(source, options, gradients=gradients)
    layers, hidden = source.architecture.layers, reader.shape.hidden
    base_bytes = len(reader.shape.roles) * base_channels * hidden * reader.dtype.itemsize
    for_each = SpectrumFile(Path(), 0, reader.shape, options.share).nbytes + base_bytes
    if refine:  # the bases as they were
        for_each += base_bytes
    if refine or (gradients and options.links_outputs):  # what errors cost
        for_each += 4 * hidden**2
    backward = cost.backward_scratch(reader, at_once) if gradients else 0
    share = _share_of_numbers(output / original, options)
    refined = refine_together(moe_size(reader), refine, TOKENS_PER_STEP, share) if refine else None
    forward = cost.forward_scratch(reader, at_once) + encoded_bytes(reader, output, options.shard_size)
    forward += RoutedTokens.nbytes(cost.samples, cost.length, hidden) if refine else 0
    phases = factor_phases(
        cost if options.calibration or gradients else None,
        moe_size(reader, at_once),
        output,
        gradients=gradients,
        linked=options.links_outputs,
        refined=refined,
    )
    return Plan(
        stage=stage,
        input_bytes=checkpoint.weight_bytes,
        output_bytes=output,
        scratch_bytes=max(backward, forward) + len(reader.moe_layers) * for_each + included_bytes(source),
        memory_bytes=memory.nbytes(at_once),
        phases=with_codes_beside(phases, cost, included_shapes(source)) if gradients else phases,
        details={
            "original_bytes": original,
            "smallest_possible_bytes": size(0),
            "layers": layers,
            "moe_layers": len(reader.moe_layers),
            "experts": reader.shape.experts,
            "experts_at_once": at_once,
            "calibration_tokens": options.samples * options.sequence_length,
            **({"refining_steps": refine} if refine else {}),
            **({} if note is None else {"note": note}),
        },
    )
