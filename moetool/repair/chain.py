"""A stage and the repair of what it made, one job after the other: `compress --repair STEPS`, and the same of `moefy`.

What the stage made lies beside the output, as `OUTPUT-unrepaired`, until the repaired model is whole. Each of the two
jobs keeps a journal of its own, so that `--resume` goes on in whichever was stopped, and the result has the bytes that
the two commands give.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from moetool.checkpoint.digests import check_files
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.names import MANIFEST
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.phases import Phase
from moetool.errors import MoetoolError, ResourceError, UsageError, VerificationError
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


def _unrepaired_path(output: str | Path) -> Path:
    """Path at which the stage's model waits until the repaired one is whole: `OUTPUT-unrepaired`."""
    directory = output_directory(output)
    return directory.with_name(directory.name + _BETWEEN)


@dataclass(frozen=True)
class Repaired:
    """A stage and the repair of what it makes.

    Attributes:
        kind: the stage, which compresses or moefies.
        source: the model, a directory or hub id, which is the original of the repair, too.
        options: of the stage.
        steps: optimizer steps of the repair.
    """

    kind: type[AnyStage]
    source: str | Path
    options: RunOptions
    steps: int

    def plan(self) -> Plan:
        """Plan the stage and the repair after it, from the headers of the model."""
        return self._joined(plan_stage(self.kind, self.source, self.options))

    def dry_run(self, output: str | Path, *, resume: bool = False, overwrite: bool = False) -> tuple[Plan, None]:
        """As `plan`, after the checks of `job.planning.dry_run`; never in bfloat16, where a repair computes nothing."""
        directory, between = output_directory(output), _unrepaired_path(output)
        _check_place(directory, between, resume=resume, overwrite=overwrite)
        if resume and self._finished_beside(directory, between) is not None:
            return self.plan(), None
        if resume and is_finished(directory) and not between.exists():
            self._made_so(directory)
        plan, _ = dry_run(
            self.kind, self.source, between, self.options, resume=resume, overwrite=overwrite and between.exists()
        )
        if resume and is_finished(between):
            dry_run(Repair, between, output, self._repair_options(), resume=True)
        return self._joined(plan), None

    def run(
        self,
        output: str | Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        progress: Progress = SILENT,
        same_input: bool = False,
    ) -> Result:
        """Run the stage, and then the repair of what it made. Takes and raises what `job.execute.run_stage` does."""
        if processes() > 1:
            raise UsageError(
                f"--repair runs in one process; this is one of {processes()}. Leave it out, and repair then."
            )
        directory, between = output_directory(output), _unrepaired_path(output)
        _check_place(directory, between, resume=resume, overwrite=overwrite)
        if resume and is_finished(directory) and not between.exists():
            return self._finished(directory)
        if resume and (finished := self._finished_beside(directory, between)) is not None:
            _delete(between)
            return finished
        if not between.exists():
            self._check_resources(directory)
        first = run_stage(
            self.kind,
            self.source,
            between,
            self.options,
            resume=resume,
            overwrite=overwrite and between.exists(),
            progress=progress,
            same_input=same_input,
            goes_on=True,
        )
        repaired = run_stage(
            Repair,
            between,
            output,
            self._repair_options(),
            resume=resume,
            overwrite=overwrite,
            progress=progress,
            same_input=same_input,
            named=f"{public(str(self.source))} after {self.kind.name}",
        )
        _delete(between)
        details = repaired.details
        if isinstance(details, RepairResult):
            details = RepairedResult(**vars(details), before_repair=first)
        return replace(
            repaired,
            stage=self.kind.name,
            input=str(self.source),
            sizes=first.sizes,
            seconds=round(first.seconds + repaired.seconds, 2),
            peak_memory_bytes=max(first.peak_memory_bytes, repaired.peak_memory_bytes),
            scratch_bytes=max(first.scratch_bytes or 0, repaired.scratch_bytes or 0),
            phases=[*first.phases, *repaired.phases],
            details=details,
        )

    def _repair_options(self) -> RepairOptions:
        """Text and machine of the stage, and the repair's own defaults."""
        shared = (set(TextOptions.model_fields) | set(RunOptions.model_fields)) - {"compute_dtype"}
        given = {name: getattr(self.options, name) for name in shared & self.options.model_fields_set}
        return RepairOptions(to=str(self.source), steps=self.steps, **given)

    def _check_resources(self, output: Path) -> None:
        plan = self.plan()
        try:
            plan.check(output, memory=self.options.memory, disk=self.options.disk)
        except ResourceError as error:
            raise ResourceError(f"{error} Without --repair, {plan.stage} may need less.") from error

    def _made_so(self, directory: Path) -> Sizes:
        """Sizes of what a run had finished before. Raises `UsageError` where that was made otherwise."""
        manifest = read_manifest(directory)
        opened = self.kind.opened(Checkpoint.open(self.source))
        stage, before = self.kind(opened, self.options), opened.checkpoint
        wanted = chosen_options(stage.options, stage.recipe(), before.settings)
        made = [(origin.stage, origin.source_fingerprint, origin.chosen) for origin in manifest.origins[1:2]]
        if made != [(self.kind.name, before.fingerprint(), wanted)] or manifest.recipe.get("steps") != self.steps:
            raise UsageError(
                f"{directory} is finished, and was made with other settings or from another input. "
                "--overwrite makes it again with these."
            )
        return verified_sizes(stage, directory)

    def _finished(self, directory: Path) -> Result:
        """The result of a run that had finished before. Raises as `_made_so`, and `VerificationError` for damage."""
        sizes = self._made_so(directory)
        checked = check_files(directory, read_manifest(directory), edited=True)
        if checked.problems:
            raise VerificationError(f"{directory}: {'; '.join(checked.problems)}")
        return Result(
            stage=self.kind.name,
            input=str(self.source),
            output=str(directory),
            status="finished",
            sizes=sizes,
            seconds=0.0,
            peak_memory_bytes=anonymous_bytes(),
            details=Details(),
        )

    def _finished_beside(self, directory: Path, between: Path) -> Result | None:
        """As `_finished`, where a run was killed while it deleted what it had repaired; else `None`, also where the
        output is an earlier one, which a run that was begun with `--overwrite` replaces."""
        if not between.is_dir() or not is_finished(directory):
            return None
        if not (between / MANIFEST).exists() and any(between.iterdir()):
            return None
        try:
            return self._finished(directory)
        except MoetoolError:
            return None

    def _joined(self, plan: Plan) -> Plan:
        """The plan of both jobs. The memory of the training depends on what is stored as numbers, which is told at
        most: only the memory of the original, which is certain, is reason to refuse both before the first."""
        opened = self.kind.opened(open_for_planning(self.source))
        stage = self.kind(opened, self.options)
        repair = Repair(source_before(opened), self._repair_options())
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
            details={**plan.details, "repair_steps": self.steps, "repair_most_memory_bytes": most},
        )


def _delete(between: Path) -> None:
    """Delete the unrepaired model, its manifest last: a run that finds what is left knows it by that."""
    for path in between.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MANIFEST:
            path.unlink()
    shutil.rmtree(between)


def _check_place(directory: Path, between: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse an output that the repair would refuse when the stage is done."""
    begun = directory.exists() and any(directory.iterdir())
    if begun and not resume and not overwrite:
        raise UsageError(f"{directory} is not empty. --overwrite deletes what is there, --resume goes on with it.")
    if resume and begun and not between.exists() and not is_finished(directory):
        raise UsageError(
            f"{directory} holds a run that is not finished, and {between}, which it repairs, is not there: start again "
            "with --overwrite."
        )
