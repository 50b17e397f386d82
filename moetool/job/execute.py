"""Execution of a stage: checks, plan, work, verification and proof of its output."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from moetool.calibration.mixing import ONE_KIND
from moetool.checkpoint.digests import check_files
from moetool.checkpoint.files import storage_problem
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import MoetoolError, UsageError, VerificationError
from moetool.job.blueprint import open_for_planning
from moetool.job.books import Books, RankBooks
from moetool.job.calibrated import calibration_windows
from moetool.job.checks import check_job, check_output, identity, output_directory
from moetool.job.conditions import Conditions, with_threads
from moetool.job.estimate import estimate
from moetool.job.inputs import Inputs
from moetool.job.interrupt import listening
from moetool.job.job import Input, Job, Source
from moetool.job.memory import anonymous_bytes
from moetool.job.metering import Meter, inputs_read, write_costs
from moetool.job.options import RunOptions, TextOptions
from moetool.job.own_text import blank_text, planned
from moetool.job.plan import Plan
from moetool.job.processes import processes
from moetool.job.progress import SILENT, Progress
from moetool.job.ranks import Ranks, joined
from moetool.job.records import check_records
from moetool.job.result import Details, Json, Result, Sizes
from moetool.job.stage import AnyStage
from moetool.job.workspace import (
    Workspace,
    check_finished,
    is_finished,
    noted_conditions,
)
from moetool.job.writing import original_bytes, original_size
from moetool.quiet import quiet
from moetool.runtime.building import check_sizes
from moetool.runtime.memory import keep_few_programs, return_freed_memory

_MEASURED = "measured"  # the last unit of what stages share


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
    options = options.keeping(_kept(directory) if resume and not overwrite else None)
    stage = _for_planning(kind, source, options)
    plan = _told(stage)
    if not stage.source.checkpoint.is_imagined:  # else the job is for where the weights are, and maybe the text
        check_job(stage, directory)
        _check_input(stage)
    check_output(stage, directory, resume=resume, overwrite=overwrite)
    quicker = stage.in_bfloat16()
    return plan, None if quicker is None else planned(kind(stage.source, quicker))


def _check_input(stage: AnyStage) -> None:
    """Raise `InvalidInputError` for an input that transformers would not load: it is no source of what it would."""
    if stage.writes_model:
        check_sizes(stage.source.checkpoint)


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
    own, large = plan.details.get("note"), _too_large(stage, plan)
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


def _too_large(stage: AnyStage, plan: Plan) -> str | None:
    """A sentence where a compression makes nothing smaller, as of a model that is published in as few bits."""
    if stage.method_of != "compress" or not isinstance(stage.source, Source):
        return None
    original, given = original_bytes(stage.source), stage.source.checkpoint.given_bytes
    if plan.output_bytes < min(original, given):
        return None
    size = original_size(stage.source) if original <= given else f"{format_bytes(given)} in GGUF"
    return (
        f"The result takes {format_bytes(plan.output_bytes)}, and what it is made from {size}: nothing is saved. "
        "Take fewer bits, or a method with --size."
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


def _kept(directory: Path) -> int | None:
    """How many experts are in memory together in the run that is unfinished in a directory, if there is one."""
    noted = Conditions.noted(noted_conditions(directory))
    return None if noted is None else noted.experts_at_once


def run_stage(
    kind: type[AnyStage],
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = SILENT,
    measured: Path | None = None,
    same_input: bool = False,
    named: str | None = None,
) -> Result:
    """Run one stage from `source` to `output` and say what came of it.

    Args:
        kind: of stage.
        source: a checkpoint directory or hub id.
        output: a directory that does not exist or is empty.
        options: of the type the stage asks for.
        resume: go on with an interrupted run of the same settings.
        overwrite: throw away what an earlier run of moetool left in `output`.
        progress: told where the job is.
        measured: where `measure_stages` or another job has measured for this one.
        same_input: whether the user vouches for input files that were written again since the job began.
        named: what the result's record calls an input that will be gone; else `source`.

    Raises:
        MoetoolError: anything a user can do something about.
    """
    if processes() > 1 and not kind.is_parallel:
        raise UsageError(f"{kind.name} runs in one process; this is one of {processes()}. Start it without a launcher.")
    return_freed_memory()
    keep_few_programs()
    with joined(has_trainer=kind.has_trainer) as ranks, quiet():
        if ranks.is_first:
            return _lead(kind, source, output, options, ranks, resume, overwrite, progress, measured, same_input, named)
        return _follow(kind, source, output, options, ranks)


def _lead(
    kind: type[AnyStage],
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    ranks: Ranks,
    resume: bool,
    overwrite: bool,
    progress: Progress,
    measured: Path | None,
    same_input: bool,
    named: str | None,
) -> Result:
    """Run a job in its first process, or in the only one."""
    began = time.monotonic()
    opened = kind.opened(Checkpoint.open(source))
    check_records(opened)
    directory = output_directory(output)
    kept = _kept(directory) if resume and not overwrite else None
    if kept is None and measured is not None:
        kept = _kept(measured)
    options = options.keeping(kept)
    stage = kind(opened, options)
    plan = planned(stage)
    meter = Meter(progress, directory)
    check_job(stage, directory)
    _check_input(stage)
    made_by = identity(stage)
    inputs = Inputs(stage.inputs(), said_same=same_input)
    if resume and not overwrite and is_finished(directory):
        check_finished(directory, made_by, opened.checkpoint)
        inputs.check(inputs_read(directory))
        ranks.broadcast(None)
        sizes = _verified(stage, directory, edited=True)
        return replace(_result(kind, source, directory, began), status="finished", sizes=sizes)
    if (large := _too_large(stage, plan)) is not None:
        progress.log(large)
    needs = replace(plan, memory_bytes=ranks.here * plan.memory_bytes)
    needs.check(directory, memory=options.memory, disk=options.disk, kept=kept)
    if overwrite and isinstance(stage.options, TextOptions) and stage.options.calibration:
        # No earlier result is thrown away for a text that cannot be used.
        calibration_windows(opened, stage.options, blank_text)
    workspace = Workspace(
        directory,
        made_by,
        resume=resume,
        overwrite=overwrite,
        progress=meter,
        inputs=inputs,
        conditions=Conditions.now(plan).to_json(),
    )
    try:
        threads = _threads(workspace)
        ranks.broadcast(threads)
        meter.keep(resumed=workspace.is_resumed)
        with _storage_explained(directory, plan.disk_bytes), meter, listening() as interrupt, with_threads(threads):
            job = Job(stage.source, workspace, options, stage.recipe(), meter, interrupt, ranks, named)
            meter.expect(() if progress is SILENT else estimate(plan, options, directory).phases)
            if workspace.is_resumed:
                progress.log(f"Going on with the run in {directory}.")
            elif measured is not None:
                workspace.begin_with(measured)
            details = stage.run(job)
            result = replace(_result(kind, source, directory, began, details), loaded=job.loaded)
            result = replace(result, sizes=_verified(stage, directory))
            write_costs(directory, opened.checkpoint.path, meter, plan, result, inputs)
            workspace.close()
    except BaseException as error:
        try:
            ranks.fail(error)  # others stop before the lock goes
        finally:
            workspace.abandon()
        raise
    spent = meter.this_run
    return replace(
        result,
        seconds=round(time.monotonic() - began, 2),
        peak_memory_bytes=spent.peak_memory_bytes,
        scratch_bytes=spent.scratch_bytes,
        phases=spent.phases,
    )


def _threads(workspace: Books) -> int:
    """The number of torch's threads to work with: that with which the run was begun."""
    begun = Conditions.noted(workspace.conditions)
    return torch.get_num_threads() if begun is None else begun.threads_here


def _verified(stage: AnyStage, directory: Path, *, edited: bool = False) -> Sizes | None:
    """Check what was written as far as that is cheap: headers and shapes, and the digests of all files that were not
    read back already as they were written, which are those of the weights.
    Documents may have been `edited` since a run that had finished before.

    Raises:
        VerificationError: something is wrong.
    """
    sizes = verified_sizes(stage, directory) if stage.writes_model else None
    manifest = read_manifest(directory)
    weights = [name for name in manifest.files if name.endswith(".safetensors")]
    if problems := check_files(directory, manifest, edited=edited, trusted=weights).problems:
        raise VerificationError(f"{directory}: {'; '.join(problems)}")
    return sizes


def verified_sizes(stage: AnyStage, output: Path) -> Sizes:
    """Sizes of what a stage wrote, as `Stage.verify` finds them, and of the GGUF file that its input was read from."""
    return replace(stage.verify(output), gguf_bytes=stage.gguf_bytes)


def measure_stages(stages: Sequence[AnyStage], directory: Path, identity: str, progress: Progress) -> float | None:
    """Measure once for stages with the same input and `shared_recipe`, for `run_stage` to begin with.

    Args:
        stages: that share it, at least one.
        directory: where; what an earlier call has done there under the same `identity` is gone on with.
        identity: a fingerprint of all that decides what is measured.
        progress: told where it is.

    Returns:
        The seconds that it took; `None` if some of it had been done before.

    Raises:
        MoetoolError: as `run_stage`.
    """
    began = time.monotonic()
    return_freed_memory()
    kept = _kept(directory)
    settled = kept or min((count for stage in stages if (count := stage.plan().experts_at_once)), default=None)
    first = type(stages[0])(stages[0].source, stages[0].options.keeping(settled))
    plan = planned(first)
    plan.check(directory, memory=first.options.memory, disk=first.options.disk, kept=kept)
    conditions = Conditions.now(plan).to_json()
    workspace = Workspace(directory, identity, resume=True, progress=progress, conditions=conditions)
    try:
        is_resumed = workspace.is_resumed
        if not workspace.is_done(_MEASURED):
            threads = with_threads(_threads(workspace))
            with _storage_explained(directory, plan.disk_bytes), listening() as interrupt, threads:
                progress.expect(())
                job = Job(first.source, workspace, first.options, first.recipe(), progress, interrupt)
                first.measure(job, stages[1:])
                workspace.done(_MEASURED)
    finally:
        workspace.abandon()
    return None if is_resumed else time.monotonic() - began


def _follow(kind: type[AnyStage], source: str | Path, output: str | Path, options: RunOptions, ranks: Ranks) -> Result:
    """What a process beside the first does, once that has found that the job can begin."""
    began, threads = time.monotonic(), ranks.broadcast(0)
    directory, details = output_directory(output), Details()
    if threads is not None:
        stage = kind(kind.opened(Checkpoint.open(source)), options)
        workspace = Books(directory) if kind.has_trainer else RankBooks(directory, ranks)
        with _storage_explained(directory), listening() as interrupt, with_threads(threads):
            job = Job(stage.source, workspace, options, stage.recipe(), interrupt=interrupt, ranks=ranks)
            details = stage.run(job)
    return _result(kind, source, directory, began, details)


@contextmanager
def _storage_explained(directory: Path, needed: int | None = None) -> Iterator[None]:
    """Turn what libraries make of a full disk into an error with the numbers."""
    try:
        yield
    except MoetoolError:
        raise
    except Exception as error:
        if (problem := storage_problem(error, directory, needed)) is None:
            raise
        raise problem from error


def _result(
    kind: type[AnyStage], source: str | Path, directory: Path, began: float, details: Details | None = None
) -> Result:
    """The result of a run that began at that time."""
    return Result(
        stage=kind.name,
        input=str(source),
        output=str(directory),
        seconds=round(time.monotonic() - began, 2),
        peak_memory_bytes=anonymous_bytes(),
        details=details or Details(),
    )
