"""lm-eval's results as records, and the means over groups."""

import math

import pytest
from stub_tasks import results

from moetool.measure.tasks.evaluating import group_means, task_scores
from moetool.measure.tasks.options import GROUPS, expanded

SEVEN = GROUPS["commonsense"]


def test_every_number_becomes_a_score_and_no_error_does() -> None:
    first, second, *others = task_scores(results(["one"], few_shot=5))
    assert not others
    assert (first.task, first.metric, first.filter, first.value, first.error) == ("one", "acc", "none", 0.5, 0.1)
    assert (first.questions, first.few_shot, first.version) == (12, 5, "1.0")
    assert (second.metric, second.filter, second.value, second.error) == ("bleu", "remove_space", 0.25, None)


def test_groups_of_lm_eval_are_scores_too() -> None:
    found = results(["one"])
    found["groups"] = {"both": {"alias": "both", "acc,none": 0.75, "acc_stderr,none": 0.01, "sample_len": 24}}
    group = task_scores(found)[0]
    assert (group.task, group.value, group.error, group.questions, group.few_shot) == ("both", 0.75, 0.01, 24, None)


def test_the_mean_over_a_group_and_its_error() -> None:
    mean, *others = [score for score in group_means(task_scores(results(SEVEN)), ["commonsense"]) if score.error]
    assert not others  # no other metric has errors
    assert (mean.task, mean.metric, mean.questions) == ("commonsense", "acc", None)
    assert mean.value == pytest.approx(sum(1 / (place + 2) for place in range(7)) / 7)
    assert mean.error == pytest.approx(math.sqrt(sum((0.1 * (place + 1)) ** 2 for place in range(7))) / 7)


def test_there_is_no_mean_over_a_part_of_a_group() -> None:
    assert group_means(task_scores(results(SEVEN[:-1])), ["commonsense"]) == []
    assert group_means(task_scores(results(SEVEN)), SEVEN) == []


def test_a_task_is_asked_once() -> None:
    assert expanded(("piqa", "commonsense", "mine")) == ("piqa", *(name for name in SEVEN if name != "piqa"), "mine")
