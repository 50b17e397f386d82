"""Lock on a file by which one process at a time works in a directory; the system releases it when the process ends."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import shlex
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Self

from moetool.checkpoint.files import storage_errors
from moetool.errors import UsageError

# A process never refuses itself a POSIX lock, so its own are remembered: by device and inode.
_OWN: dict[tuple[int, int], str] = {}
_OWN_GUARD = threading.RLock()  # a lock may be collected while another is taken
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Lock:
    """An exclusive lock, held from construction to `release` or the end of the process.

    A POSIX record lock and not `flock`: NFS has the former, and children that outlive a killed parent (workers of a
    data loader) inherit the latter. It is lost when this process closes the file anywhere, so nothing else opens it.

    Args:
        path: the file to lock; made if it is not there, with its directories.
        what: what is locked, for people.

    Attributes:
        is_real: false on a file system without locks, where nothing keeps others out.

    Raises:
        UsageError: another run has it; says which.
        ResourceError: the file cannot be made.
    """

    def __init__(self, path: Path, what: object) -> None:
        self.path, self.is_real = path, True
        self._key: tuple[int, int] | None = None
        while not self._take(what):
            continue

    def _take(self, what: object) -> bool:
        """Whether the file that was locked is still the one of that name: who had it may have removed it."""
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with _OWN_GUARD:
            with contextlib.suppress(FileNotFoundError):
                if (holder := _OWN.get(_identity(self.path.stat()))) is not None:
                    raise UsageError(_refusal(what, holder))
            try:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                return False
            except OSError as error:
                with storage_errors(self.path):
                    raise error
            try:
                self._lock(what)
                key = _identity(os.fstat(self._descriptor))
                if not self.path.exists() or _identity(self.path.stat()) != key:
                    os.close(self._descriptor)
                    return False
                note = _introduction()
                with storage_errors(self.path):
                    os.ftruncate(self._descriptor, 0)
                    os.pwrite(self._descriptor, json.dumps(note).encode(), 0)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(self._descriptor)
                raise
            self._key = key
            _OWN[key] = _described(note)
        return True

    def _lock(self, what: object) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UsageError(_refusal(what, self._holder())) from None
            if error.errno not in _NO_LOCKS:
                with storage_errors(self.path):
                    raise
            self.is_real = False

    def _holder(self) -> str:
        try:
            return _described(json.loads(os.pread(self._descriptor, 1 << 16, 0)))
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"  # which has not introduced itself yet

    def release(self, *, remove: bool = False) -> None:
        """Let others have it, and with `remove` delete the file and its directory, if that holds nothing else."""
        with _OWN_GUARD:
            if self._key is None:
                return
            # Once only: the file's inode and the descriptor's number may be another's afterwards.
            del _OWN[self._key]
            self._key = None
            if remove:
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            if remove:
                with contextlib.suppress(OSError):  # somebody else is there already
                    self.path.parent.rmdir()

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _introduction() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "command": shlex.join(sys.argv),
    }


def _described(note: dict[str, object]) -> str:
    return f"process {note['pid']} on {note['host']}, since {note['since']}: {note['command']}"


def _refusal(what: object, holder: str) -> str:
    return f"Another run is writing {what} ({holder}). Wait until it ends, or stop it; then --resume goes on with it."
