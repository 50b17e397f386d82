"""The checkpoints that a job reads: what is noted of them when it begins, and whether they are still those when it goes
on."""

from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from moetool.checkpoint.identity import FileState, check_unchanged, file_states
from moetool.checkpoint.reader import Checkpoint

NotedInputs: TypeAlias = dict[str, dict[str, FileState]]


class Inputs:
    """The checkpoints that a job reads.

    Args:
        checkpoints: by what each is to the job.
        said_same: whether the user vouches for files that were written again since.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint] = {}, *, said_same: bool = False) -> None:
        self._checkpoints, self._said_same = checkpoints, said_same

    @cached_property
    def states(self) -> NotedInputs:
        """File states (size, time, digest) of the weights of every input that is too large to be hashed whole."""
        found = {name: file_states(checkpoint) for name, checkpoint in self._checkpoints.items()}
        return {name: states for name, states in found.items() if states}

    def check(self, noted: object) -> None:
        """Compare with what was `noted` when the job began, as it was read from a file.

        Raises:
            InvalidInputError: a weight file holds something else than then.
            UsageError: a weight file was written again, and nothing tells whether it holds the same.
        """
        try:
            states = TypeAdapter(NotedInputs).validate_python(noted)
        except ValidationError:  # damaged, or of no moetool
            return
        for name, checkpoint in self._checkpoints.items():
            check_unchanged(checkpoint, states.get(name, {}), said_same=self._said_same)
