"""`moetool generate` as it is typed: text as it comes, the same for a seed, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RunCli = Callable[..., Any]
PROMPT, SHORT = "the model", ("--max-new-tokens", 6)


def test_what_transformers_would_write(run_cli: RunCli, tiny_mixtral: Path) -> None:
    tokenizer, model = (kind.from_pretrained(tiny_mixtral) for kind in (AutoTokenizer, AutoModelForCausalLM))
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    result = run_cli("generate", tiny_mixtral, PROMPT, *SHORT, "--json").json
    assert result["text"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert (result["prompt_tokens"], result["new_tokens"]) == (ids.shape[1], expected.shape[1] - ids.shape[1])
    plain = run_cli("generate", tiny_mixtral, PROMPT, *SHORT)
    assert plain.code == 0
    assert plain.stdout.strip() == result["text"].strip()
    assert "per second." in plain.stderr


def test_a_seed_decides_what_is_drawn(run_cli: RunCli, tiny_mixtral: Path) -> None:
    texts = [
        run_cli("generate", tiny_mixtral, PROMPT, *SHORT, "--temperature", 1, "--seed", seed, "--json").json["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_template_is_used_unless_it_is_not_to_be(run_cli: RunCli, tiny_mixtral: Path, tmp_path: Path) -> None:
    chatty = shutil.copytree(tiny_mixtral, tmp_path / "chatty")
    settings = json.loads((chatty / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}user: {{ m.content }} answer:{% endfor %}"
    (chatty / "tokenizer_config.json").write_text(json.dumps(settings))
    lengths = [
        run_cli("generate", chatty, PROMPT, *SHORT, "--chat", chat, "--json").json["prompt_tokens"]
        for chat in ("auto", "never")
    ]
    assert lengths[0] > lengths[1]


def test_compressed_experts_run_as_they_are_stored(run_cli: RunCli, small: Path) -> None:
    result = run_cli("generate", small, PROMPT, *SHORT, "--json")
    assert result.json["synthesized"] == "on-the-fly"
    assert result.json["synthesis"]["needed_bytes"] > 0
    assert "Experts are made as they run: " in result.stderr


@pytest.mark.parametrize(
    ("prompt", "options", "code", "said"),
    [
        ("", (), 2, "The prompt is empty"),
        (PROMPT, ("--max-new-tokens", 1000), 2, "more than the 128 positions of"),
        (PROMPT, ("--keep", 0.5), 2, "this model is not moefied"),
    ],
)
def test_what_cannot_be_written(
    run_cli: RunCli, tiny_mixtral: Path, prompt: str, options: tuple[object, ...], code: int, said: str
) -> None:
    result = run_cli("generate", tiny_mixtral, prompt, *options)
    assert result.code == code
    assert said in result.stderr.splitlines()[-1]


def test_a_model_whose_numbers_are_none(run_cli: RunCli, tiny_mixtral: Path, tmp_path: Path) -> None:
    """The likeliest token of NaNs is the first: an empty text, where it ends one."""
    broken = shutil.copytree(tiny_mixtral, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for temperature in (0, 1):
        result = run_cli("generate", broken, PROMPT, *SHORT, "--temperature", temperature)
        assert result.code == 5
        assert "error: The model gives NaN or infinity: its weights are damaged" in result.stderr


def test_a_chat_template_that_fails(run_cli: RunCli, tiny_mixtral: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_mixtral, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in %}")
    result = run_cli("generate", model, PROMPT, *SHORT)
    assert result.code == 3
    assert "error: The chat template cannot write the prompt: Expected an expression" in result.stderr
    assert run_cli("generate", model, PROMPT, *SHORT, "--chat", "never").code == 0


def test_an_encoder_is_refused(run_cli: RunCli, dense: Callable[..., Path]) -> None:
    result = run_cli("generate", dense("bert"), PROMPT)
    assert result.code == 2
    assert "is an encoder (bert): it generates nothing" in result.stderr
