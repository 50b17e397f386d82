"""lm-eval's bars as phases of our own progress, with modules that stand for lm-eval's."""

import sys
from types import ModuleType
from typing import Any

import pytest

from moetool.job.progress import Progress
from moetool.measure.tasks.bars import told_to

PLACES = (
    "lm_eval",
    "lm_eval.models",
    "lm_eval.models.huggingface",
    "lm_eval.api",
    "lm_eval.api.model",
    "lm_eval.api.task",
)


class Noted(Progress):
    """What it was told, one word each."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def start(self, phase: str, total: int, unit: str = "") -> None:
        self.seen += [phase, total, unit]

    def advance(self) -> None:
        self.seen.append("step")

    def finish(self, *, stopped: bool = False) -> None:
        self.seen.append("stopped" if stopped else "done")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in PLACES:
        module: Any = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    found: Any = sys.modules["lm_eval.models.huggingface"]
    found.tqdm = "its own"
    return found


def test_bars_that_count_requests_are_phases(modules: Any) -> None:
    progress = Noted()
    with told_to(progress):
        assert list(modules.tqdm([1, 2], desc="Tokenizing inputs")) == [1, 2]
        assert list(modules.tqdm([1, 2], desc="Running loglikelihood requests", disable=True)) == [1, 2]
        bar = modules.tqdm(total=3, disable=False, desc="Running loglikelihood requests")
        bar.update(2)
        bar.update()
        bar.close()
        assert list(modules.tqdm(["a"], desc="Running generate_until requests")) == ["a"]
    assert modules.tqdm == "its own"
    first = ["Tasks", 3, "requests", "step", "step", "step", "done"]
    assert progress.seen == [*first, "Tasks", 1, "requests", "step", "done"]


def test_what_is_raised_stops_the_phase(modules: Any) -> None:
    progress = Noted()

    def fail() -> None:
        with told_to(progress):
            modules.tqdm(total=3, desc="Running loglikelihood requests").update()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert progress.seen == ["Tasks", 3, "requests", "step", "stopped"]
    assert modules.tqdm == "its own"
