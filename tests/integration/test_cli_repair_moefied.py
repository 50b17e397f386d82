"""`moetool repair` of moefied models, run as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import divergence, logits, tensors_of
from torch import Tensor

SHORT = ("--samples", 64, "--sequence-length", 32, "--held-out", 4, "--batch-size", 4, "--steps", 16)
KINDS = {"mlp": ("llama", ()), "fixed": ("gpt2", ("--selector", "random"))}


@pytest.fixture
def repaired(run_cli: Any, tiny_text: Path, tmp_path: Path) -> Any:
    def run(source: Path, original: Path, *options: object) -> Any:
        words = ("repair", source, tmp_path / "out", "--to", original, "--calibration", tiny_text, *SHORT, *options)
        return run_cli(*words, "--json")

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_nearer_in_the_same_layout(
    kind: str, dense: Any, moefy: Any, repaired: Any, tokens: Tensor, tmp_path: Path
) -> None:
    family, selector = KINDS[kind]
    original = dense(family)
    source = moefy(original, "--experts", 8, "--keep", 0.5, *selector).path
    result = repaired(source, original, "--learning-rate", 0.002)
    assert result.code == 0, result.stderr
    told, output, before = result.json, tmp_path / "out", tensors_of(source)
    after = tensors_of(output)
    assert {name: (own.dtype, own.shape) for name, own in after.items()} == {
        name: (own.dtype, own.shape) for name, own in before.items()
    }
    assert json.loads((output / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    moved = {name for name in before if not before[name].equal(after[name])}
    assert any(name.endswith("centre") for name in moved)
    assert any("attn" in name for name in moved)
    assert not [name for name in moved if "selector" in name or "order" in name or "embed" in name or "wte" in name]
    assert told["kept_step"] > 0
    assert all(told["kl_after"][name] <= told["kl_before"][name] for name in told["kl_before"])
    whole = logits(original, tokens)
    assert divergence(logits(output, tokens), whole) < divergence(logits(source, tokens), whole)


def test_small_leaves_matrices_alone(dense: Any, moefy: Any, repaired: Any, tmp_path: Path) -> None:
    original = dense("llama")
    source = moefy(original, "--experts", 8, "--keep", 0.5).path
    result = repaired(source, original, "--train", "small", "--learning-rate", 0.002)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved
    assert all(before[name].dim() == 1 for name in moved)
    assert result.json["trained_parameters"] == sum(
        own.numel() for own in before.values() if own.dim() == 1 and own.numel() > 1 and own.is_floating_point()
    )


def test_layers_that_cannot_run_again_are_kept(dense: Any, moefy: Any, run_cli: Any, repaired: Any) -> None:
    original = dense("ctrl")
    source = moefy(original, "--experts", 8, "--keep", 0.5).path
    result = repaired(source, original, "--steps", 2)
    assert result.code == 0, result.stderr
    tune = ("tune", source, source.parent / "tuned", "--data", "bundled", "--gradient-checkpointing")
    refused = run_cli(*tune, "--dry-run")
    assert refused.code == 2
    assert "cannot run layers of ctrl again" in refused.stderr


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "phi3", "mpt"])
def test_the_plan_counts_what_is_trained(family: str, dense: Any, moefy: Any) -> None:
    from moetool.checkpoint.reader import Checkpoint
    from moetool.repair.costs import TrainedModel
    from moetool.repair.training import choose
    from moetool.runtime.loading import load_model

    checkpoint = Checkpoint.open(moefy(dense(family), "--experts", 8, "--keep", 0.5).path)
    for trains in ("small", "all"):
        parameters = choose(load_model(checkpoint, torch.float32), trains)
        planned = TrainedModel.of_moefied(checkpoint, trains).trained
        assert sum(parameter.numel() for parameter in parameters.values()) == planned


def test_a_result_is_repaired_again_and_evaluated(
    dense: Any, moefy: Any, repaired: Any, run_cli: Any, tiny_text: Path, tmp_path: Path
) -> None:
    original = dense("llama")
    once = repaired(moefy(original, "--experts", 8, "--keep", 0.5).path, original)
    assert once.code == 0, once.stderr
    first = (tmp_path / "out").rename(tmp_path / "first")
    again = repaired(first, original)
    assert again.code == 0, again.stderr
    assert all(again.json["kl_after"][name] <= again.json["kl_before"][name] for name in again.json["kl_before"])
    words = ("--data", tiny_text, "--sequence-length", 32, "--windows", 4, "--keep", 0.75, "--json")
    result = run_cli("eval", tmp_path / "out", *words)
    assert result.code == 0, result.stderr
    assert [name for name in result.json["calibration"] if "bundled" not in name] == [str(tiny_text)]  # of three steps


def test_no_routers_no_codes_in_the_plan(dense: Any, moefy: Any, repaired: Any) -> None:
    original = dense("llama")
    result = repaired(moefy(original, "--experts", 8, "--keep", 0.5).path, original, "--dry-run")
    assert result.code == 0, result.stderr
    assert not {"routing", "codes"} & result.json.keys()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("moefied", "is no dense model, which this one was made of"),
        ("mixture", "model_type llama"),
        ("self", "a moefied model is repaired on a text"),
    ],
)
def test_what_cannot_be_its_original_is_refused(
    wrong: str, said: str, dense: Any, moefy: Any, repaired: Any, tiny_mixtral: Path
) -> None:
    original = dense("llama")
    source = moefy(original, "--experts", 8, "--keep", 0.5).path
    to = {"moefied": source, "mixture": tiny_mixtral, "self": original}[wrong]
    result = repaired(source, to, *(("--calibration", "self") if wrong == "self" else ()))
    assert result.code in (2, 3)
    assert said in result.stderr


def test_options_and_models_that_make_no_sense_are_refused(dense: Any, moefy: Any, repaired: Any) -> None:
    original = dense("llama")
    result = repaired(moefy(original, "--experts", 8, "--keep", 0.5).path, original, "--routing", 3)
    assert result.code == 2
    assert "--routing: a moefied model has no routers" in result.stderr
    result = repaired(moefy(original, "--experts", 8, "--keep", 0.5).path, original, "--train", "routers")
    assert result.code == 2
    assert "--train routers: a moefied model has no routers" in result.stderr
    result = repaired(moefy(original, "--experts", 8, "--keep", 1).path, original)
    assert result.code == 3
    assert "computes all 8 experts (keep 1), so that nothing is to be learnt back" in result.stderr


def test_an_encoder_is_refused(dense: Any, moefy: Any, repaired: Any) -> None:
    original = dense("bert")
    result = repaired(moefy(original, "--experts", 8, "--keep", 0.5).path, original)
    assert result.code == 3
    assert "is an encoder (bert): repair compares predictions of the next token" in result.stderr


def test_a_dense_model_has_nothing_to_be_repaired(dense: Any, repaired: Any) -> None:
    original = dense("llama")
    result = repaired(original, original)
    assert result.code == 3
    assert "Traceback" not in result.stderr


def test_the_default_rate_falls_with_the_number_of_layers(
    dense: Any, moefy: Any, repaired: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = dense("llama")
    source = moefy(original, "--experts", 8, "--keep", 0.5).path
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    monkeypatch.setattr("moetool.repair.stage.RATE_LAYERS", 1)
    assert repaired(source, original, "--dry-run").json["learning_rate"] == pytest.approx(0.003 / layers)
    given = repaired(source, original, "--dry-run", "--learning-rate", 0.003)
    assert given.json["learning_rate"] == 0.003


@pytest.fixture
def in_one(run_cli: Any, tiny_text: Path, tmp_path: Path) -> Any:
    def run(original: Path, *options: object, name: str = "one") -> Any:
        words = ("moefy", original, tmp_path / name, "--experts", 8, "--keep", 0.5, "--calibration", tiny_text)
        return run_cli(*words, "--samples", 16, "--sequence-length", 32, "--json", *options)

    return run


def test_moefy_repairs_in_one_command(dense: Any, in_one: Any, run_cli: Any, tiny_text: Path, tmp_path: Path) -> None:
    original = dense("llama")
    result = in_one(original, "--repair", 3)
    assert result.code == 0, result.stderr
    assert result.json["stage"] == result.json["before_repair"]["stage"] == "g-moefication"
    assert not (tmp_path / "one-unrepaired").exists()
    again = in_one(original, "--repair", 3, "--resume")
    assert (again.code, again.json["status"]) == (0, "finished")
    told = "bytes_before", "bytes_after", "achieved_ratio"
    assert [again.json.get(name) for name in told] == [result.json.get(name) for name in told]

    assert in_one(original, name="made").code == 0
    text = ("--calibration", tiny_text, "--samples", 16, "--sequence-length", 32)
    made = run_cli("repair", tmp_path / "made", tmp_path / "two", "--to", original, *text, "--steps", 3)
    assert made.code == 0, made.stderr
    ours, theirs = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_moefy_plans_its_repair(dense: Any, moefy: Any, in_one: Any, repaired: Any, tmp_path: Path) -> None:
    original = dense("llama")
    plan = in_one(original, "--repair", 9, "--dry-run").json
    assert plan["repair_steps"] == 9
    made = moefy(original, "--experts", 8, "--keep", 0.5).path
    known = repaired(made, original, "--samples", 16, "--held-out", 16, "--dry-run").json
    assert plan["repair_most_memory_bytes"] == pytest.approx(known["training_memory_bytes"], rel=0.02)
    result = in_one(dense("bert"), "--repair", 3)
    assert result.code == 3
    assert "is an encoder (bert): repair compares predictions of the next token" in result.stderr
    assert not list(tmp_path.iterdir())
