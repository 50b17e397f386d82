"""`eval --against`: KL, agreement and paired losses, by hand and in both ways of keeping the original."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import copy_of, swap_tokens

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import ResourceError
from moetool.job.progress import Progress
from moetool.measure import divergence
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.runtime.loading import load_model

LENGTH, WINDOWS = 32, 6
FEW = ("--sequence-length", LENGTH, "--windows", WINDOWS)


@pytest.fixture(scope="module")
def other(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that predicts something else."""
    path: Path = save_model(make_mixtral(seed=1), tmp_path_factory.mktemp("models") / "other")
    return path


def by_hand(original: Path, model: Path, tokens: torch.Tensor) -> dict[str, float]:
    windows = tokens[: LENGTH * WINDOWS].view(WINDOWS, LENGTH)
    logs = [
        load_model(Checkpoint.open(path), torch.float32)(input_ids=windows)
        .logits[:, :-1]
        .detach()
        .double()
        .log_softmax(-1)
        for path in (original, model)
    ]
    losses = [-log.gather(-1, windows[:, 1:, None])[..., 0].mean(1) for log in logs]
    deltas = losses[1] - losses[0]
    return {
        "kl": (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item(),
        "agreement": (logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean().item(),
        "nll": losses[0].mean().item(),
        "excess": deltas.mean().item(),
        "excess_error": deltas.std().item() / WINDOWS**0.5,
    }


def test_against_is_what_its_definitions_say(run_cli, tiny_mixtral, other, tiny_text, tiny_tokens):
    arguments = ("eval", other, "--data", tiny_text, *FEW, "--batch-tokens", 4 * LENGTH)
    told = run_cli(*arguments, "--against", tiny_mixtral, "--json").json
    expected = by_hand(tiny_mixtral, other, tiny_tokens)
    assert expected["kl"] > 0.01
    assert {name: told["against"][name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert told["against"]["model"] == str(tiny_mixtral)
    assert told["nll"] - told["against"]["nll"] == pytest.approx(told["against"]["excess"], abs=1e-9)
    assert "against" not in run_cli(*arguments, "--json").json


def test_a_model_does_not_diverge_from_itself(run_cli, tiny_mixtral, tiny_text):
    arguments = ("--data", tiny_text, "--sequence-length", LENGTH, "--windows", 1, "--against", tiny_mixtral)
    found = run_cli("eval", tiny_mixtral, *arguments, "--json").json["against"]
    assert (found["kl"], found["agreement"], found["excess"], found["excess_error"]) == (0, 1, 0, None)
    shown = run_cli("eval", tiny_mixtral, *arguments).stdout
    assert "100.00%" in shown
    assert "±" not in shown


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_original_that_does_not_fit_beside_it_gives_the_same(monkeypatch, tiny_mixtral, other, tiny_text, dtype):
    options = EvaluationOptions(
        data=str(tiny_text), sequence_length=LENGTH, windows=WINDOWS, batch_tokens=4 * LENGTH, compute_dtype=dtype,
        against=str(tiny_mixtral),
    )  # fmt: skip
    beside = perplexity(str(other), options)
    said: list[str] = []
    progress = Progress()
    monkeypatch.setattr(progress, "log", said.append)
    monkeypatch.setattr(divergence, "both_fit", lambda *_: False)
    assert perplexity(str(other), options, progress).against == beside.against
    size = WINDOWS * (LENGTH - 1) * 288 * (4 if dtype == "float32" else 2)
    assert any(f"{size / 1000:.1f} kB" in line for line in said), said


def test_logits_that_do_not_fit_on_the_disk_are_refused(monkeypatch, tiny_mixtral, other, tiny_text):
    monkeypatch.setattr(divergence, "both_fit", lambda *_: False)
    usage = namedtuple("usage", "total used free")(10**6, 10**6, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    options = EvaluationOptions(data=str(tiny_text), sequence_length=LENGTH, windows=WINDOWS, against=str(tiny_mixtral))
    with pytest.raises(ResourceError, match=r"100 B free.*--windows"):
        perplexity(str(other), options)


def test_an_original_of_another_shape_is_remarked_on(
    run_cli, make_mixtral, save_model, tiny_mixtral, tiny_text, tmp_path
):
    shallow = save_model(make_mixtral(num_hidden_layers=1), tmp_path / "shallow")
    asked = ("eval", shallow, "--data", tiny_text, *FEW)
    said = run_cli(*asked, "--against", tiny_mixtral)
    assert said.code == 0, said.stderr
    assert "has 1 layers of hidden size 32" in said.stdout
    assert "These are two separate models" in said.stdout
    several = run_cli(asked[0], tiny_mixtral, *asked[1:], "--against", tiny_mixtral)
    assert several.stdout.count("two separate models") == 1, "of the shallow one"
    assert "unrelated" not in run_cli(*asked, "--against", shallow, "--json").json


def test_another_tokenizer_cannot_be_compared(run_cli, tiny_mixtral, tiny_text, tmp_path):
    """The same tokens, two of them the other way round."""
    changed = swap_tokens(copy_of(tiny_mixtral, tmp_path / "changed"))
    result = run_cli("eval", tiny_mixtral, "--data", tiny_text, *FEW, "--against", changed)
    assert result.code == 3
    assert "differ in 4 entries" in result.stderr


def test_another_vocabulary_cannot_be_compared(run_cli, make_mixtral, save_model, tiny_mixtral, tiny_text, tmp_path):
    larger = save_model(make_mixtral(vocab_size=300), tmp_path / "larger")
    result = run_cli("eval", tiny_mixtral, "--data", tiny_text, *FEW, "--against", larger)
    assert result.code == 3
    assert "predicts 300 tokens" in result.stderr
    assert "288" in result.stderr


def test_a_table_has_models_of_one_vocabulary(run_cli, tiny_mixtral, tiny_text, tmp_path):
    """A text in fewer tokens has another perplexity, which says nothing of the model."""
    changed = swap_tokens(copy_of(tiny_mixtral, tmp_path / "changed"))
    same = copy_of(tiny_mixtral, tmp_path / "same")
    result = run_cli("eval", tiny_mixtral, same, changed, "--data", tiny_text, *FEW)
    assert result.code == 3
    assert "differ in 4 entries" in result.stderr
    assert "Evaluate each by itself" in result.stderr
    assert run_cli("eval", tiny_mixtral, same, "--data", tiny_text, *FEW, "--json").code == 0
