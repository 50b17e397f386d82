"""Commands that take long without being jobs: with progress, a heartbeat, and a log for programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from moetool.cli.display import Display
from moetool.cli.events import LOG_HELP, EventLog, logged, started
from moetool.job.result import Json, Printed

LogJson = Annotated[Path | None, typer.Option("--log-json", help=LOG_HELP)]


@contextmanager
def watched(
    log: Path | None, command: str, models: Sequence[str], options: Mapping[str, Json]
) -> Iterator[tuple[Display, Callable[[Printed], None]]]:
    """Where a command in a `with` block shows how far it is, and what it calls with its result.

    Args:
        log: `--log-json`, if it was given.
        command: its name.
        models: that it reads.
        options: with their defaults.

    Raises:
        UsageError: nothing can be written to the log.
    """
    events = None if log is None else EventLog(log, *map(Path, models))
    with logged(events) as ended:
        if events is not None:
            started(events, {"command": command, "input": list(models)}, options)
        yield Display(events), ended
