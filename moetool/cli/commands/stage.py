"""Command lines of all stages, such as `compress` and `upcycle`, which turn one checkpoint into another."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool.architectures.dense import is_encoder
from moetool.checkpoint.names import CONFIG
from moetool.checkpoint.reader import read_config
from moetool.checkpoint.sizes import format_bytes, format_change
from moetool.cli import next_step
from moetool.cli.choosing import CHOICES, chosen, in_order, summary_of
from moetool.cli.command import HintingCommand
from moetool.cli.display import Display, print_fields, print_json
from moetool.cli.events import LOG_HELP, EventLog, logged, started
from moetool.cli.generate import build_options, make_command
from moetool.cli.presets import preset_options
from moetool.compress.results import MixedResult, RankedResult
from moetool.convert.results import Activations, ConversionResult, Proof
from moetool.errors import UsageError
from moetool.job.forecast import format_seconds
from moetool.job.processes import is_first_process
from moetool.job.result import Json, LoadedLayer, Result, Sizes
from moetool.measure.results import shown_kl
from moetool.reduce.results import DroppedResult, ReducedResult
from moetool.repair.results import RepairedResult, RepairResult
from moetool.upcycle.results import AddedResult

if TYPE_CHECKING:
    from moetool.job.estimate import Estimate

_LABELS = {  # of a plan's fields, where their names alone do not say it
    "scratch_bytes": "temporary files",
    "disk_bytes": "disk in all",
    "bits_per_number": "bits per expert weight",
}
_FOR_ENGINES = ("gguf", "compressed-tensors")  # formats that code a compressed model's experts anew
_WORTH = 0.75  # of the time: a faster way that is said to be there
_REPAIR_HELP = (
    "Afterwards train the result for N steps to predict what INPUT predicts, at the same size (see `moetool repair`)."
)
_PRESET_HELP = "Take options from a preset: a name of `moetool list presets`, FILE.yaml or FILE.yaml:VARIANT."
_SAME_INPUT_HELP = "With --resume: you vouch that input files that were written again since are the same."


_job_option = partial(typer.Option, rich_help_panel="Job")
_REPAIR = inspect.Parameter(
    "repair",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[int | None, typer.Option("--repair", min=1, help=_REPAIR_HELP, show_default=False)],
)


def build(name: str, arguments: list[str]) -> HintingCommand:
    """The command for one stage; `compress --method X` takes the options of X."""
    from moetool.stages import stages

    words = tuple(arguments)  # the parser empties the list
    more: list[inspect.Parameter] = []
    own = name
    methods = [stage for stage, kind in stages().items() if kind.method_of == name]
    if methods:
        methods = in_order(name, methods)
        choice, default = CHOICES[name]
        own = chosen(name, words, methods)
        option = typer.Option(help=f"One of: {', '.join(methods)}. [default: {default}]", show_default=False)
        more.append(
            inspect.Parameter(choice, inspect.Parameter.KEYWORD_ONLY, default=own, annotation=Annotated[str, option])
        )
    stage = stages()[own]
    if repairs := name in ("compress", "moefy"):
        more.append(_REPAIR)

    def command(
        input: Annotated[
            str, typer.Argument(help="A checkpoint: a directory, a .gguf file or a hub id.", show_default=False)
        ],
        output: Annotated[Path, typer.Argument(help="Where to write; new or empty.", show_default=False)],
        preset: Annotated[str | None, _job_option(help=_PRESET_HELP)] = None,
        dry_run: Annotated[
            bool, _job_option("--dry-run", help="Only print what size, memory and time it takes.")
        ] = False,
        resume: Annotated[bool, _job_option("--resume", help="Continue an interrupted run.")] = False,
        same_input: Annotated[bool, _job_option("--same-input", help=_SAME_INPUT_HELP)] = False,
        overwrite: Annotated[bool, _job_option("--overwrite", help="Delete an earlier result.")] = False,
        json: Annotated[bool, _job_option("--json", help="Print the result as one JSON object.")] = False,
        log_json: Annotated[Path | None, _job_option("--log-json", help=LOG_HELP)] = None,
        **typed: object,
    ) -> None:
        from moetool.job.estimate import estimate
        from moetool.job.ranks import telling

        if dry_run and not is_first_process():
            return
        if methods:
            typed.pop(choice)
        planned, plan_stage, run_stage = _jobs(typed.pop("repair") if repairs else None)
        with nullcontext() if dry_run else telling(has_trainer=stage.has_trainer):
            if same_input and not resume:
                raise UsageError("--same-input vouches for the input of a run that is gone on with: add --resume.")
            given = preset_options(preset, name, own if methods else None)
            options = build_options(stage.options_type, typed, given)
            events = None if log_json is None or dry_run or not is_first_process() else EventLog(log_json, output)
        if dry_run:
            plan, in_bf16 = planned(stage, input, output, options, resume=resume, overwrite=overwrite)
            told = estimate(plan, options, output)
            if json:
                print_json({**plan.to_json(), **told.to_json()})
            else:
                quicker = None if in_bf16 is None else (estimate(in_bf16, options, output), stage.bfloat16_option)
                _print_plan(plan.to_json(), told, quicker)
            if (problem := plan.shortage(output, memory=options.memory, disk=options.disk)) is not None:
                print(f"note: it would be refused here and now. {problem}", file=sys.stderr)
            elif not json:
                next_step.tell(next_step.without_dry_run(name, words))
            return
        if not is_first_process():
            run_stage(stage, input, output, options, resume=resume, overwrite=overwrite, same_input=same_input)
            return
        with logged(events) as ended:
            if events is not None:
                with telling(has_trainer=stage.has_trainer):
                    plan = plan_stage(stage, input, options)
                job: dict[str, Json] = {"command": name, "stage": own, "input": input, "output": str(output)}
                started(events, {**job, "resume": resume}, options.model_dump(mode="json"), plan=plan.to_json())
            progress = Display(events)
            result = run_stage(
                stage,
                input,
                output,
                options,
                resume=resume,
                overwrite=overwrite,
                progress=progress,
                same_input=same_input,
            )
            ended(result)
        if json:
            print_json(result.to_json())
            return
        _print_result(result)
        next_step.tell(next_step.after_stage(name, result, options, trains=not _is_encoder(result.output)))

    form = own if methods else ""
    summary = summary_of(name, words, own, stage.summary) if methods else None
    return make_command(name, command, stage.options_type, *more, form=form, summary=summary)


def _jobs(repair: object) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The functions that plan a job with its checks, plan it and run it: of the stage alone, or with so many steps of
    `repair` after it."""
    if not isinstance(repair, int):
        from moetool.job.execute import dry_run, plan_stage, run_stage

        return dry_run, plan_stage, run_stage
    from moetool.repair.chain import dry_run_repaired, plan_repaired, run_repaired

    return (
        partial(dry_run_repaired, steps=repair),
        partial(plan_repaired, steps=repair),
        partial(run_repaired, steps=repair),
    )


def _is_encoder(output: str) -> bool:
    path = Path(output)
    return (path / CONFIG).is_file() and is_encoder(read_config(path)[1])


def _print_plan(plan: Mapping[str, Json], told: "Estimate", in_bf16: "tuple[Estimate, str] | None") -> None:
    """What a job will cost; beside that its time `in_bf16`, with the option for it, where that is worth it."""

    def show(name: str, value: Json) -> str:
        if name == "calibration" and isinstance(texts, str):
            return texts
        if isinstance(value, list):
            return _listed(value)
        if not isinstance(value, int):
            return str(value)
        original = plan.get("original_bytes")
        change = ""
        if name == "output_bytes" and isinstance(original, int):
            than = " than what the file is read as" if "gguf_bytes" in plan else ""
            change = f" ({format_change(1 - value / original)}{than})"
        if name == "gguf_bytes":
            change = ": input and original are what the file is read as"
        return format_bytes(value) + change if name.endswith("bytes") else f"{value:,}"

    texts = plan.get("texts")
    said = {"texts", "added_as_published"}  # in the lines of `calibration` and of added parameters
    if plan.get("original_bytes") == plan["input_bytes"]:
        said.add("original_bytes")
    fields = [
        (_LABELS.get(name, name.removesuffix("_bytes").replace("_", " ")), show(name, value))
        for name, value in plan.items()
        if name not in said
    ]
    if told.seconds is None:
        fields.append(("time", f"unknown: {told.unknown}"))
    else:
        parts = ", ".join(f"{phase.name} {format_seconds(phase.seconds)}" for phase in told.phases)
        fields.append(("time", f"about {format_seconds(told.seconds)} ({parts})"))
        if in_bf16 is not None and (quicker := in_bf16[0].seconds) is not None and quicker < _WORTH * told.seconds:
            fields.append(("in bfloat16", f"about {format_seconds(quicker)} with {in_bf16[1]}"))
    print_fields(fields)
    print("Nothing was written (--dry-run).")


def _listed(values: Sequence[object]) -> str:
    """Values with commas; equal ones that follow each other are said once, with their number."""
    groups = [(value, len(list(group))) for value, group in groupby(values)]
    names = [("not recorded" if value is None else str(value), count) for value, count in groups]
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in names)


def _other_experts(told: AddedResult | DroppedResult) -> list[tuple[str, str]]:
    """Which experts a model has after one was added, or some were dropped."""
    if isinstance(told, AddedResult):
        said = f"{told.experts}, {told.top_k} per token; number {told.added} is new"
    else:
        said = f"{told.experts_left} left, {told.top_k} per token; dropped: {_listed(told.dropped)}"
    fields = [("experts", said)]
    return [*fields, ("made of", _listed(told.sources))] if any(told.sources) else fields


def _conversion(told: ConversionResult) -> list[tuple[str, str]]:
    fields = [] if told.target is None else [("family", told.target)]
    fields.append(("parameters", f"{told.parameters.total:,}, of which {told.parameters.active:,} per token"))
    if told.proof is not None:
        fields += _proof(told.proof)
    if told.activations is not None:
        fields += _activations(told.activations)
    return fields


def _proof(proof: Proof) -> list[tuple[str, str]]:
    which = "with all experts " if proof.with_all_experts else ""
    verdict = "" if proof.preserves else " (the method changes the model)"
    error = f"{proof.relative_logit_error:.1e} of their size on {proof.tokens} real tokens"
    logits = f"{which}differ from the dense model's by {error}{verdict}"
    fields = [("logits", logits)]
    if (losses := proof.losses) is not None:
        kept = f"{losses.loss_mixture:.4f} nats"
        if proof.loss_kept is not None:
            kept = f"{proof.loss_kept:.4f} nats with the experts kept"
        fields.append(("loss", f"{losses.loss_dense:.4f} (dense) → {kept}"))
    if (routing := proof.routing) is not None:
        least, largest = routing.least_expert_share, routing.largest_expert_share
        entropy = f"router entropy {routing.router_entropy:.2f} nats"
        fields.append(("routing", f"each expert gets {least:.1%} to {largest:.1%} of the tokens; {entropy}"))
    return fields


def _activations(found: Activations) -> list[tuple[str, str]]:
    near, centred = found.soft_sparsity, found.soft_sparsity_centred
    fields = [("activations", f"{near:.1%} near zero, {centred:.1%} near their mean")]
    if found.captured is not None:
        text = f"those chosen hold {found.captured:.1%} of the activations' energy"
        if found.captured_by_oracle is not None:
            text += f" (the best possible choice: {found.captured_by_oracle:.1%}; "
            text += f"{found.selector_accuracy:.1%} of its experts were chosen)"
        fields.append(("experts", text))
    return fields


def _size(sizes: Sizes) -> str:
    """Both sizes, and the original's, too, where the input had been compressed already and is not what counts."""
    before, after = format_bytes(sizes.bytes_before), format_bytes(sizes.bytes_after)
    change = "" if sizes.achieved_ratio is None else format_change(sizes.achieved_ratio)
    if sizes.gguf_bytes is not None:
        than = f" ({change} than {before})" if change else ""
        return f"{format_bytes(sizes.gguf_bytes)} in GGUF, read as {before} → {after}{than}"
    if sizes.bytes_input is not None:
        than = f"{change} than the {before} of" if sizes.bytes_after != sizes.bytes_before else "as large as"
        return f"{format_bytes(sizes.bytes_input)} → {after} ({than} the original model)"
    return f"{before} → {after}" + (f" ({change})" if change else "")


def _loaded(loaded: LoadedLayer, stage: str) -> str:
    if (error := loaded.relative_error) is None:
        return "by transformers: every tensor has the name and shape that it expects"
    if stage == "gguf":
        worst = f"rounding changes its matrices by {error:.1%} at most (‖Δ‖ / ‖matrix‖)"
        return f"layer {loaded.layer} of the file, read back, is the source's; {worst}"
    within = f"within {error:.1e} of their size" if error else "exactly"
    return f"by transformers: outputs of layer {loaded.layer} are those of the stored weights, {within}"


def _repaired(told: RepairResult) -> list[tuple[str, str]]:
    if told.kept_step == 0:
        said = "No step made a held-out text better and none worse: the weights are those of the input."
        return [("note", said)]
    changes = [
        f"{1000 * shown_kl(before):.4g} → {1000 * shown_kl(told.kl_after[name]):.4g} on {name}"
        for name, before in told.kl_before.items()
    ]
    return [("held out", f"KL divergence from the original {', '.join(changes)}, in millinats (step {told.kept_step})")]


def _print_result(result: Result) -> None:
    fields = [("output", result.output)]
    if (sizes := result.sizes) is not None:
        fields.append(("size", _size(sizes)))
    details = result.details
    made = details.before_repair.details if isinstance(details, RepairedResult) else details
    if isinstance(details, ConversionResult):
        fields += _conversion(details)
    if isinstance(details, RepairResult):
        fields += _repaired(details)
    if isinstance(made, AddedResult | DroppedResult):
        fields += _other_experts(made)
    if isinstance(made, RankedResult | ReducedResult | MixedResult | AddedResult | ConversionResult):
        fields += [("note", note) for note in made.notes]
    if result.stage in _FOR_ENGINES and sizes is not None and 0 < (sizes.bytes_input or 0) < sizes.bytes_after:
        fields.append(("note", "Larger than its input: exported from the original, as many bytes lose less."))
    if result.status == "finished":
        print_fields([*fields, ("status", "finished already; nothing was done")])
        return
    fields.append(("verified", "headers, shapes and digests; all numbers are finite"))
    if result.loaded is not None:
        fields.append(("loaded", _loaded(result.loaded, result.stage)))
    fields.append(("time", f"{result.seconds:.1f} s"))
    fields.append(("peak memory", format_bytes(result.peak_memory_bytes)))
    print_fields(fields)
