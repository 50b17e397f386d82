"""Everything that a report says of a model, gathered: from files, and where that is wanted by measuring."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import yaml

from moetool.checkpoint.counting import numbers_in_files
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.manifest import Manifest, Origin, manifest_of, noted_in
from moetool.checkpoint.names import MANIFEST
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.results import Activations
from moetool.errors import InvalidInputError, UsageError, option_of
from moetool.format.families import architecture_of, is_opaque
from moetool.format.kinds import custom_module
from moetool.format.marker import moetool_entry
from moetool.job.blueprint import open_for_planning
from moetool.job.job import Source
from moetool.job.progress import SILENT, Progress
from moetool.job.records import read_statistics
from moetool.job.result import Json
from moetool.measure.analysis import AnalysisOptions, analyse
from moetool.measure.inspected import Inspection, MoELayer, StoredLayers
from moetool.measure.inspection import inspect_checkpoint
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.measure.results import Evaluation, RoutingResult
from moetool.measure.routing import RoutingOptions, routing
from moetool.report.options import ReportOptions
from moetool.report.recorded import RecordedResults, kept_runs, read_recorded, saved_evaluations, without_costs
from moetool.report.results import HowMade, MadeStep, MergedExperts, RareExpert, Report, TextCoverage, WeightBytes
from moetool.report.storing import bytes_by_kind, stored_experts
from moetool.stages import stages

ANALYSED = 8  # layers, unless some were named
RARE = 0.1  # of an even share
_CHOICE = {"export": "format"}  # by which option a command chooses among its stages, if not by `--method`


def gather(path: str, output: Path, options: ReportOptions, progress: Progress = SILENT) -> Report:
    """Gather the contents of a report: what a model's files record, and what `options` ask to measure.

    Args:
        path: a checkpoint.
        output: where the page will be.
        options: what to measure.
        progress: told where it is.

    Raises:
        UsageError: `--layers` without `--analysis`, or layers without experts.
        InvalidInputError: model, texts or recorded results cannot be used.
        ResourceError, VerificationError: as `eval` and `routing` raise them.
    """
    if options.layers is not None and not options.analysis:
        raise UsageError("--layers limits --analysis: give both.")
    recorded = read_recorded(options.results) if options.results else None
    checkpoint = open_for_planning(path)
    against = None if options.against is None else open_for_planning(options.against)
    experts = _experts(checkpoint)
    noted = noted_in(checkpoint)
    manifest = manifest_of(noted)
    inspection = inspect_checkpoint(path) if _is_inspected(checkpoint.config) else None
    jobs = kept_runs(noted, manifest, recorded)
    notes = [] if (untold := without_costs(noted, manifest)) is None else [untold]
    if manifest is None and moetool_entry(checkpoint.config) is not None:
        notes.append(f"{MANIFEST} is missing: nothing says how this model was made.")
    saved, unread = saved_evaluations(checkpoint)
    notes += unread
    if options.analysis and experts is None:
        notes.append("There is no analysis: this model has no experts that are whole networks.")
    elif options.analysis and inspection is not None:
        chosen = _analysed(experts.experts.moe_layers) if experts and options.layers is None else options.layers
        if experts and chosen and len(chosen) < len(experts.experts.moe_layers):
            notes.append(f"Analysed are layers {', '.join(map(str, chosen))}; --layers chooses others.")
        inspection = replace(inspection, analysis=analyse(path, AnalysisOptions(layers=chosen), progress))
    evaluation, routed = _run(path, options, progress, has_experts=inspection is not None)
    return Report(
        model=path,
        output=str(output),
        model_type=str(checkpoint.config.get("model_type")),
        bytes=checkpoint.weight_bytes,
        files=len(checkpoint.weight_files),
        numbers=numbers_in_files(checkpoint),
        weights=_weights(checkpoint, experts, against),
        against=options.against,
        against_bytes=None if against is None else against.weight_bytes,
        gguf_bytes=checkpoint.gguf_bytes,
        against_gguf_bytes=None if against is None else against.gguf_bytes,
        made=None if manifest is None else _made(manifest),
        inspection=inspection,
        stored=None if experts is None or inspection is None else stored_experts(experts.experts, inspection.moe),
        merged=tuple(_merged(inspection)),
        coverage=(*_calibrated(experts, inspection), *_reached(inspection, routed, recorded)),
        routing=routed,
        evaluation=evaluation,
        saved=tuple(found for found in saved if recorded is None or found not in recorded.evaluations),
        activations=None if manifest is None else _activations(manifest),
        jobs=jobs,
        recorded=recorded,
        notes=tuple(notes),
    )


def _is_inspected(config: Mapping[str, object]) -> bool:
    """Whether a model has experts that moetool knows: others are reported without them."""
    if moetool_entry(config) is None and config.get("quantization_config") is not None:
        return False
    if custom_module(config) is not None:
        return True
    try:
        architecture_of(config)
    except InvalidInputError:
        return False
    return True


def _experts(checkpoint: Checkpoint) -> Source | None:
    """The model with its experts, if they are whole networks."""
    config = checkpoint.config
    return Source.of(checkpoint) if _is_inspected(config) and not is_opaque(config) else None


def _weights(checkpoint: Checkpoint, experts: Source | None, against: Checkpoint | None) -> list[WeightBytes]:
    now = bytes_by_kind(checkpoint, _reader(experts))
    before = {} if against is None else bytes_by_kind(against, _reader(_experts(against)))
    return [
        WeightBytes(kind=kind, bytes=now.get(kind, 0), before=None if against is None else before.get(kind, 0))
        for kind in {**now, **before}
    ]


def _reader(source: Source | None) -> ExpertReader | None:
    return None if source is None else source.experts


def _made(manifest: Manifest) -> HowMade:
    again = remaking(manifest.recipe, manifest.source)
    calibration = manifest.statistics.get("calibration")
    return HowMade(
        steps=list(_steps(manifest.origins[::-1])),
        command=again and again.command,
        preset=again and again.preset,
        options=cast(Mapping[str, Json], {key: value for key, value in manifest.recipe.items() if key != "stage"}),
        versions={"moetool": manifest.moetool_version, **manifest.versions},
        calibration=cast(Mapping[str, Json], calibration) if isinstance(calibration, dict) else None,
    )


def _steps(origins: Sequence[Origin]) -> Iterator[MadeStep]:
    """Steps that made the model, first to last, each with the command that repeats it."""
    for step, made in zip(origins, [*(origin.source for origin in origins[1:]), None], strict=True):
        known = made is not None and step.chosen is not None
        again = remaking({"stage": step.stage, **(step.chosen or {})}, step.source, made or "") if known else None
        command = again.command if again is not None and again.preset is None else None
        yield MadeStep(
            stage=step.stage, source=step.source, source_fingerprint=step.source_fingerprint, command=command
        )


def _analysed(layers: Sequence[int]) -> tuple[int, ...]:
    """At most `ANALYSED` of the layers, evenly spread, first and last among them."""
    if len(layers) <= ANALYSED:
        return tuple(layers)
    return tuple(layers[round(step * (len(layers) - 1) / (ANALYSED - 1))] for step in range(ANALYSED))


def _run(
    path: str, options: ReportOptions, progress: Progress, *, has_experts: bool
) -> tuple[Evaluation | None, RoutingResult | None]:
    """Evaluation and routing of the model, both on the same windows of `--data`."""
    if options.data is None:
        return None, None
    shared = ("sequence_length", "bos", "device", "compute_dtype")
    said = {name: getattr(options, name) for name in shared if name in options.model_fields_set}
    said |= {"data": options.data, "windows": options.windows}
    evaluation = perplexity(path, EvaluationOptions(**said, against=options.against), progress)
    return evaluation, routing(path, RoutingOptions(**said), progress) if has_experts else None


def _layers(inspection: Inspection | None) -> list[MoELayer]:
    return list(inspection.moe.moe) if inspection and isinstance(inspection.moe, StoredLayers) else []


def _merged(inspection: Inspection | None) -> list[MergedExperts]:
    told = [(layer.layer, layer.said.get("made_of")) for layer in _layers(inspection) if layer.said]
    return [
        MergedExperts(layer=layer, made_of=cast(Sequence[Sequence[int]], made_of))
        for layer, made_of in told
        if isinstance(made_of, list)
    ]


def _calibrated(experts: Source | None, inspection: Inspection | None) -> Iterator[TextCoverage]:
    """What the calibration text reached, as statistics or else the manifest have it."""
    if experts is None or inspection is None:
        return
    tokens = {layer: measured.tokens.tolist() for layer, measured in read_statistics(experts).items()}
    for layer in _layers(inspection):
        said: Mapping[str, Json] = layer.said or {}
        found = said.get("tokens")
        if layer.layer not in tokens and isinstance(found, list) and "made_of" not in said:
            tokens[layer.layer] = cast(list[int], found)
    reached = {layer: counts for layer, counts in sorted(tokens.items()) if sum(counts)}
    if reached:
        shares = [[count / sum(counts) for count in counts] for counts in reached.values()]
        yield _coverage("calibration", list(reached), shares)


def _reached(
    inspection: Inspection | None, routed: RoutingResult | None, recorded: RecordedResults | None
) -> Iterator[TextCoverage]:
    for told in (*([] if routed is None else [routed]), *(recorded.routings if recorded else ())):
        for text in told.data:
            yield _coverage(text.name, _numbers(inspection, len(text.shares)), text.shares)


def _numbers(inspection: Inspection | None, count: int) -> list[int]:
    """Indices of the layers that shares of `count` layers are of."""
    own = [layer.layer for layer in _layers(inspection)]
    return own if len(own) == count else list(range(count))


def _coverage(text: str, layers: Sequence[int], shares: Sequence[Sequence[float]]) -> TextCoverage:
    rare = [
        RareExpert(layer=layer, expert=expert, share=round(share, 6))
        for layer, row in zip(layers, shares, strict=True)
        for expert, share in enumerate(row)
        if share < RARE / len(row)
    ]
    rounded = [[round(share, 6) for share in row] for row in shares]
    return TextCoverage(
        text=text, layers=layers, shares=rounded, rare=rare, unreached=sum(found.share == 0 for found in rare)
    )


def _activations(manifest: Manifest) -> dict[int, Activations] | None:
    """Activation statistics by layer that moefying wrote to the manifest."""
    told = {int(layer): said for layer, said in manifest.layers.items() if "soft_sparsity" in said}
    try:
        return {layer: Activations(**cast(dict[str, float], said)) for layer, said in told.items()} or None
    except TypeError as error:
        raise InvalidInputError(
            f"{MANIFEST} says of layer {next(iter(told))} what this moetool cannot read."
        ) from error


class Remaking(NamedTuple):
    """A command line, and the preset that it reads, if it needs one."""

    command: str
    preset: str | None


def remaking(recipe: Mapping[str, object], source: str, output: str = "OUTPUT") -> Remaking | None:
    """Command and preset that repeat the stage of a manifest, without options that equal today's defaults.

    Args:
        recipe: stage and options.
        source: what it was made from, as the user named it.
        output: where to.

    Returns:
        `None` if this moetool has no such stage, or no longer has one of its options.
    """
    kind = stages().get(str(recipe.get("stage")))
    given = {name: value for name, value in recipe.items() if name != "stage"}
    if kind is None or not given.keys() <= kind.options_type.model_fields.keys():
        return None
    fields = kind.options_type.model_fields
    said = {
        name: value
        for name, value in given.items()
        if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
    }
    command = kind.method_of or kind.name
    words = ["moetool", command, source, output]
    if kind.method_of is not None:
        words += [f"--{_CHOICE.get(command, 'method')}", kind.name]
    if any(isinstance(value, list | dict) and value for value in said.values()):
        choice = {} if kind.method_of is None else {"method": kind.name}
        text = yaml.safe_dump({"command": command, **choice, "options": said}, sort_keys=False, allow_unicode=True)
        return Remaking(shlex.join([*words, "--preset", "preset.yaml"]), text)
    for name, value in said.items():
        words += _option(name, value)
    return Remaking(shlex.join(words), None)


def _option(name: str, value: object) -> list[str]:
    """As words; nothing where nothing says what `null` and an empty list say."""
    if isinstance(value, bool):
        return [option_of(name if value else f"no_{name}")]
    return [] if value is None or value == [] else [option_of(name), str(value)]
