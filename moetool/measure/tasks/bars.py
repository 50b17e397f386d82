"""lm-eval's progress bars as our own: they tell how long is left, and do not fill a log file with themselves."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from moetool.job.progress import Progress

_PLACES = ("lm_eval.models.huggingface", "lm_eval.api.model", "lm_eval.api.task")
_ASKED = "Running"  # how the description of a bar begins that counts requests
_PHASE = "Tasks"


class _Bar:
    """What lm-eval takes for a bar of tqdm. Those that count requests are a phase each; others are not shown."""

    def __init__(
        self,
        opened: "list[_Bar]",
        progress: Progress,
        items: Sequence[Any] = (),
        *,
        total: int | None = None,
        desc: str | None = None,
        disable: bool = False,
        **_: object,
    ) -> None:
        self._opened, self._progress, self._items = opened, progress, items
        if not disable and (desc or "").startswith(_ASKED):
            opened.append(self)
            progress.start(_PHASE, len(items) if total is None else total, "requests")

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()
        self.close()

    def update(self, steps: int = 1) -> None:
        """Count `steps` requests more as answered."""
        for _ in range(steps if self in self._opened else 0):
            self._progress.advance()

    def close(self, *, stopped: bool = False) -> None:
        """End the phase, if this bar is one; `stopped` where it is not done."""
        if self in self._opened:
            self._opened.remove(self)
            self._progress.finish(stopped=stopped)


@contextmanager
def told_to(progress: Progress) -> Iterator[None]:
    """Let `progress` show what lm-eval does in the `with` block."""
    opened: list[_Bar] = []
    found = [importlib.import_module(name) for name in _PLACES]
    before = {place: place.__dict__["tqdm"] for place in found if "tqdm" in place.__dict__}
    try:
        for place in before:
            place.__dict__["tqdm"] = partial(_Bar, opened, progress)
        yield
    finally:
        for place, bar in before.items():
            place.__dict__["tqdm"] = bar
        for bar in [*opened]:
            bar.close(stopped=True)
