"""From a stage's name and options to a finished, verified output."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.pipeline.blueprint import open_for_planning
from moetool.pipeline.calibrated import calibration_windows
from moetool.pipeline.interrupt import listening
from moetool.pipeline.job import Job
from moetool.pipeline.memory import PeakMemory, return_freed_memory
from moetool.pipeline.options import RunOptions, TextOptions
from moetool.pipeline.output import check_records
from moetool.pipeline.plan import Plan, fingerprint
from moetool.pipeline.processes import is_first_process, processes
from moetool.pipeline.progress import Progress, Silent
from moetool.pipeline.stages import stages
from moetool.pipeline.workspace import FollowingWorkspace, Workspace


def plan_stage(name: str, source: str | Path, options: RunOptions) -> Plan:
    """What a stage would cost, from headers alone, or from `config.json` alone if that is all there is. Writes nothing
    and downloads no weights."""
    checkpoint = open_for_planning(source)
    kind = stages()[name]
    opened = kind.source_type.of(checkpoint)
    check_records(opened)
    plan = kind(opened, options).plan()
    return replace(plan, details={**plan.details, "headers": "config.json alone"}) if checkpoint.is_imagined else plan


def run_stage(
    name: str,
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run one stage from `source` to `output` and say what came of it.

    Args:
        name: of the stage, e.g. `d2moe` or `decompose`.
        source: a checkpoint directory or hub id.
        output: a directory that does not exist or is empty.
        options: of the type the stage asks for.
        resume: go on with an interrupted run of the same settings.
        overwrite: throw away what an earlier run of moetool left in `output`.
        progress: told where the job is.

    Returns:
        `bytes_before`, `bytes_after`, `achieved_ratio`, `seconds`, `peak_memory_bytes` and what the stage adds.

    Raises:
        MoetoolError: anything a user can do something about.
    """
    began = time.monotonic()
    progress = progress or Silent()
    kind = stages()[name]
    if processes() > 1 and not kind.is_parallel:
        raise UsageError(f"{name} runs in one process; this is one of {processes()}. Start it without a launcher.")
    opened = kind.source_type.of(Checkpoint.open(source))
    check_records(opened)
    stage = kind(opened, options)
    plan = stage.plan()
    directory = Path(output).expanduser()
    _refuse_self(opened.checkpoint.path, directory, "the input")
    for path in stage.reads():
        _refuse_self(path, directory, f"{path}, which this job reads")
    plan.check(directory, memory=options.memory, disk=options.disk)
    if overwrite and isinstance(stage.options, TextOptions) and stage.options.calibration:
        # No earlier result is thrown away for a text that cannot be used.
        calibration_windows(opened, stage.options)
    workspace = (
        Workspace(directory, fingerprint(name, stage.sources(), stage.recipe()), resume=resume, overwrite=overwrite)
        if is_first_process()
        else FollowingWorkspace(directory)
    )
    result: dict[str, Any] = {"stage": name, "input": str(source), "output": str(directory)}
    try:
        return_freed_memory()
        with PeakMemory() as peak, listening() as interrupt:
            job = Job(opened, workspace, options, progress, interrupt, {"recipe": stage.recipe()})
            if workspace.is_resumed:
                progress.log(f"Going on with the run in {directory}.")
            told = stage.run(job)
            if "calibration" in job.record:
                result["calibration"] = job.record["calibration"]
            if stage.writes_model and is_first_process():
                result.update(stage.verify(directory))
            workspace.close()
    except BaseException:
        workspace.abandon()
        raise
    result["seconds"] = round(time.monotonic() - began, 2)
    result["peak_memory_bytes"] = peak.bytes
    return result | told


def _refuse_self(source: Path, output: Path, what: str) -> None:
    there, here = output.resolve(), source.resolve()
    if there == here or here in there.parents or there in here.parents:
        raise UsageError(f"{output} is {what}, inside it or around it. Write somewhere else.")
