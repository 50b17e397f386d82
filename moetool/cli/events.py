"""`--log-json`: what a command does, one JSON object a line (docs/jobs.md)."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from moetool.errors import UsageError, exit_code
from moetool.job.result import Json, Printed
from moetool.version import __version__

LOG_HELP = "Also append events to this file, one JSON object per line."
EVENTS_VERSION = 1  # of the fields of events: one more when a field goes or changes its meaning


class EventLog:
    """Appends to a file, each line by one call of the system: what a killed process leaves ends with a whole one.

    A log that can no longer be written to, on a full disk, is given up with one line on stderr: the job goes on.
    """

    def __init__(self, file: Path, *models: Path) -> None:
        """Raises `UsageError` where nothing can be written, or inside one of the `models`, those read and written."""
        for model in models:
            if file.resolve().is_relative_to(model.resolve()):
                raise UsageError(f"--log-json {file} lies inside {model}, which holds a model alone. Write beside it.")
        try:
            self._descriptor: int | None = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":  # the end of another program's
                os.write(self._descriptor, b"\n")
        except OSError as error:
            raise UsageError(f"--log-json {file}: {error.strerror or error}.") from error

    def write(self, event: str, **fields: Json) -> None:
        """Append one event to the log, as a line of JSON with its time."""
        if self._descriptor is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        data = (json.dumps({"time": now, "event": event, **fields}) + "\n").encode("ascii")
        try:
            os.write(self._descriptor, data)
        except OSError as error:
            self._descriptor = None
            print(f"--log-json ends here: {error.strerror or error}", file=sys.stderr)


def started(events: EventLog, job: Mapping[str, Json], options: Mapping[str, Json], **more: Json) -> None:
    """Write the first event of a command to the event log, with versions, process id and options."""
    versions: dict[str, Json] = {"events_version": EVENTS_VERSION, "moetool_version": __version__}
    events.write("started", **versions, **job, pid=os.getpid(), options=options, **more)


@contextmanager
def logged(events: EventLog | None) -> Iterator[Callable[[Printed], None]]:
    """Context manager that records how a job ends: its result, with which the given function is to be called, or its
    error."""

    def ended(result: Printed) -> None:
        if events is not None:
            events.write("finished", exit_code=0, result=result.to_json())

    try:
        yield ended
    except BaseException as error:
        if events is not None:
            events.write("failed", exit_code=exit_code(error), error=str(error) or type(error).__name__)
        raise
