"""A stage and the repair of what it made, one job after the other: `compress --repair STEPS`, and the same of `moefy`.

What the stage made lies beside the output, as `OUTPUT-unrepaired`, until the repaired model is whole. Each of the two
jobs keeps a journal of its own, so that `--resume` goes on in whichever was stopped, and the result has the bytes that
the two commands give.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from moetool.checkpoint.digests import check_files
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.phases import Phase
from moetool.errors import ResourceError, UsageError, VerificationError
from moetool.job.blueprint import open_for_planning
from moetool.job.card import chosen_options, public
from moetool.job.checks import output_directory
from moetool.job.execute import run_stage, verified_sizes
from moetool.job.memory import anonymous_bytes
from moetool.job.options import RunOptions, TextOptions
from moetool.job.plan import Plan
from moetool.job.planning import dry_run, plan_stage
from moetool.job.processes import processes
from moetool.job.progress import SILENT, Progress
from moetool.job.result import Details, Result, Sizes
from moetool.job.stage import AnyStage
from moetool.job.workspace import is_finished
from moetool.repair.options import RepairOptions
from moetool.repair.results import RepairedResult, RepairResult
from moetool.repair.sources import source_before
from moetool.repair.stage import Repair

_BETWEEN = "-unrepaired"
_NOTED = (
    "That is of --repair: the original predicts, and what it says is noted. Fewer or shorter windows (--samples, "
    "--sequence-length) make less of that."
)


def unrepaired_path(output: str | Path) -> Path:
    """Path at which the stage's model waits until the repaired one is whole: `OUTPUT-unrepaired`."""
    directory = output_directory(output)
    return directory.with_name(directory.name + _BETWEEN)


def repair_options(source: str | Path, options: RunOptions, steps: int) -> RepairOptions:
    """The options of the repair: text and machine of the stage before it, and the repair's own defaults."""
    shared = (set(TextOptions.model_fields) | set(RunOptions.model_fields)) - {"compute_dtype"}
    given = {name: getattr(options, name) for name in shared & options.model_fields_set}
    return RepairOptions(to=str(source), steps=steps, **given)


def plan_repaired(kind: type[AnyStage], source: str | Path, options: RunOptions, steps: int) -> Plan:
    """Plan a stage and the repair of what it makes, from the headers of the model."""
    return _joined(plan_stage(kind, source, options), kind, source, options, steps)


def dry_run_repaired(
    kind: type[AnyStage],
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    steps: int,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> tuple[Plan, None]:
    """Plan as `plan_repaired`, after the checks of `job.planning.dry_run`; never in bfloat16, where a repair computes
    nothing."""
    directory, between = output_directory(output), unrepaired_path(output)
    _check_place(output, between, resume=resume, overwrite=overwrite)
    if resume and is_finished(directory) and not between.exists():
        _made_so(kind, source, directory, options, steps)
    plan, _ = dry_run(kind, source, between, options, resume=resume, overwrite=overwrite and between.exists())
    if resume and is_finished(between):
        dry_run(Repair, between, output, repair_options(source, options, steps), resume=True)
    return _joined(plan, kind, source, options, steps), None


def run_repaired(
    kind: type[AnyStage],
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    steps: int,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = SILENT,
    same_input: bool = False,
) -> Result:
    """Run a stage, and then the repair of what it made.

    Args:
        kind: the stage, which compresses or moefies.
        source: the model, a directory or hub id, which is the original of the repair, too.
        output: a directory that does not exist or is empty.
        options: of the stage.
        steps: optimizer steps of the repair.
        resume: go on with an interrupted run of the same settings.
        overwrite: throw away what an earlier run left in `output`.
        progress: told where the jobs are.
        same_input: as `job.execute.run_stage` takes it.

    Raises:
        MoetoolError: as `job.execute.run_stage`.
    """
    if processes() > 1:
        raise UsageError(f"--repair runs in one process; this is one of {processes()}. Leave it out, and repair then.")
    directory, between = output_directory(output), unrepaired_path(output)
    _check_place(output, between, resume=resume, overwrite=overwrite)
    if resume and is_finished(directory) and not between.exists():
        return _finished(kind, source, directory, options, steps)
    if not between.exists():
        _check_resources(plan_repaired(kind, source, options, steps), directory, options)
    first = run_stage(
        kind,
        source,
        between,
        options,
        resume=resume,
        overwrite=overwrite and between.exists(),
        progress=progress,
        same_input=same_input,
    )
    repaired = run_stage(
        Repair,
        between,
        output,
        repair_options(source, options, steps),
        resume=resume,
        overwrite=overwrite,
        progress=progress,
        same_input=same_input,
        named=f"{public(str(source))} after {kind.name}",
    )
    shutil.rmtree(between)
    details = repaired.details
    if isinstance(details, RepairResult):
        details = RepairedResult(**vars(details), before_repair=first)
    return replace(
        repaired,
        stage=kind.name,
        input=str(source),
        sizes=first.sizes,
        seconds=round(first.seconds + repaired.seconds, 2),
        peak_memory_bytes=max(first.peak_memory_bytes, repaired.peak_memory_bytes),
        scratch_bytes=max(first.scratch_bytes or 0, repaired.scratch_bytes or 0),
        phases=[*first.phases, *repaired.phases],
        details=details,
    )


def _check_place(output: str | Path, between: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse an output that the repair would refuse when the stage is done."""
    directory = output_directory(output)
    begun = directory.exists() and any(directory.iterdir())
    if begun and not resume and not overwrite:
        raise UsageError(f"{directory} is not empty. --overwrite deletes what is there, --resume goes on with it.")
    if resume and begun and not between.exists() and not is_finished(directory):
        raise UsageError(
            f"{directory} holds a run that is not finished, and {between}, which it repairs, is not there: start again "
            "with --overwrite."
        )


def _check_resources(plan: Plan, output: Path, options: RunOptions) -> None:
    try:
        plan.check(output, memory=options.memory, disk=options.disk)
    except ResourceError as error:
        raise ResourceError(f"{error} Without --repair, {plan.stage} may need less.") from error


def _made_so(kind: type[AnyStage], source: str | Path, directory: Path, options: RunOptions, steps: int) -> Sizes:
    """Sizes of what a run had finished before. Raises `UsageError` where that was made otherwise."""
    manifest = read_manifest(directory)
    opened = kind.opened(Checkpoint.open(source))
    stage, before = kind(opened, options), opened.checkpoint
    wanted = chosen_options(stage.options, stage.recipe(), before.settings)
    made = [(origin.stage, origin.source_fingerprint, origin.chosen) for origin in manifest.origins[1:2]]
    if made != [(kind.name, before.fingerprint(), wanted)] or manifest.recipe.get("steps") != steps:
        raise UsageError(
            f"{directory} is finished, and was made with other settings or from another input. "
            "--overwrite makes it again with these."
        )
    return verified_sizes(stage, directory)


def _finished(kind: type[AnyStage], source: str | Path, directory: Path, options: RunOptions, steps: int) -> Result:
    """The result of a run that had finished before. Raises as `_made_so`, and `VerificationError` for damaged files."""
    sizes = _made_so(kind, source, directory, options, steps)
    checked = check_files(directory, read_manifest(directory), edited=True)
    if checked.problems:
        raise VerificationError(f"{directory}: {'; '.join(checked.problems)}")
    return Result(
        stage=kind.name,
        input=str(source),
        output=str(directory),
        status="finished",
        sizes=sizes,
        seconds=0.0,
        peak_memory_bytes=anonymous_bytes(),
        details=Details(),
    )


def _joined(plan: Plan, kind: type[AnyStage], source: str | Path, options: RunOptions, steps: int) -> Plan:
    """The plan of both jobs. The memory of the training depends on what is stored as numbers, which is told at most:
    only the memory of the original, which is certain, is reason to refuse both before the first."""
    opened = kind.opened(open_for_planning(source))
    stage = kind(opened, options)
    repair = Repair(source_before(opened), repair_options(source, options, steps))
    least, most = repair.memory_before(plan.output_bytes, stage.share_in_numbers)
    phases: dict[str, Phase] = {}
    for phase in (*plan.phases, *repair.phases(plan.output_bytes)):
        earlier = phases.get(phase.name)
        phases[phase.name] = phase if earlier is None else Phase(phase.name, earlier.work + phase.work)
    return replace(
        plan,
        scratch_bytes=max(plan.scratch_bytes, plan.output_bytes + repair.scratch_bytes),
        memory_bytes=max(plan.memory_bytes, least),
        advice=plan.advice if plan.memory_bytes >= least else _NOTED,
        phases=tuple(phases.values()) if plan.phases else (),
        details={**plan.details, "repair_steps": steps, "repair_most_memory_bytes": most},
    )
