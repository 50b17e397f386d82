"""Record keeping of a job that several processes share: which units are done, and what each has noted.

The first process keeps them, in the journal of its `Workspace`. A process that shares units tells it what it has made
and hears what all have made (`RankBooks`); a process that transformers' Trainer brings along does neither (`Books`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from moetool.checkpoint.files import fast_digest, storage_errors
from moetool.checkpoint.names import WORK_DIRECTORY
from moetool.job.ranks import Ranks


class Outcome(NamedTuple):
    """Result of a finished unit: digests (`FastDigest`) of its files by name, files it used up, values it noted."""

    unit: str
    files: dict[str, str]
    spent: list[str]
    told: dict[str, object]


class Books:
    """The books of a process that keeps none and hears of none: no unit is done.

    Attributes:
        output: the job's directory.
        work: the directory of unfinished files.
        fingerprint: of everything that decides the result, where books are kept.
    """

    fingerprint = ""

    def __init__(self, output: Path) -> None:
        self.output, self.work = output, output / WORK_DIRECTORY

    def is_done(self, unit: str) -> bool:
        """Whether the journal lists a unit as done, with its files in place."""
        return False

    @property
    def is_resumed(self) -> bool:
        """Whether anything had been finished before this process began."""
        return False

    @property
    def conditions(self) -> Mapping[str, object]:
        """The conditions under which this run was begun, as the journal has noted them."""
        return {}

    def told(self, unit: str) -> Mapping[str, object]:
        """Values that a unit noted when it finished, kept even if it has to run again; empty if it never finished."""
        return {}

    def done(
        self,
        unit: str,
        *,
        made: Iterable[Path] = (),
        digests: Mapping[Path, str] | None = None,
        spent: Iterable[Path] = (),
        told: Mapping[str, object] | None = None,
        alone: bool = True,
    ) -> None:
        """Note that a unit's files are in place.

        Args:
            unit: its name.
            made: what it wrote into the output; what is new in the work directory is found.
            digests: `FastDigest`s that are known already.
            spent: files that only this unit needed; they are deleted.
            told: what it has to note, in words of JSON.
            alone: whether nothing else is being made meanwhile; if not, `made` is all.
        """
        known, used = digests or {}, list(spent)
        files = (path for path in [*(self._fresh() if alone else ()), *made] if path not in used)
        found = {self._name(path): known.get(path) or fast_digest(path) for path in files}
        self.note(Outcome(unit, found, [self._name(path) for path in used], dict(told or {})))

    def _fresh(self) -> Iterable[Path]:
        """The files of the work directory that no unit has noted yet."""
        return ()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.output).as_posix()

    def note(self, made: Outcome) -> None:
        """Record what a unit of work has made, in this or in another process."""

    def catch_up(self, ranks: Ranks) -> None:
        """Wait for all processes of the job; what the first has noted by then, all know."""

    def begin_with(self, other: Path) -> None:
        """Take over what another job has done in its output directory, unless something has been done here."""

    def abandon(self) -> None:
        """Leave what is there for a run that goes on with it: the job failed."""

    def discard(self) -> None:
        """Forget and delete all that was done: the job fails, and would fail again if it went on from there."""

    def close(self) -> None:
        """Delete the work directory of a finished job."""


class RankBooks(Books):
    """The books of a process that shares units: what it makes goes to the first process, whose notes come back."""

    def __init__(self, output: Path, ranks: Ranks) -> None:
        super().__init__(output)
        self._ranks = ranks
        self._done: set[str] = set()
        self._told: dict[str, dict[str, object]] = {}

    def is_done(self, unit: str) -> bool:
        return unit in self._done

    def told(self, unit: str) -> Mapping[str, object]:
        return self._told.get(unit, {})

    def note(self, made: Outcome) -> None:
        self._ranks.post(made)

    def catch_up(self, ranks: Ranks) -> None:
        self._done, self._told = ranks.broadcast((self._done, self._told))


class PartBooks(Books):
    """The books of a part of a job in a directory of its work directory, which the job keeps, as NAME/UNIT."""

    def __init__(self, whole: Books, name: str) -> None:
        super().__init__(whole.work / name)
        self.fingerprint, self._whole, self._part = whole.fingerprint, whole, name
        with storage_errors(self.work):
            self.work.mkdir(parents=True, exist_ok=True)

    def is_done(self, unit: str) -> bool:
        return self._whole.is_done(f"{self._part}/{unit}")

    def told(self, unit: str) -> Mapping[str, object]:
        return self._whole.told(f"{self._part}/{unit}")

    def note(self, made: Outcome) -> None:
        self._whole.note(made._replace(unit=f"{self._part}/{made.unit}"))

    def _fresh(self) -> Iterable[Path]:
        return self._whole._fresh()

    def _name(self, path: Path) -> str:
        return self._whole._name(path)

    def catch_up(self, ranks: Ranks) -> None:
        self._whole.catch_up(ranks)
