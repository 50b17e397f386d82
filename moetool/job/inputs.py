"""The checkpoints and texts that a job reads: what is noted of them when it begins, and whether they are still those
when it goes on."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from moetool.calibration.data import data_files
from moetool.checkpoint.files import FastDigest, fast_digest
from moetool.checkpoint.header import reading
from moetool.checkpoint.identity import FileState, check_unchanged, file_states
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError

NotedInputs: TypeAlias = dict[str, dict[str, FileState]]
_FILES = "files"  # beside the names of checkpoints
_DIGEST = "xxh3"


class Inputs:
    """The checkpoints and other files that a job reads.

    Args:
        checkpoints: by what each is to the job.
        files: texts on this machine, each a file or a folder, and others that decide the result.
        said_same: whether the user vouches for weight files that were written again since.
    """

    def __init__(
        self, checkpoints: Mapping[str, Checkpoint] = {}, files: Sequence[Path] = (), *, said_same: bool = False
    ) -> None:
        self._checkpoints, self._said_same = checkpoints, said_same
        self._files = {f"{number} {path.name}": path for number, path in enumerate(files, 1)}

    @cached_property
    def states(self) -> NotedInputs:
        """States (time, SHA-256) of the weight files of every checkpoint that is too large to be hashed whole; digests
        of the other files.

        Raises:
            InvalidInputError: a file cannot be read.
        """
        found = {name: file_states(checkpoint) for name, checkpoint in self._checkpoints.items()}
        found[_FILES] = {name: {_DIGEST: _content_digest(path)} for name, path in self._files.items()}
        return {name: states for name, states in found.items() if states}

    def check(self, noted: object) -> None:
        """Compare with what was `noted` when the job began, as it was read from a file.

        Raises:
            InvalidInputError: a weight file holds something else than then.
            UsageError: a weight file was written again, and nothing tells whether it holds the same; or a text or
                another file holds something else.
        """
        try:
            states = TypeAdapter(NotedInputs).validate_python(noted)
        except ValidationError:  # damaged, or of no moetool
            return
        for name, checkpoint in self._checkpoints.items():
            check_unchanged(checkpoint, states.get(name, {}), said_same=self._said_same)
        now = self.states.get(_FILES, {})
        for name, path in self._files.items():
            if (then := states.get(_FILES, {}).get(name)) is not None and then != now[name]:
                raise UsageError(
                    f"{path} has changed since this run began. Put back what it held, or start again with --overwrite."
                )


def _content_digest(path: Path) -> str:
    """Digest of a file, or of the names and contents of a folder's texts."""
    with reading(path):
        if path.is_file():
            return fast_digest(path)
        whole = FastDigest()
        for file in data_files(path):
            whole.update(f"{file.relative_to(path)} {fast_digest(file)}\n".encode())
    return str(whole)
