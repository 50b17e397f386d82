"""lm-eval itself, on a task that is written here. It takes a minute to install, so that most machines do without."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from moetool.errors import InvalidInputError, UsageError
from moetool.job.progress import Progress
from moetool.measure.tasks.evaluating import evaluate
from moetool.measure.tasks.harness import open_tasks
from moetool.measure.tasks.options import TaskOptions

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of lm-eval and all that it brings
]

TASK = """
task: vowels
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{{{word}}}} goes on with"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 2}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two tasks: the data of one is missing."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    questions = [
        {"word": word, "choices": ["a", "bo", "ki"], "answer": place % 3} for place, word in enumerate("abcdefgh")
    ]
    (tasks / "vowels.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tasks / "vowels.yaml").write_text(TASK.format(data="vowels.jsonl"))
    (tasks / "lost.yaml").write_text(TASK.format(data="lost.jsonl").replace("task: vowels", "task: lost"))
    unsafe = TASK.format(data="vowels.jsonl").replace("task: vowels", "task: unsafe\nunsafe_code: true")
    (tasks / "unsafe.yaml").write_text(unsafe)
    return tasks


def options(folder: Path, *tasks: str, **more: Any) -> TaskOptions:
    return TaskOptions(tasks=tasks, tasks_dir=str(folder), **more)


@pytest.mark.parametrize("few_shot", [None, 2])
def test_scores_are_those_of_lm_eval_itself(
    folder: Path, small: Path, few_shot: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a compressed model, twice in a row, and of lm-eval when it loads the model by itself, as its commands do."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    asked = options(folder, "vowels", few_shot=few_shot, batch_size=3)
    first, second = evaluate([str(small), str(small)], None, asked, Progress()).models
    assert first.tasks is not None
    assert second.tasks is not None
    assert first.tasks.scores == second.tasks.scores
    (score,) = first.tasks.scores
    monkeypatch.chdir(folder)
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(small), "dtype": "float32"},
        tasks=["vowels"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        num_fewshot=few_shot,
        batch_size=3,
        device="cpu",
    )
    numbers = theirs["results"]["vowels"]
    assert (score.value, score.error) == (numbers["acc,none"], numbers["acc_stderr,none"])
    assert (score.questions, score.few_shot, score.version) == (8, few_shot or 0, "2")


def test_limit(folder: Path, tiny_mixtral: Path) -> None:
    (found,) = evaluate([str(tiny_mixtral)], None, options(folder, "vowels", limit=3), Progress()).models
    assert found.tasks is not None
    assert found.tasks.scores[0].questions == 3


def test_data_that_is_not_there_is_said_before_a_model_is_loaded(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"Task lost cannot be opened .*lost\.jsonl"):
        open_tasks(options(folder, "vowels", "lost"))


def test_code_is_run_only_for_who_says_so(folder: Path) -> None:
    with pytest.raises(UsageError, match="--confirm-run-unsafe-code"):
        open_tasks(options(folder, "unsafe"))
    assert open_tasks(options(folder, "unsafe", confirm_run_unsafe_code=True)).tasks


def test_folders_that_hold_no_tasks(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no task file")):
        with pytest.raises(UsageError, match=said):
            open_tasks(options(folder, "vowels"))


@pytest.mark.slow
def test_unknown_tasks_and_tasks_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval reads the files of all its tasks for it."""
    import datasets

    with pytest.raises(UsageError, match=r"'vowel'.* Did you mean vowels\?"):
        open_tasks(options(folder, "vowel"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInputError, match=r"Task piqa cannot be opened: it needs baber/piqa of the hub"):
        open_tasks(options(folder, "piqa"))
