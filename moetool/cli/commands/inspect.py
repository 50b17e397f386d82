"""Command line of `moetool inspect`: prints what a checkpoint holds, by layer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moetool.architectures import ROLES, Role
from moetool.architectures.dense import is_encoder
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes, format_change
from moetool.cli import next_step
from moetool.cli.choosing import CHOICES
from moetool.cli.display import AsJson, LogJson, print_fields, print_json, print_table, watched
from moetool.cli.generate import build_options, builder
from moetool.errors import MoetoolError, UsageError
from moetool.job.blueprint import open_for_planning
from moetool.measure.analysis import AnalysisOptions, analyse
from moetool.measure.inspected import (
    Analysis,
    DenseInspection,
    Inspection,
    MaskedLayer,
    Masks,
    SharedBase,
    Similarity,
    StoredLayers,
    densities,
)
from moetool.measure.inspection import inspect_model
from moetool.measure.plots import pictured, plot_analysis
from moetool.representations import describe, parse_representation
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT
from moetool.stages import stages

# Commands that make something else of a dense model, and a stage that says whether it can be opened.
_CONVERTING = {
    **{name: CHOICES[name][1] for name in ("upcycle", "moefy")},
    "tune": "tune",
    "export --format gguf": "gguf",
}


@builder(AnalysisOptions)
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint, compressed or not.", show_default=False)],
    analysis: Annotated[
        bool,
        typer.Option(
            "--analysis",
            help="Also measure likeness of experts, rank of deltas, sensitivity of layers.",
        ),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the analysis: FILE.png, .svg or .pdf.")] = None,
    json: AsJson = False,
    log_json: LogJson = None,
    **typed: object,
) -> None:
    """Run `moetool inspect` on a checkpoint."""
    options = build_options(AnalysisOptions, typed)
    if options.model_fields_set and not analysis:
        raise UsageError("--layers limits --analysis: give both.")
    if plot is not None and not analysis:
        raise UsageError("--plot draws what --analysis finds: give both.")
    if log_json is not None and not analysis:
        raise UsageError("--log-json tells how far --analysis is: give both.")
    checkpoint = open_for_planning(model)
    result = inspect_model(model, checkpoint)
    if isinstance(result, DenseInspection):
        if analysis:
            raise UsageError(f"--analysis is of experts, and {model} is a dense model. Leave it out.")
        result = replace(result, commands=_taken_by(checkpoint))
    elif analysis:
        with watched(log_json, "inspect", [model], options.model_dump(mode="json")) as (display, ended):
            found = pictured(plot, lambda: analyse(model, options, display), plot_analysis)
            result = replace(result, analysis=found)
            ended(result)
    if json:
        print_json(result.to_json())
        return
    _print(result)
    if isinstance(result, DenseInspection):
        taken = "upcycle" in result.commands
        made = ("upcycle", model, next_step.here(model, "moe"), "--dry-run") if taken else ("report", model)
        next_step.tell(next_step.line(*made))
        return
    if result.analysis is not None:
        _print_analysis(result.analysis)
    files = result.files
    if files.recipe is not None or files.ratio or files.gguf_bytes is not None:
        next_step.tell(next_step.line("report", model))
    else:
        smaller = next_step.here(model, "small")
        next_step.tell(next_step.line("compress", model, smaller, "--ratio", "75%", "--dry-run"))


def _taken_by(checkpoint: Checkpoint) -> list[str]:
    """List the commands that take a dense model: of those that convert, which do is tried by its headers."""
    known, found = stages(), list[str]()
    for command, stage in _CONVERTING.items():
        try:
            known[stage].opened(checkpoint)
        except MoetoolError:
            continue
        found.append(command)
    decodes = found and not is_encoder(checkpoint.config)
    return [*found, *(("eval", "bench", "generate", "chat", "serve") if decodes else ()), "report", "verify"]


def _print(result: Inspection | DenseInspection) -> None:
    counts, stored = result.parameters, result.files
    files = "in 1 file" if stored.files == 1 else f"in {stored.files} files"
    if stored.gguf_bytes is not None:
        files = f"as the checkpoint that this GGUF file of {format_bytes(stored.gguf_bytes)} is read as"
    elif not stored.files:
        files = "by config.json alone: there are no weight files"
    change = f", {format_change(stored.ratio)}" if stored.ratio else ""
    by_another = "" if stored.stored_as is None else f", stored in {stored.stored_as}"
    layers = [] if result.layers is None else [("layers", str(result.layers))]
    widths = {"hidden": result.hidden_size, "intermediate": result.intermediate_size}
    width = ", ".join(f"{name} {size}" for name, size in widths.items() if size is not None)
    held = ("bytes", f"{format_bytes(stored.bytes)} {files}{by_another}{change}")
    if isinstance(result, DenseInspection):
        fields = [("model", result.path), ("architecture", f"{result.architecture}, dense"), *layers]
        fields += [("width", f"{width}, {result.dtype}" if width else result.dtype)]
        fields += [("parameters", f"{counts.total:,}"), held, ("taken by", ", ".join(result.commands))]
        print_fields(fields)
        return
    in_files = f" ({counts.stored:,} in the files)" if counts.stored != counts.total else ""
    each = f", {8 * stored.bytes / counts.total:.2f} bits each on average" if stored.files else ""
    beside = []
    if (found := result.beside) is not None:
        bits = " and ".join(map(str, found.bits))
        said = f"{found.modules} projections and embeddings in {bits} bits, {format_bytes(found.bytes)} of these"
        beside = [("beside experts", said)]
    density = []
    if isinstance(masks := result.moe, Masks):
        said = f"{masks.mean_density:.1%} of the channels per expert, {masks.union_density:.1%} for any of them"
        density = [("density", said)]
    print_fields(
        [
            ("model", result.path),
            ("architecture", f"{result.architecture} ({result.router_rule})"),
            ("layers", f"{result.layers}, of which {result.moe_layers} with experts"),
            ("experts", f"{result.experts}, top-{result.top_k}, {result.dtype}"),
            ("width", width),
            ("parameters", f"{counts.total:,} total{in_files}, {counts.active:,} active{each}"),
            held,
            *beside,
            *density,
        ]
    )
    if isinstance(result.moe, Masks):
        _print_masks(result.moe)
    elif any(layer.base is not None for layer in result.moe.moe):
        _print_layers(result.moe)


def _print_layers(layers: StoredLayers) -> None:
    """Print a table of how compressed experts are stored, by layer."""
    roles = [role for role in ROLES if any(layer.base and role in layer.base.weights for layer in layers.moe)]
    rows = [
        (str(layer.layer), *(_weights(layer.base, role) for role in roles), _channels(layer.base))
        for layer in layers.moe
    ]
    print_table(("layer", *roles, "base channels"), rows, title="How experts are stored: number of experts × form")
    if layers.depends_on_batch:
        print("(−n): so many more are skipped for every batch.")
        print(f"note: {BATCH_DEPENDENT}")


def _print_masks(masks: Masks) -> None:
    """Where experts landed, by layer and by type of linear layer, and what they have in common (SIMoE, Fig. 4, 5)."""
    for title, part in (("layer", 0), ("type", 1)):
        groups: dict[str, list[MaskedLayer]] = {}
        for site in masks.moe:
            groups.setdefault(site.place[part], []).append(site)
        rows = [(name, *(f"{density:.1%}" for density in densities(sites))) for name, sites in groups.items()]
        print_table((title, "per expert", "any expert"), rows)
    overlaps = [(str(expert), *(f"{value:.2f}" for value in row)) for expert, row in enumerate(masks.overlap)]
    header = ("expert", *(str(expert) for expert in range(len(overlaps))))
    print_table(header, overlaps, title="Overlap: share of an expert's channels that another has, too")


def _weights(base: SharedBase | None, role: Role) -> str:
    """`rank 12 … 96, mean 40; 1 × dense` for a role's experts, or `5 × 2 bits; 3 × rank 5 … 23 in 3 bits`."""
    specs = "native" if base is None else base.weights[role]
    return specs if isinstance(specs, str) else describe(map(parse_representation, specs))


def _channels(base: SharedBase | None) -> str:
    if base is None:
        return "-"
    if not base.base_channels:
        return "no base"
    return f"{base.base_channels}" + (f" (−{base.dynamic_channels})" if base.dynamic_channels else "")


def _print_analysis(analysis: Analysis) -> None:
    present = list(analysis.layers[0].roles)
    roles = [(str(layer.layer), role, layer.roles[role]) for layer in analysis.layers for role in present]
    print_table(
        ("layer", "role", "experts", "factors V", "factors U"),
        [
            (layer, role, *(_similarity(similarity) for similarity in (entry.cka, entry.cka_v, entry.cka_u)))
            for layer, role, entry in roles
        ],
        title="Similarity: CKA between experts, mean (min … max)",
    )
    print_table(
        ("layer", "role", "of", *(f"{share} %" for share in analysis.shares)),
        [
            (layer, role, name, *_energies(energy, len(analysis.shares)))
            for layer, role, entry in roles
            for name, energy in (
                ("experts", entry.energy.experts),
                (f"{entry.base} base", entry.energy.base),
                ("deltas", entry.energy.delta),
            )
        ],
        title="Energy retained by the largest singular values, by their share",
    )
    print_table(
        ("layer", "sensitivity", *present, "tokens per expert"),
        [
            (
                str(layer.layer),
                _scientific(layer.sensitivity),
                *(_scientific(layer.roles[role].sensitivity) for role in present),
                _range(layer.token_share),
            )
            for layer in analysis.layers
        ],
        title="Sensitivity: cost of errors of the same relative size",
    )
    for note in analysis.notes:
        print(f"note: {note}")


def _similarity(similarity: Similarity | None) -> str:
    if similarity is None or similarity.mean is None:
        return "-"
    return f"{similarity.mean:.3f} ({similarity.min:.3f} … {similarity.max:.3f})"


def _energies(retained: Sequence[float] | None, count: int) -> list[str]:
    return ["-"] * count if retained is None else [f"{value:.3f}" for value in retained]


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _range(shares: Sequence[float] | None) -> str:
    return "-" if shares is None else f"{min(shares):.1%} … {max(shares):.1%}"
