"""Planning a stage without running it (`--dry-run`): output bytes, memory, disk and hours, from headers alone."""

from dataclasses import replace
from pathlib import Path

from moetool.calibration.mixing import ONE_KIND
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.job.blueprint import open_for_planning
from moetool.job.checks import check_job, identity, output_directory
from moetool.job.conditions import Conditions
from moetool.job.including import included_in_words
from moetool.job.inputs import Inputs
from moetool.job.job import Input, Source
from moetool.job.metering import inputs_read
from moetool.job.options import RunOptions
from moetool.job.own_text import planned
from moetool.job.plan import Plan
from moetool.job.records import check_records
from moetool.job.result import Json
from moetool.job.stage import AnyStage
from moetool.job.workspace import check_place, is_finished, noted_conditions, noted_inputs
from moetool.job.writing import original_bytes, original_size


def plan_stage(kind: type[AnyStage], source: str | Path | Checkpoint, options: RunOptions) -> Plan:
    """Plan a stage from file headers, or from `config.json` alone if there are no weights; from those of a checkpoint
    that `open_for_planning` has opened if it is one.

    Nothing is written and no weights are downloaded.
    """
    return _told(_for_planning(kind, source, options))


def dry_run(
    kind: type[AnyStage],
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    *,
    resume: bool,
    overwrite: bool = False,
) -> tuple[Plan, Plan | None]:
    """Plan a stage, and once more in bfloat16 where that is a choice, after the checks of `run_stage` that take no
    longer than a second.

    Raises:
        MoetoolError: as `run_stage`, but for what is found in weights and on the way, and for memory and disk.
    """
    directory = output_directory(output)
    options = options.keeping(kept_experts(directory) if resume and not overwrite else None)
    stage = _for_planning(kind, source, options)
    plan = _told(stage)
    if not stage.source.checkpoint.is_imagined:  # else the job is for where the weights are, and maybe the text
        check_job(stage, directory)
    check_place(directory, lambda: identity(stage), stage.source.checkpoint, resume=resume, overwrite=overwrite)
    if resume:
        noted = inputs_read(directory) if is_finished(directory) else noted_inputs(directory)
        Inputs(files=stage.files()).check(noted)
    quicker = stage.in_bfloat16()
    return plan, None if quicker is None else planned(kind(stage.source, quicker))


def _for_planning(kind: type[AnyStage], source: str | Path | Checkpoint, options: RunOptions) -> AnyStage:
    opened = kind.opened(source if isinstance(source, Checkpoint) else open_for_planning(source))
    check_records(opened)
    return kind(opened, options)


def _told(stage: AnyStage) -> Plan:
    plan = planned(stage)
    text = getattr(stage.options, "calibration", None)
    more: dict[str, Json] = {} if text is None else {"calibration": text}
    windows = stage.due_windows
    if windows is not None:
        more["texts"] = str(windows)
    if isinstance(stage.source, Source) and stage.source.included:
        more["beside_experts"] = included_in_words(stage.source)
    own, large = plan.details.get("note"), too_large(stage, plan)
    one_kind = ONE_KIND if windows is not None and windows.is_of_one_kind else None
    if notes := [str(note) for note in (own, large, one_kind) if note is not None]:
        more["note"] = " ".join(notes)
    if stage.source.checkpoint.is_imagined:
        more["headers"] = "config.json alone"
    if stage.source.checkpoint.stored_as is not None:
        more |= _stored(stage.source)
    if (gguf := stage.gguf_bytes) is not None:
        more["gguf_bytes"] = gguf
    return replace(plan, details={**plan.details, **more})


def too_large(stage: AnyStage, plan: Plan) -> str | None:
    """A sentence where a compression makes nothing smaller, as of a model that is published in as few bits."""
    if stage.method_of != "compress" or not isinstance(stage.source, Source):
        return None
    original, given = original_bytes(stage.source), stage.source.checkpoint.given_bytes
    if plan.output_bytes < min(original, given):
        return None
    size = original_size(stage.source) if original <= given else f"{format_bytes(given)} in GGUF"
    return (
        f"The result takes {format_bytes(plan.output_bytes)}, and what it is made from {size}: nothing is saved. "
        "Give a smaller --size or fewer --bits."
    )


def _stored(source: Input) -> dict[str, Json]:
    """What a plan says of an input that another tool has quantized."""
    checkpoint, dtype = source.checkpoint, str(source.dtype).removeprefix("torch.")
    experts = source.experts.names if isinstance(source, Source) else ()
    what = "matrices beside the experts" if experts else "matrices that are passed on"
    if isinstance(source, Source) and source.keeps_stored:
        told = f"{checkpoint.stored_as}; {what} stay as they are stored"
        return {"stored_as": told, "decoded_bytes": checkpoint.shown_bytes}
    said = f"{checkpoint.stored_as}; {what} are written in {dtype}, {format_bytes(checkpoint.growth(experts))} more"
    return {"stored_as": said, "decoded_bytes": checkpoint.shown_bytes}


def kept_experts(directory: Path) -> int | None:
    """How many experts are in memory together in the run that is unfinished in a directory, if there is one."""
    noted = Conditions.noted(noted_conditions(directory))
    return None if noted is None else noted.experts_at_once
