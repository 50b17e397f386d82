"""The output directory while a job is at work in it, and the journal that lets the job be resumed.

Everything unfinished lives in `OUTPUT/.moetool`, which is removed at the end. Each unit of work leaves its files there
(written to a temporary name and renamed) and then one line in the journal, with their digests, so what the journal
lists is done, whatever happened to the process, and what is no longer what was written is made again. The fingerprint
of the plan must match to go on. One process works in it at a time.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from moetool.checkpoint.files import TEMPORARY, is_intact, place, storage_errors
from moetool.checkpoint.identity import is_known_by_earlier
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.names import MANIFEST, WORK_DIRECTORY
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.job.books import Books, Outcome
from moetool.job.inputs import Inputs
from moetool.job.journal import Journal, hand_on
from moetool.job.lock import Lock
from moetool.job.progress import SILENT, Progress, phase
from moetool.job.ranks import Ranks

FINISHED = "finished"  # the journal's last unit
TRAINER = "trainer"  # checkpoints of a training, which have digests of their own
REBUILT = "rebuilt"  # what a job makes again whenever it goes on
SPENT = "costs.json"  # what runs have cost, which has a digest of its own
_LOCK, _JOURNAL = "lock", "journal.jsonl"
_UNJOURNALED = {_LOCK, _JOURNAL, TRAINER, REBUILT, SPENT, SPENT + TEMPORARY}


class Workspace(Books):
    """One job's output directory, locked until `close`, `abandon` or the end of the process.

    Args:
        output: the directory.
        fingerprint: of everything that decides the result.
        resume: go on with what is there.
        overwrite: throw away what an earlier run has left.
        progress: told what is checked, and what has to be made again.
        inputs: what the job reads, which has to be what it was.
        conditions: under which a run that begins here is begun.

    Raises:
        UsageError: the directory is not empty and neither resuming nor overwriting was asked for; there is nothing to
            resume; what is there was started with other settings or from other inputs; or another run is at work in it.
        InvalidInputError: an input is not what it was.
        ResourceError: the file system refuses.
    """

    def __init__(
        self,
        output: Path,
        fingerprint: str,
        *,
        resume: bool = False,
        overwrite: bool = False,
        progress: Progress = SILENT,
        inputs: Inputs | None = None,
        conditions: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        super().__init__(output)
        self.fingerprint = fingerprint
        self._progress, self._inputs, self._conditions = progress, inputs or Inputs(), conditions
        _check_directory(output, resume=resume, overwrite=overwrite)
        self._is_new = not output.exists()
        was_there = self.work.exists()
        if not was_there:  # else somebody may be at work in it
            _check_occupied(output, self.work, resume=resume, overwrite=overwrite, is_begun=False)
        self._lock = Lock(self.work / _LOCK, output)
        try:
            is_begun = was_there or not _holds_only(self.work, self._lock.path)
            is_begun = is_begun and not is_finished(output)
            _check_occupied(output, self.work, resume=resume, overwrite=overwrite, is_begun=is_begun)
            if not self._lock.is_real:
                self._progress.log(f"{output} is on a file system without locks: nothing stops two runs at once.")
            self._begin(overwrite)
        except BaseException:
            self._lock.release(remove=_holds_only(self.work, self._lock.path))
            self._leave_nothing()
            raise

    def _begin(self, overwrite: bool) -> None:
        path = self.work / _JOURNAL
        if overwrite:
            with storage_errors(path):
                path.write_bytes(b"")  # from here on what is left belongs to this run
                _delete(_entries(self.output) - {self.work})
                _delete(_entries(self.work) - {path, self._lock.path})
        is_lost = not path.exists() and not _holds_only(self.work, self._lock.path)
        with storage_errors(path):
            path.touch()
        self._journal = Journal(path, self.fingerprint, self._inputs.states)
        if not self._journal.units:
            self._journal.conditions = self._conditions
        _check_settings(self.output, self._journal, self.fingerprint)
        self._inputs.check(self._journal.noted)
        if is_lost or (path.stat().st_size and not self._journal.units):
            self._progress.log(f"The journal of the run in {self.output} is lost: starting again.")
        self._check_files()
        self._seen = {path: _signature(path) for path in self._working_files()}

    def _check_files(self) -> None:
        """Find units whose files are not what was written, and forget them, and with them those on the way to them;
        remove files that belong to nothing."""
        journal, damaged = self._journal, set()
        expected = [(unit, name) for unit, found in journal.units.items() for name in found.files]
        if expected:
            with phase(self._progress, "Check", len(expected), "files"):
                for unit, name in expected:
                    if not is_intact(self.output / name, journal.units[unit].files[name]):
                        damaged.add(unit)
                    self._progress.advance()
        if damaged or journal.gaps:
            last = max([journal.units[unit].order for unit in damaged] + journal.gaps)
            on_the_way = {name for name, unit in journal.units.items() if unit.has_spent_files and unit.order < last}
            again = (damaged | on_the_way) - journal.again
            journal.undo(again)
            what = f"{len(damaged)} finished units ({_listed(damaged)})" if damaged else "lines of the journal"
            self._progress.log(
                f"{what} in {self.work} are damaged: making {len(again)} of {len(journal.units)} units again."
            )
        kept = {self.output / name for unit in journal.units.values() for name in unit.files}
        _delete(set(self._working_files()) - kept)

    def _working_files(self) -> Iterator[Path]:
        """Every file of the work directory that a unit may have made."""
        for top in _entries(self.work):
            if top.name not in _UNJOURNALED:
                yield from (path for path in [top, *top.rglob("*")] if path.is_file())

    def begin_with(self, other: Path) -> None:
        """Take over what another job has done in its output directory, unless something has been done here.

        Its first units have to be this job's, too. Files get second names, so that each job may delete its own; the
        journal, which makes them count, comes last and whole.

        Raises:
            ResourceError: the file system refuses.
        """
        if self._journal.units:
            return
        theirs, ours = other / WORK_DIRECTORY / _JOURNAL, self.work / _JOURNAL
        for unit in Journal(theirs, self.fingerprint).units.values():
            for name in unit.files:
                place(other / name, self.output / name)
        hand_on(theirs, ours, self.fingerprint, self._inputs.states)
        self._journal = Journal(ours, self.fingerprint, self._inputs.states)
        self._seen = {path: _signature(path) for path in self._working_files()}

    def is_done(self, unit: str) -> bool:
        return self._journal.is_done(unit)

    @property
    def is_resumed(self) -> bool:
        return bool(self._journal.units)

    @property
    def conditions(self) -> Mapping[str, object]:
        return self._journal.conditions

    def told(self, unit: str) -> Mapping[str, object]:
        found = self._journal.units.get(unit)
        return {} if found is None else found.told

    def _fresh(self) -> list[Path]:
        return [path for path in self._working_files() if self._seen.get(path) != _signature(path)]

    def note(self, made: Outcome) -> None:
        self._journal.done(*made)
        paths = [self.output / name for name in made.files]
        self._seen |= {path: _signature(path) for path in paths if path.is_relative_to(self.work)}
        _delete(self.output / name for name in made.spent)

    def catch_up(self, ranks: Ranks) -> None:
        units = self._journal.units
        told = {name: unit.told for name, unit in units.items()}
        ranks.broadcast(({name for name in units if self.is_done(name)}, told))

    def discard(self) -> None:
        self._empty()
        self._journal = Journal(self.work / _JOURNAL, self.fingerprint, self._inputs.states)

    def _empty(self) -> None:
        """Remove everything that is only for the work, the journal that tells of it last."""
        path = self.work / _JOURNAL
        _delete(_entries(self.work) - {path, self._lock.path})
        _delete([path])

    def abandon(self) -> None:
        """The job failed. If nothing is there to go on with, leave nothing at all: a mended command can start."""
        is_empty = not self._journal.units and _entries(self.output) == {self.work}
        if is_empty:
            _delete(_entries(self.work) - {self._lock.path})
        self._lock.release(remove=is_empty)
        self._leave_nothing()

    def _leave_nothing(self) -> None:
        if self._is_new and not _entries(self.output):
            self.output.rmdir()

    def close(self) -> None:
        """The job is finished, as the journal says until it is removed as the last of what was only for the work."""
        self._journal.done(FINISHED)
        self._empty()
        self._lock.release(remove=True)


def check_place(
    output: Path, fingerprint: Callable[[], str], source: Checkpoint, *, resume: bool, overwrite: bool
) -> None:
    """Refuse whatever `Workspace` would refuse of a directory, without a trace; the `fingerprint` is asked for only
    where there is a run to go on with.

    Raises:
        UsageError: as `Workspace`; or the run that is finished there was made with other settings.
    """
    _check_directory(output, resume=resume, overwrite=overwrite)
    if resume and is_finished(output):
        return _check_made_by(output, fingerprint(), source)
    work = output / WORK_DIRECTORY
    is_begun = work.exists() and not is_finished(output)
    _check_occupied(output, work, resume=resume, overwrite=overwrite, is_begun=is_begun)
    if resume:
        _check_settings(output, Journal(work / _JOURNAL, ""), fingerprint())


def noted_conditions(output: Path) -> Mapping[str, object]:
    """Under which an unfinished run was begun; empty if there is none that has done anything."""
    return Journal(output / WORK_DIRECTORY / _JOURNAL, "").conditions


def noted_inputs(output: Path) -> object:
    """The inputs that an unfinished run noted last; `None` if there is none that has done anything."""
    return Journal(output / WORK_DIRECTORY / _JOURNAL, "").noted


def is_finished(output: Path) -> bool:
    """Whether a directory holds what a run has finished, though it may have died while it was tidying up."""
    work = output / WORK_DIRECTORY
    if not (output / MANIFEST).is_file():
        return False
    return _holds_only(work, work / _LOCK) or Journal(work / _JOURNAL, "").is_done(FINISHED)


def check_finished(output: Path, fingerprint: str, source: Checkpoint) -> None:
    """Remove what a finished run may have left when it died. Raises as `_check_made_by`."""
    _check_made_by(output, fingerprint, source)
    work = output / WORK_DIRECTORY
    if work.exists():
        lock = Lock(work / _LOCK, output)
        _delete(_entries(work) - {lock.path})
        lock.release(remove=True)


def _entries(directory: Path) -> set[Path]:
    return set(directory.iterdir()) if directory.is_dir() else set()


def _holds_only(directory: Path, path: Path) -> bool:
    return _entries(directory) <= {path}


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _signature(path: Path) -> tuple[int, int, int]:
    """The size, time and inode of a file, which change when it is written anew."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (", …" if len(ordered) > 4 else "")


def _check_directory(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise `UsageError` for what is no directory, or for both `resume` and `overwrite`."""
    if resume and overwrite:
        raise UsageError("--resume goes on with what is there, --overwrite throws it away: give one of them.")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} exists and is not a directory.")


def _check_occupied(output: Path, work: Path, *, resume: bool, overwrite: bool, is_begun: bool) -> None:
    """Raise `UsageError` unless something may be written here, where there may be a run that is not finished, whose
    files lie in `work`."""
    occupied = set(output.iterdir()) - {work} if output.is_dir() else set()
    if is_begun and not resume and not overwrite:
        raise UsageError(
            f"{output} is not empty. It holds an unfinished run: --resume goes on with it. "
            "--overwrite deletes what is there."
        )
    if is_begun or not occupied:
        return
    if resume:
        raise UsageError(f"{output} is not empty and holds no unfinished run of moetool: there is nothing to resume.")
    if not (output / MANIFEST).exists():
        raise UsageError(
            f"{output} is not empty and was not written by moetool (no {MANIFEST}): not deleting it, with --overwrite "
            "or without. Remove it yourself or choose another place."
        )
    if not overwrite:
        raise UsageError(f"{output} is not empty. --overwrite deletes what is there.")


def _check_settings(output: Path, journal: Journal, fingerprint: str) -> None:
    """Raise `UsageError` where an unfinished run was begun with other settings, or by an earlier moetool."""
    if journal.run in (None, fingerprint):
        return
    if journal.noted is None:
        raise UsageError(
            f"The run in {output} was started by an earlier moetool, which noted less of its input than this one "
            "compares: whether input and settings are still the same cannot be told. Finish it with that moetool, or "
            "start again with --overwrite."
        )
    raise UsageError(
        f"The run in {output} was started with other settings or another input. "
        "Repeat the first command with --resume, or start again with --overwrite."
    )


def _check_made_by(output: Path, fingerprint: str, source: Checkpoint) -> None:
    """Refuse a finished result as what a run would have made; the `source` tells whether an earlier moetool knew it.

    Raises:
        UsageError: it was made with other settings, or by an older moetool, which did not note them.
        InvalidInputError: its manifest is damaged.
    """
    manifest = read_manifest(output)
    made_by = manifest.run
    if made_by is None:
        raise UsageError(f"{output} is finished, and does not say with which settings: there is nothing to resume.")
    if made_by != fingerprint and is_known_by_earlier(source, manifest.source_fingerprint):
        raise UsageError(
            f"{output} is finished, and was made by an earlier moetool, which noted less of its input than this one "
            "compares: whether that is still the same cannot be told. --overwrite makes it again."
        )
    if made_by != fingerprint:
        raise UsageError(
            f"{output} is finished, and was made with other settings or from another input. "
            "--overwrite makes it again with these."
        )
