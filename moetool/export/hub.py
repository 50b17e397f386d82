"""Upload of a checkpoint to the Hugging Face hub, after its files are checked."""

import glob
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from moetool.checkpoint.digests import files_of
from moetool.checkpoint.files import TEMPORARY
from moetool.checkpoint.names import WEIGHTS, WORK_DIRECTORY
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import first_line, local_path
from moetool.errors import InvalidInputError, MoetoolError, UsageError
from moetool.job.progress import Progress
from moetool.job.result import Printed
from moetool.measure.verification import exported_gguf, verify_files


@dataclass(frozen=True, kw_only=True)
class PushedFile(Printed):
    """A file of an upload: its name in the repository, and its size in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Pushed(Printed):
    """Result of an upload to the hub, or of its dry run.

    Attributes:
        model, repo: as they were given.
        url: of the repository; `None` of a dry run.
        bytes: of all files together.
        files: sorted by name.
        notes: what of the files is not as it was written, and no damage.
    """

    model: str
    repo: str
    url: str | None
    bytes: int
    files: Sequence[PushedFile]
    notes: Sequence[str]


def push(
    model: str,
    repo: str,
    *,
    public: bool,
    revision: str | None,
    message: str | None,
    dry_run: bool,
    progress: Progress,
) -> Pushed:
    """Upload a checkpoint's directory, its files verified against their digests before. What is on the hub already is
    not sent again, so that the same call goes on with what was interrupted.

    Args:
        model: a directory.
        repo: `owner/name`, or a name of one's own; made if it is not there.
        public: whether anybody may read a repository that has to be made.
        revision: a branch that is there; `main` without one.
        message: of the commit.
        dry_run: only say what would be uploaded; the hub is not asked.
        progress: told what is verified and uploaded.

    Raises:
        UsageError: this is no directory, no name of a repository, or there are weights of another model.
        InvalidInputError: the checkpoint is not finished, or the hub refuses or cannot be reached.
        VerificationError: a file is not what was written.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    checkpoint = _finished(model, repo)
    with _said_of(repo):
        validate_repo_id(repo)
    progress.log(f"Verifying {model}.")
    notes = verify_files(checkpoint)
    # Not resolved: a link in the directory is uploaded under its own name.
    paths = [path for path in files_of(checkpoint.path) if not path.name.endswith(TEMPORARY)]
    files = [PushedFile(name=path.relative_to(checkpoint.path).as_posix(), bytes=path.stat().st_size) for path in paths]
    made = None
    with _said_of(repo):
        if not dry_run:
            api = HfApi(library_name="moetool")
            made = api.create_repo(repo, private=not public, exist_ok=True)
            _refuse_others(made.repo_id, api.list_repo_files(made.repo_id, revision=revision), files)
            progress.log(f"Uploading to {made.repo_id}.")
            api.upload_folder(
                repo_id=made.repo_id,
                folder_path=checkpoint.path,
                revision=revision,
                commit_message=message or "Upload by moetool",
                allow_patterns=[glob.escape(file.name) for file in files],
            )
    url = None if made is None else str(made)
    return Pushed(model=model, repo=repo, url=url, bytes=sum(file.bytes for file in files), files=files, notes=notes)


def _finished(model: str, repo: str) -> Checkpoint:
    path = local_path(model)
    if not path.is_dir():
        raise UsageError(f"{model} is no directory: only a checkpoint that is here can be pushed.")
    if (path / WORK_DIRECTORY).exists():
        raise InvalidInputError(f"{model} holds an unfinished run. Finish it (--resume), then push.")
    if exported_gguf(path) is not None:
        line = shlex.join(["hf", "upload", repo, model, "--private"])
        raise UsageError(f"{model} is an export to GGUF: only checkpoints can be pushed. {line} uploads it.")
    return Checkpoint.open(path)


def _refuse_others(repo: str, there: Sequence[str], files: Sequence[PushedFile]) -> None:
    """Raise `UsageError` for a repository with weights that would not be replaced."""
    names = {file.name for file in files}
    if others := [name for name in there if name.endswith(WEIGHTS) and name not in names]:
        raise UsageError(
            f"{repo} holds weights of another model ({others[0]}{', …' if others[1:] else ''}), which whoever "
            "loads it could get. Choose another repository or revision, or delete them there."
        )


@contextmanager
def _said_of(repo: str) -> Iterator[None]:
    """Whatever the hub's library raises in a `with` block, with what to do about it."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except MoetoolError:
        raise
    except HFValidationError as error:
        raise UsageError(f"{repo!r} cannot be a repository: {first_line(error)}.") from error
    except Exception as error:  # the transport library differs between versions of huggingface_hub
        reasons = [error] if error.__cause__ is None else [error, error.__cause__]
        told = "; ".join(f"{type(reason).__name__}: {first_line(reason)}" for reason in reasons)
        raise InvalidInputError(
            f"Pushing to {repo} failed ({told}). Log in with a token that may "
            "write (`hf auth login`) and check the connection; the same command goes on."
        ) from error
