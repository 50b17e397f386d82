"""Models whose language model lies in another: files as they lie on the hub, the language model alone, bad input."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from around_families import AROUND, IMAGE
from checkpoints import (
    WEIGHTS,
    assert_close,
    change_config,
    change_tensors,
    config_of,
    copy_of,
    load_whole,
    logits,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetool.checkpoint.reader import Checkpoint
from moetool.job.job import Source
from moetool.quiet import quiet


def turned(tensors: dict[str, Tensor]) -> None:
    """Experts as Qwen3-VL-MoE has them on the hub: all of a layer in one tensor, `[experts, in, out]`."""
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()


def joined(tensors: dict[str, Tensor]) -> None:
    """Experts as Qwen3.5-MoE has them on the hub: all of a layer in one tensor, gate above up."""
    experts = {name: tensors.pop(name) for name in list(tensors) if ".mlp.experts." in name}
    for layer in range(3):
        start = f"model.language_model.layers.{layer}.mlp.experts."
        own = {
            role: torch.stack([experts[f"{start}{expert}.{role}_proj.weight"] for expert in range(6)])
            for role in ("gate", "up", "down")
        }
        tensors[f"{start}gate_up_proj"] = torch.cat([own["gate"], own["up"]], 1)
        tensors[f"{start}down_proj"] = own["down"]


@pytest.fixture(scope="module")
def seeing(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model as transformers saves it, by model type."""
    return {
        name: save_model(families.build(name, **AROUND[name]), tmp_path_factory.mktemp(name) / "model")
        for name in ("qwen3_vl_moe", "qwen3_5_moe", "dots3_note")
    }


@pytest.fixture(scope="module")
def calibration(tiny_text: Path) -> tuple[object, ...]:
    return "--calibration", tiny_text, "--samples", 4, "--sequence-length", 16, "--mix", 0


@pytest.fixture(params=[("qwen3_vl_moe", turned), ("qwen3_5_moe", joined)], ids=lambda given: given[0])
def on_hub(request: pytest.FixtureRequest, seeing: dict[str, Path], tmp_path: Path) -> Iterator[Path]:
    """The same with experts as they lie on the hub."""
    name, change = request.param
    yield change_tensors(copy_of(seeing[name], tmp_path / "hub"), change)
    shutil.rmtree(tmp_path / "hub")


def test_experts_as_they_lie_on_the_hub(
    run_cli: Any, on_hub: Path, seeing: dict[str, Path], calibration: Any, tokens: Tensor, tmp_path: Path
) -> None:
    same = seeing[config_of(on_hub)["model_type"]]
    assert run_cli("eval", on_hub, "--against", same, "--data", calibration[1], "--windows", 1).code == 0
    full, small, fewer = tmp_path / "full", tmp_path / "small", tmp_path / "fewer"
    made = run_cli("compress", on_hub, "--method", "d2moe", full, "--rank", 10_000, *calibration)
    assert made.code == 0, made.stderr
    assert_close(logits(full, tokens), logits(same, tokens))
    made = run_cli("compress", on_hub, small, "--method", "hybrid", "--ratio", 0.05, *calibration)
    assert made.code == 0, made.stderr
    assert run_cli("verify", small, "--against", on_hub).code == 0
    load_whole(small).save_pretrained(tmp_path / "again")
    assert_close(logits(tmp_path / "again", tokens), logits(small, tokens))
    assert run_cli("export", small, tmp_path / "dense").code == 0
    exported, given = load_file(tmp_path / "dense" / WEIGHTS), load_file(on_hub / WEIGHTS)
    assert {name: held.shape for name, held in exported.items()} == {name: held.shape for name, held in given.items()}
    assert_close(logits(tmp_path / "dense", tokens), logits(small, tokens), 2e-5)
    made = run_cli("compress", on_hub, fewer, "--method", "reap", "--experts", 4, *calibration)
    assert made.code == 0, made.stderr
    left = load_file(fewer / WEIGHTS)
    assert all(left[name].shape[1:] == held.shape[1:] for name, held in given.items() if ".mlp.experts." in name)
    assert torch.isfinite(logits(fewer, tokens)).all()


@pytest.mark.parametrize("streams", [False, True])
def test_low_rank_updates_of_experts_as_they_lie_on_the_hub(
    run_cli: Any,
    on_hub: Path,
    seeing: dict[str, Path],
    calibration: Any,
    tokens: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    streams: bool,
) -> None:
    """They are written so again, and are those of the same model in another layout."""
    if streams:
        monkeypatch.setattr("moetool.tune.stage.usable_bytes", lambda options: 0)
    same = seeing[config_of(on_hub)["model_type"]]
    few = ("--sequence-length", 32, "--batch-size", 2, "--learning-rate", 1e-2, "--steps", 2, "--lora-rank", 2)
    for source, output in ((same, tmp_path / "same"), (on_hub, tmp_path / "tuned")):
        result = run_cli("tune", source, output, "--train", "lora", "--data", calibration[1], *few)
        assert result.code == 0, result.stderr
    given, made = load_file(on_hub / WEIGHTS), load_file(tmp_path / "tuned" / WEIGHTS)
    assert {name: held.shape for name, held in made.items()} == {name: held.shape for name, held in given.items()}
    assert not any(made[name].equal(given[name]) for name in given if ".language_model." in name and "experts." in name)
    assert_close(logits(tmp_path / "tuned", tokens), logits(tmp_path / "same", tokens), 2e-5)


def test_the_language_model_by_itself(
    run_cli: Any, seeing: dict[str, Path], calibration: Any, tokens: Tensor, save_model: Any, tmp_path: Path
) -> None:
    """As `AutoModelForCausalLM` it is loaded without the rest, and saved under the names that it has in the whole."""
    small, alone, again = tmp_path / "small", tmp_path / "alone", tmp_path / "again"
    made = run_cli(
        "compress",
        seeing["qwen3_5_moe"],
        "--method",
        "d2moe",
        small,
        "--rank",
        4,
        "--include",
        "attention,embeddings",
        *calibration,
    )
    assert made.code == 0, made.stderr
    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
        assert not any("visual" in name for name, _ in model.named_parameters())
        assert_close(model(input_ids=tokens).logits, logits(small, tokens))
        whole = AutoModelForCausalLM.from_pretrained(seeing["qwen3_5_moe"], dtype=torch.float32)
    save_model(whole, alone)
    assert all("language_model" in name for name in load_file(alone / WEIGHTS) if "layers" in name)
    assert config_of(alone)["model_type"] == "qwen3_5_moe_text"
    made = run_cli("compress", alone, "--method", "d2moe", again, "--rank", 10_000, *calibration)
    assert made.code == 0, made.stderr
    assert run_cli("verify", again, "--against", alone).code == 0
    assert_close(logits(again, tokens), logits(seeing["qwen3_5_moe"], tokens))


def test_experts_of_an_eye_stay(run_cli: Any, seeing: dict[str, Path], calibration: Any, tmp_path: Path) -> None:
    model = seeing["dots3_note"]
    own = [name for name in load_file(model / WEIGHTS) if "vision" in name and "experts" in name]
    assert own
    assert not {*own} & Source.open(model).experts.names
    made = run_cli("compress", model, tmp_path / "small", "--method", "hybrid", "--ratio", 0.02, *calibration)
    assert made.code == 0, made.stderr
    found, given = load_file(tmp_path / "small" / WEIGHTS), load_file(model / WEIGHTS)
    assert all(found[name].equal(given[name]) for name in own)


def test_a_part_of_the_eye_is_missing(run_cli: Any, seeing: dict[str, Path], calibration: Any, tmp_path: Path) -> None:
    name = "model.visual.merger.norm.weight"
    model = change_tensors(copy_of(seeing["qwen3_5_moe"], tmp_path / "model"), lambda tensors: tensors.pop(name))
    made = run_cli("compress", model, "--method", "d2moe", tmp_path / "out", "--rank", 4, *calibration)
    assert made.code == 3
    assert f"has no tensor {name}" in made.stderr


def test_nothing_is_said_of_the_language_model(run_cli: Any, seeing: dict[str, Path], tmp_path: Path) -> None:
    model = change_config(copy_of(seeing["qwen3_vl_moe"], tmp_path / "model"), text_config=None)
    for command in (
        ("inspect", model),
        ("verify", model),
        ("compress", model, "--method", "d2moe", tmp_path / "out", "--rank", 4),
    ):
        told = run_cli(*command)
        assert told.code == 3
        assert "has no text_config, which says what its language model is" in told.stderr


def test_a_text_has_a_place_for_an_image(
    run_cli: Any, seeing: dict[str, Path], calibration: Any, tiny_text: Path, tmp_path: Path
) -> None:
    model = copy_of(seeing["qwen3_vl_moe"], tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": IMAGE, "content": "<|image|>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = tmp_path / "text.txt"
    text.write_text(tiny_text.read_text().replace(" ", " <|image|> "))
    for command in (
        ("generate", model, "Look: <|image|>"),
        ("eval", model, "--data", text, "--sequence-length", 16, "--windows", 2),
        (
            "compress",
            model,
            "--method",
            "d2moe",
            tmp_path / "out",
            "--rank",
            4,
            "--calibration",
            text,
            *calibration[2:],
        ),
    ):
        told = run_cli(*command)
        assert told.code == 3, told.stderr
        assert f"token {IMAGE}, in whose place the model is given an image (image_token_id)" in told.stderr


def test_its_settings_are_those_of_the_language_model(seeing: dict[str, Path]) -> None:
    settings = Checkpoint.open(seeing["qwen3_vl_moe"]).settings
    assert settings["hidden_size"] == 32
    assert settings["num_hidden_layers"] == 3
    assert settings["model_type"] == "qwen3_vl_moe"


def test_its_card_says_how_it_is_loaded(
    run_cli: Any, seeing: dict[str, Path], calibration: Any, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    assert run_cli("compress", seeing["qwen3_5_moe"], "--method", "d2moe", small, "--rank", 4, *calibration).code == 0
    card = (small / "README.md").read_text()
    assert "from transformers import AutoModelForImageTextToText, AutoTokenizer" in card
    assert "vLLM cannot load it. The language model lies in another model" in card
