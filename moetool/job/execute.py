"""Execution of a stage: checks, work, verification and proof of its output."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from moetool.checkpoint.digests import check_files
from moetool.checkpoint.files import storage_problem
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import MoetoolError, UsageError, VerificationError
from moetool.job.books import Books, RankBooks
from moetool.job.checks import check_job, identity, output_directory
from moetool.job.conditions import Conditions, with_threads
from moetool.job.estimate import estimate
from moetool.job.inputs import Inputs
from moetool.job.interrupt import listening
from moetool.job.job import Job
from moetool.job.memory import anonymous_bytes
from moetool.job.metering import Meter, inputs_read, write_costs
from moetool.job.options import RunOptions, TextOptions
from moetool.job.own_text import blank_text, planned
from moetool.job.plan import Plan
from moetool.job.planning import kept_experts, too_large
from moetool.job.processes import processes
from moetool.job.progress import SILENT, Progress
from moetool.job.ranks import Ranks, joined
from moetool.job.records import check_records
from moetool.job.result import Details, Result, Sizes
from moetool.job.stage import AnyStage
from moetool.job.windows import calibration_windows
from moetool.job.workspace import Workspace, check_finished, is_finished
from moetool.quiet import quiet
from moetool.runtime.memory import keep_few_programs, return_freed_memory

_MEASURED = "measured"  # the last unit of what stages share


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
    goes_on: bool = False,
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
        goes_on: whether the caller has more to do, so that a stop that was asked for in the last unit is not lost.

    Raises:
        MoetoolError: anything a user can do something about.
    """
    if processes() > 1 and not kind.is_parallel:
        raise UsageError(f"{kind.name} runs in one process; this is one of {processes()}. Start it without a launcher.")
    return_freed_memory()
    keep_few_programs()
    run = _Run(kind, source, output, options, resume, overwrite, progress, measured, same_input, named, goes_on)
    with joined(has_trainer=kind.has_trainer) as ranks, quiet():
        return run.lead(ranks) if ranks.is_first else run.follow(ranks)


@dataclass(frozen=True)
class _Run:
    """One call of `run_stage`, with its arguments.

    Attributes:
        began: when, in seconds of the monotonic clock.
    """

    kind: type[AnyStage]
    source: str | Path
    output: str | Path
    options: RunOptions
    resume: bool
    overwrite: bool
    progress: Progress
    measured: Path | None
    same_input: bool
    named: str | None
    goes_on: bool
    began: float = field(default_factory=time.monotonic)

    def lead(self, ranks: Ranks) -> Result:
        """Run the job in its first process, or in the only one."""
        opened = self.kind.opened(Checkpoint.open(self.source))
        check_records(opened)
        directory = output_directory(self.output)
        kept = kept_experts(directory) if self._goes_on else None
        if kept is None and self.measured is not None:
            kept = kept_experts(self.measured)
        options = self.options.keeping(kept)
        stage = self.kind(opened, options)
        plan = planned(stage)
        meter = Meter(self.progress, directory)
        check_job(stage, directory)
        made_by = identity(stage)
        inputs = Inputs(stage.inputs(), stage.files(), said_same=self.same_input)
        if self._goes_on and is_finished(directory):
            check_finished(directory, made_by, opened.checkpoint)
            inputs.check(inputs_read(directory))
            ranks.broadcast(None)
            sizes = _verified(stage, directory, edited=True)
            return replace(self._result(directory), status="finished", sizes=sizes)
        self._check_resources(stage, plan, directory, ranks, kept)
        workspace = Workspace(
            directory,
            made_by,
            resume=self.resume,
            overwrite=self.overwrite,
            progress=meter,
            inputs=inputs,
            conditions=Conditions.now(plan).to_json(),
        )
        try:
            threads = _threads(workspace)
            ranks.broadcast(threads)
            meter.keep(resumed=workspace.is_resumed)
            with _storage_explained(directory, plan.disk_bytes), meter, listening() as interrupt, with_threads(threads):
                job = Job(stage.source, workspace, options, stage.recipe(), meter, interrupt, ranks, self.named)
                meter.expect(() if self.progress is SILENT else estimate(plan, options, directory).phases)
                if workspace.is_resumed:
                    self.progress.log(f"Going on with the run in {directory}.")
                elif self.measured is not None:
                    workspace.begin_with(self.measured)
                details = stage.run(job)
                result = replace(self._result(directory, details), loaded=job.loaded)
                result = replace(result, sizes=_verified(stage, directory))
                write_costs(directory, opened.checkpoint.path, meter, plan, result, inputs)
                workspace.close()
        except BaseException as error:
            try:
                ranks.fail(error)  # others stop before the lock goes
            finally:
                workspace.abandon()
            raise
        if self.goes_on:
            interrupt.check()
        spent = meter.this_run
        return replace(
            result,
            seconds=round(time.monotonic() - self.began, 2),
            peak_memory_bytes=spent.peak_memory_bytes,
            scratch_bytes=spent.scratch_bytes,
            phases=spent.phases,
        )

    def follow(self, ranks: Ranks) -> Result:
        """What a process beside the first does, once that has found that the job can begin."""
        threads = ranks.broadcast(0)
        directory, details = output_directory(self.output), Details()
        if threads is not None:
            stage = self.kind(self.kind.opened(Checkpoint.open(self.source)), self.options)
            workspace = Books(directory) if self.kind.has_trainer else RankBooks(directory, ranks)
            with _storage_explained(directory), listening() as interrupt, with_threads(threads):
                job = Job(stage.source, workspace, self.options, stage.recipe(), interrupt=interrupt, ranks=ranks)
                details = stage.run(job)
        return self._result(directory, details)

    @property
    def _goes_on(self) -> bool:
        return self.resume and not self.overwrite

    def _check_resources(self, stage: AnyStage, plan: Plan, directory: Path, ranks: Ranks, kept: int | None) -> None:
        """Refuse, before anything is written or thrown away, what there is no room or no text for."""
        options = stage.options
        if (large := too_large(stage, plan)) is not None:
            self.progress.log(large)
        needs = replace(plan, memory_bytes=ranks.here * plan.memory_bytes)
        needs.check(directory, memory=options.memory, disk=options.disk, kept=kept)
        if self.overwrite and isinstance(options, TextOptions) and options.calibration:
            # No earlier result is thrown away for a text that cannot be used.
            calibration_windows(stage.source, options, blank_text)

    def _result(self, directory: Path, details: Details | None = None) -> Result:
        return Result(
            stage=self.kind.name,
            input=str(self.source),
            output=str(directory),
            seconds=round(time.monotonic() - self.began, 2),
            peak_memory_bytes=anonymous_bytes(),
            details=details or Details(),
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
    kept = kept_experts(directory)
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
                interrupt.check()
    finally:
        workspace.abandon()
    return None if is_resumed else time.monotonic() - began


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
