"""`moetool repair`, run as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_tensors, contents, copy_of, divergence, logits, swap_tokens, tensors_of
from sampling import sampled
from torch import Tensor

SHORT = ("--samples", 8, "--sequence-length", 32, "--held-out", 4, "--batch-size", 4)
# Where all numbers of 16 bits move.
MORE = {
    "d2moe": ("--learning-rate", 0.002),
    "hybrid": ("--learning-rate", 0.002, "--samples", 64),
    "reap": ("--learning-rate", 0.002, "--train", "all", "--samples", 64),
}
MADE = {
    "quantize": ("--bits", 2, "--group-size", 16),
    "d2moe": ("--ratio", 0.4),
    "hybrid": ("--ratio", 0.6),
    "ders-sparsify": ("--drop", 0.9),
    "reap": ("--experts", 3),
}


@pytest.fixture(scope="module")
def small(compress: Any, tiny_mixtral: Path) -> Path:
    made: Path = compress(tiny_mixtral, "--method", "quantize", *MADE["quantize"], "--rounding", "nearest").path
    return made


@pytest.fixture
def repaired(run_cli: Any, tmp_path: Path, tiny_mixtral: Path, tiny_text: Path) -> Any:
    def run(source: Path, *options: object, name: str = "out", to: Path = tiny_mixtral) -> tuple[Path, Any]:
        output = tmp_path / name
        words = ("--to", to, "--calibration", tiny_text, *SHORT, *options, "--json")
        result = run_cli("repair", source, output, *words)
        assert result.code == 0, result.stderr
        return output, result.json

    return run


def layout(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors_of(path).items()}


@pytest.mark.parametrize("method", sampled(MADE, ("d2moe", "quantize")))
def test_it_comes_nearer_in_the_same_layout(
    method: str, run_cli: Any, repaired: Any, tiny_mixtral: Path, tiny_text: Path, tokens: Tensor, tmp_path: Path
) -> None:
    text = ("--calibration", tiny_text, "--samples", 8, "--sequence-length", 32)
    needed, source = () if method == "ders-sparsify" else text, tmp_path / "made"
    result = run_cli("compress", tiny_mixtral, source, "--method", method, *MADE[method], *needed)
    assert result.code == 0, result.stderr
    output, told = repaired(source, "--steps", 16, *MORE.get(method, ("--learning-rate", 0.02)))
    assert layout(output) == layout(source)
    assert sum(file.stat().st_size for file in output.glob("*.safetensors")) == sum(
        file.stat().st_size for file in source.glob("*.safetensors")
    )
    codes = [name for name, tensor in tensors_of(source).items() if not tensor.is_floating_point()]
    before, after = tensors_of(source), tensors_of(output)
    assert all(before[name].equal(after[name]) for name in codes)
    assert json.loads((output / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    # Random weights have little to learn back from experts that are gone.
    assert told["kept_step"] > 0 or method == "reap"
    assert all(told["kl_after"][name] <= told["kl_before"][name] for name in told["kl_before"])
    assert set(told["kl_before"]) == {tiny_text.name, "bundled"}
    for model in (tiny_mixtral, source):
        verified = run_cli("verify", output, "--against", model)
        assert verified.code == 0, verified.stderr
    original = logits(tiny_mixtral, tokens)
    if told["kept_step"]:
        assert divergence(logits(output, tokens), original) < divergence(logits(source, tokens), original)


@pytest.mark.parametrize(
    ("rate", "said"), [(0.005, "held out     KL divergence from the original "), (30, "those of the input")]
)
def test_its_table_says_what_was_gained(
    rate: float, said: str, run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    words = ("repair", small, tmp_path / "out", "--to", tiny_mixtral, "--calibration", tiny_text, *SHORT)
    result = run_cli(*words, "--steps", 8, "--learning-rate", rate)
    assert result.code == 0, result.stderr
    assert said in result.stdout


def test_routers_alone_can_be_trained(compress: Any, repaired: Any, tiny_mixtral: Path, tiny_text: Path) -> None:
    fewer = compress(tiny_mixtral, "--method", "reap", "--experts", 3, "--calibration", tiny_text, *SHORT[:4]).path
    output, told = repaired(fewer, "--train", "routers", "--routing", 0, "--learning-rate", 0.02, "--samples", 64)
    before, after = tensors_of(fewer), tensors_of(output)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved == ({name for name in before if name.endswith("gate.weight")} if told["kept_step"] else set())
    assert told["trained_parameters"] == sum(before[name].numel() for name in before if name.endswith("gate.weight"))


def test_a_model_repaired_towards_itself_is_told_to_be_the_same(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Its divergence is what rounding makes of it, below zero or above: that neither rises nor is it shown."""
    words = ("repair", tiny_mixtral, tmp_path / "out", "--to", tiny_mixtral, "--calibration", tiny_text, *SHORT)
    result = run_cli(*words, "--steps", 8, "--learning-rate", 1e-9, "--json")
    assert result.code == 0, result.stderr
    assert result.json["stopped"] is None
    assert "are the same model: there is nothing to learn" in result.stderr
    assert " -" not in "".join(line for line in result.stderr.splitlines() if "of a nat" in line)


def test_a_rate_that_is_too_high_keeps_the_input(repaired: Any, small: Path) -> None:
    output, told = repaired(small, "--steps", 8, "--learning-rate", 30, "--warmup", 0)
    assert (told["kept_step"], told["learning_rate"]) == (0, 30)
    assert "has risen" in told["stopped"] or "loss is" in told["stopped"]
    assert told["kl_after"] == told["kl_before"]
    before, after = tensors_of(small), tensors_of(output)
    assert all(before[name].equal(after[name]) for name in before)


def test_a_default_rate_that_is_too_high_is_lowered(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetool.repair.stage.RATE", 0.32)
    words = ("repair", small, tmp_path / "out", "--to", tiny_mixtral, "--calibration", tiny_text, *SHORT)
    result = run_cli(*words, "--steps", 36, "--warmup", 0, "--evaluations", 9, "--json")
    assert "Again from the input's values, with --learning-rate 0.08" in result.stderr
    told = result.json
    assert told["learning_rate"] in {0.08, 0.02}
    assert told["kept_step"] > 4
    assert sum(told["kl_after"].values()) < sum(told["kl_before"].values())


def test_the_same_seed_gives_the_same_bytes(repaired: Any, small: Path) -> None:
    first, _ = repaired(small, "--steps", 4, name="one")
    second, _ = repaired(small, "--steps", 4, name="two")
    weights = [
        {name: data for name, data in contents(path).items() if name.endswith("safetensors")}
        for path in (first, second)
    ]
    assert weights[0] == weights[1]
    assert {name for name, data in contents(small).items() if name in weights[0] and data != weights[0][name]}


def test_memory_that_is_free_does_not_decide_how_codes_are_held(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results would differ with it."""
    words = ("repair", small, tmp_path / "out", "--to", tiny_mixtral, "--calibration", tiny_text, *SHORT, "--dry-run")
    monkeypatch.setattr("moetool.runtime.memory.free_bytes", lambda *_: 1)
    assert run_cli(*words, "--json").json["weights"] == "in memory, codes decoded once"
    assert run_cli(*words, "--memory", 1000, "--json").json["weights"].startswith("codes in the files")


def test_codes_need_not_be_held_decoded(repaired: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = repaired(small, "--steps", 2, name="one")
    monkeypatch.setattr("moetool.repair.costs.decoded_size", lambda source: 1 << 60)
    second, told = repaired(small, "--steps", 2, name="two")
    ours, theirs = tensors_of(first), tensors_of(second)
    assert told["trained_parameters"] > 0
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), rtol=0.02, atol=1e-4) for name in ours)


def test_an_interrupted_repair_goes_on(
    repaired: Any, run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    whole, _ = repaired(small, "--steps", 4, name="whole")
    words = ("--to", tiny_mixtral, "--calibration", tiny_text, *SHORT, "--steps", 4)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moetool.repair.students.write_checkpoint", fail)
        assert run_cli("repair", small, tmp_path / "cut", *words).code != 0
        assert (tmp_path / "cut").exists()
    monkeypatch.setattr("moetool.repair.training.Distilling.run", fail)  # which is not done again
    result = run_cli("repair", small, tmp_path / "cut", *words, "--resume", "--json")
    assert result.code == 0, result.stderr
    assert result.json["kept_step"] >= 0
    ours, theirs = tensors_of(whole), tensors_of(tmp_path / "cut")
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_another_model_is_no_original(
    run_cli: Any, small: Path, make_mixtral: Any, save_model: Any, tiny_text: Path, tmp_path: Path
) -> None:
    other = save_model(make_mixtral(hidden_size=64), tmp_path / "other")
    result = run_cli("repair", small, tmp_path / "out", "--to", other, "--calibration", tiny_text, "--dry-run")
    assert result.code == 3
    assert "hidden_size 32" in result.stderr
    assert "has 64: it was not compressed or moefied from that" in result.stderr


def test_an_upcycled_model_is_sent_to_the_command_that_learns_from_a_dense_one(
    run_cli: Any, small: Path, dense: Any, tiny_text: Path, tmp_path: Path
) -> None:
    result = run_cli("repair", small, tmp_path / "out", "--to", dense("llama"), "--calibration", tiny_text, "--dry-run")
    assert result.code == 3
    assert "model_type mixtral" in result.stderr
    assert "`moetool tune --teacher`" in result.stderr


def test_other_tokenizers_are_refused(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    other = swap_tokens(copy_of(tiny_mixtral, tmp_path / "other"))
    result = run_cli("repair", small, tmp_path / "out", "--to", other, "--calibration", tiny_text, *SHORT)
    assert result.code == 3
    assert "tokenizers of" in result.stderr


def test_too_little_memory_is_said_with_the_numbers(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    words = ("--to", tiny_mixtral, "--calibration", tiny_text, *SHORT, "--memory", "100MB")
    result = run_cli("repair", small, tmp_path / "out", *words)
    assert result.code != 0
    assert f"has 100.0 MB. {tiny_mixtral} predicts with a layer at a time in memory" in result.stderr
    assert "then the model is trained in float32" in result.stderr
    assert "A smaller --batch-size needs less" in result.stderr
    many = run_cli("repair", small, tmp_path / "out", *words[:-2], "--held-out", 10**8)
    assert many.code == 4
    assert many.stderr.rstrip().endswith(
        "Fewer or shorter windows (--samples, --held-out, --sequence-length) need less."
    )
    assert not (tmp_path / "out").exists()


def test_other_vocabularies_are_refused(
    run_cli: Any, small: Path, make_mixtral: Any, save_model: Any, tiny_text: Path, tmp_path: Path
) -> None:
    size = json.loads((small / "config.json").read_text())["vocab_size"]
    other = save_model(make_mixtral(vocab_size=size + 16), tmp_path / "other")
    result = run_cli("repair", small, tmp_path / "out", "--to", other, "--calibration", tiny_text, *SHORT)
    assert result.code == 3
    assert f"has vocab_size {size}" in result.stderr
    assert f"has {size + 16}: it was not compressed or moefied from that" in result.stderr


def test_the_memory_of_the_plan_is_enough(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    words = ("--to", tiny_mixtral, "--calibration", tiny_text, *SHORT)
    plan = run_cli("repair", small, tmp_path / "out", *words, "--dry-run", "--json").json
    first, second = plan["original_memory_bytes"], plan["training_memory_bytes"]
    enough = max(first, second)
    result = run_cli("repair", small, tmp_path / "out", *words, "--memory", min(first, second) - 1000)
    assert result.code == 4
    assert run_cli("repair", small, tmp_path / "out", *words, "--memory", enough, "--steps", 1).code == 0


def without_numbers(model: Path) -> Path:
    """A model of whose last norm nothing is a number."""
    return change_tensors(model, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


def test_damaged_models_are_refused(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    damaged = without_numbers(copy_of(small, tmp_path / "damaged"))
    result = run_cli("repair", damaged, tmp_path / "out", "--to", tiny_mixtral, "--calibration", tiny_text, *SHORT)
    assert result.code == 5
    assert "nan" in result.stderr
    assert "before anything has changed: its weights are damaged" in result.stderr


def test_text_of_the_repair_is_told_as_its_own(
    repaired: Any, run_cli: Any, small: Path, tiny_text: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    other = tmp_path / "another-story.txt"
    other.write_text(tiny_text.read_text())
    output, _ = repaired(small, "--steps", 1, "--calibration", other)
    asked = ("--sequence-length", 32, "--windows", 4, "--against", tiny_mixtral)
    result = run_cli("eval", output, "--data", other, *asked)
    assert result.code == 0, result.stderr
    assert "another-story.txt" in result.stdout.split("calibrated on")[1]
    assert "all of this is text of the calibration's own kind" in " ".join(result.stdout.split())


def test_damaged_originals_are_refused(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    other = without_numbers(copy_of(tiny_mixtral, tmp_path / "other"))
    result = run_cli("repair", small, tmp_path / "out", "--to", other, "--calibration", tiny_text, *SHORT)
    assert result.code == 5
    assert "predicts what is no number" in result.stderr
