"""The output directory while a job is at work in it, and the journal that lets the job be resumed.

Everything unfinished lives in `OUTPUT/.moetool`, which is removed at the end. Each unit of work leaves its files there
(written to a temporary name and renamed) and then one line in the journal, so what the journal lists is done, whatever
happened to the process. The fingerprint of the plan must match to go on.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

from moetool.checkpoint.files import storage_errors
from moetool.errors import UsageError

WORK_DIRECTORY = ".moetool"
FINISHED = "finished"  # the journal's last unit


class Workspace:
    """One job's output directory.

    Raises:
        UsageError: the directory is not empty and neither resuming nor overwriting was asked for; there is nothing to
            resume; or what is there was started with other settings.
    """

    def __init__(self, output: Path, fingerprint: str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.output, self.work = output, output / WORK_DIRECTORY
        self._journal = self.work / "journal.jsonl"
        if resume and overwrite:
            raise UsageError("--resume goes on with what is there, --overwrite throws it away: give one of them.")
        if output.exists() and not output.is_dir():
            raise UsageError(f"{output} exists and is not a directory.")
        if resume and FINISHED in self._read_journal():
            shutil.rmtree(self.work)  # the process died while it was tidying up
        occupied = output.is_dir() and any(output.iterdir())
        if occupied and resume and not self.work.exists():
            finished = (output / "moetool.json").exists()
            state = "is finished" if finished else "is not empty and holds no unfinished run of moetool"
            raise UsageError(f"{output} {state}: there is nothing to resume.")
        if occupied and not resume and not overwrite:
            unfinished = " It holds an unfinished run: --resume goes on with it." if self.work.exists() else ""
            raise UsageError(f"{output} is not empty.{unfinished} --overwrite deletes what is there.")
        if occupied and overwrite:
            if not (self.work.exists() or (output / "moetool.json").exists()):
                raise UsageError(
                    f"{output} is not empty and was not written by moetool (no moetool.json): not deleting it. "
                    "Remove it yourself or choose another place."
                )
            shutil.rmtree(output)
        self._is_new = not output.exists()
        with storage_errors(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
        self._check_fingerprint(fingerprint)
        self._done = self._read_journal()

    def _check_fingerprint(self, fingerprint: str) -> None:
        path = self.work / "fingerprint"
        if not path.exists():
            path.write_text(fingerprint)
        elif path.read_text() != fingerprint:
            raise UsageError(
                f"The run in {self.output} was started with other settings or another input. "
                "Repeat the first command with --resume, or start again with --overwrite."
            )

    def _read_journal(self) -> set[str]:
        if not self._journal.exists():
            return set()
        text = self._journal.read_text()
        if text and not text.endswith("\n"):  # the process died writing this line; the next one must not join it
            with self._journal.open("a") as file:
                file.write("\n")
        done = set()
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                done.add(json.loads(line)["unit"])
        return done

    def is_done(self, unit: str) -> bool:
        """Whether the journal lists a unit."""
        return unit in self._done

    @property
    def is_resumed(self) -> bool:
        """Whether anything had been finished before this process began."""
        return bool(self._done)

    def done(self, unit: str) -> None:
        """Note that a unit's files are in place."""
        with self._journal.open("a") as file:
            file.write(json.dumps({"unit": unit}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._done.add(unit)

    def abandon(self) -> None:
        """The job failed. If nothing is there to go on with, leave nothing at all: a mended command can start."""
        if not self._done and list(self.output.iterdir()) == [self.work]:
            shutil.rmtree(self.work)
            if self._is_new:
                self.output.rmdir()

    def close(self) -> None:
        """The job is finished: remove everything that was only for the work, the journal that says so last."""
        self.done(FINISHED)
        for path in self.work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != self._journal:
                path.unlink()
        shutil.rmtree(self.work)


class FollowingWorkspace(Workspace):
    """That of a process beside the first of a job: it works in the same place, and the first does all bookkeeping."""

    def __init__(self, output: Path) -> None:
        self.output, self.work = output, output / WORK_DIRECTORY
        self._done = set()

    def done(self, unit: str) -> None:
        self._done.add(unit)

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass
