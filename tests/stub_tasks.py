"""lm-eval's answers without lm-eval, in the shape in which its `simple_evaluate` gives them."""

from collections.abc import Sequence
from typing import Any

import pytest

from moetool.measure.tasks.harness import OpenTasks
from moetool.measure.tasks.options import TaskOptions, expanded


def results(names: Sequence[str], few_shot: int = 0, questions: int = 12) -> dict[str, Any]:
    """Accuracy 1/2, 1/3, 1/4 … of one task after the other."""
    return {
        "results": {
            name: {
                "name": name,
                "alias": name,
                "sample_len": questions,
                "acc,none": 1 / (place + 2),
                "acc_stderr,none": 0.1 * (place + 1),
                "bleu,remove_space": 0.25,
                "bleu_stderr,remove_space": "N/A",
            }
            for place, name in enumerate(names)
        },
        "versions": dict.fromkeys(names, 1.0),
        "n-shot": dict.fromkeys(names, few_shot),
        "n-samples": {name: {"original": 100, "effective": questions} for name in names},
    }


def stub_tasks(monkeypatch: pytest.MonkeyPatch) -> list[TaskOptions]:
    """Answer for lm-eval; returns the options of every model that was asked, as it goes."""
    seen: list[TaskOptions] = []

    def asked(opened: OpenTasks, model: Any, tokenizer: Any, options: TaskOptions, _: Any) -> dict[str, Any]:
        assert hasattr(model, "generate")
        assert tokenizer("a")["input_ids"]
        seen.append(options)
        return results(opened.tasks, options.few_shot or 0, options.limit or 100)

    place = "moetool.measure.tasks.evaluating"
    monkeypatch.setattr(f"{place}.open_tasks", lambda options: OpenTasks(expanded(options.tasks), None, "0.4.13"))
    monkeypatch.setattr(f"{place}.asked", asked)
    return seen
