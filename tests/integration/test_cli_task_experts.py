"""`moetool tune --train task-experts`: only the experts that the examples use change (ESFT)."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import load, tensors_of
from sampling import sampled
from torch import Tensor

SHORT = ("--sequence-length", 32, "--batch-size", 4, "--learning-rate", 1e-3, "--steps", 3)
TASK = ("--train", "task-experts", "--task-share", 0.4)


def _choices(path: Path, text: Path) -> list[Tensor]:
    """How often each expert is among the largest of the router's logits, by layer, counted with transformers alone."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path)(text.read_text(), return_tensors="pt").input_ids[0]
    model, counts = load(path), []
    rows = ids[: len(ids) // 32 * 32].view(-1, 32)
    logits = model(rows, output_router_logits=True).router_logits
    for layer in logits:
        taken = layer.topk(model.config.num_experts_per_tok).indices.flatten()
        counts.append(torch.bincount(taken, minlength=layer.shape[-1]))
    return counts


@pytest.fixture(scope="module")
def short_text(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(tiny_text.read_text()[:6000])
    return path


def test_nothing_else_changes(run_cli: Any, tiny_mixtral: Path, short_text: Path, tmp_path: Path) -> None:
    """To the bit; and what learns are the fewest experts with that share of the choices, counted by hand."""
    result = run_cli("tune", tiny_mixtral, tmp_path / "tuned", "--data", short_text, *SHORT, *TASK, "--json")
    assert result.code == 0, result.stderr
    before, after = tensors_of(tiny_mixtral), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    expected = set()
    for layer, counts in enumerate(_choices(tiny_mixtral, short_text)):
        order, total = counts.argsort(descending=True, stable=True).tolist(), 0
        for expert in order:
            if total >= 0.4 * counts.sum():
                break
            total += int(counts[expert])
            expected |= {name for name in before if f"layers.{layer}." in name and f".experts.{expert}." in name}
    assert changed == expected
    assert result.json["trained_parameters"] == sum(before[name].numel() for name in expected)
    assert f"{len(expected) // 3} of {4 * 3} experts get 40% of their layer's choices" in result.stderr


@pytest.mark.parametrize(
    "family", sampled(("qwen2_moe", "gpt_oss", "granitemoe", "deepseek_v3", "longcat_flash"), ("gpt_oss",))
)
def test_other_families(run_cli: Any, save_model: Any, short_text: Path, family: str, tmp_path: Path) -> None:
    """Routers and what is not an expert stay; some experts change and some do not."""
    source = save_model(families.build(family), tmp_path / "model")
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *TASK)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    experts = ("experts", "input_linear", "output_linear")  # as Granite calls theirs
    assert all(any(part in name for part in experts) for name in changed)
    assert not [name for name in changed if "shared_expert" in name]


def test_killed_and_resumed_it_is_the_same(crash: Any, tiny_mixtral: Path, short_text: Path, tmp_path: Path) -> None:
    arguments = ("tune", tiny_mixtral, "--data", short_text, *SHORT, *TASK, "--save-every", 1)
    crash.whole(tmp_path / "undisturbed", arguments)
    crash.goes_on(tmp_path / "killed", arguments, 20, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--task-share", 0.5), "--task-share is for --train task-experts"),
        ((*TASK, "--lora-rank", 2), "trains nothing else"),
        ((*TASK, "--weight-decay", 0.1), "would shrink the experts"),
        (("--train", "task-experts", "--task-share", 0), "--task-share"),
    ],
)
def test_what_does_not_go_together(
    run_cli: Any, tiny_mixtral: Path, short_text: Path, options: tuple[object, ...], told: str, tmp_path: Path
) -> None:
    result = run_cli("tune", tiny_mixtral, tmp_path / "tuned", "--data", short_text, *SHORT, *options)
    assert (result.code, (tmp_path / "tuned").exists()) == (2, False)
    assert told in result.stderr


def test_models_without_such_experts_are_refused(
    run_cli: Any, dense: Any, upcycle: Any, short_text: Path, tmp_path: Path
) -> None:
    for number, (source, has) in enumerate(
        [(dense("llama"), "has none"), (upcycle(dense("llama"), "--method", "ders-lowrank").path, "--train experts")]
    ):
        output = tmp_path / str(number)
        result = run_cli("tune", source, output, "--data", short_text, *SHORT, *TASK)
        assert result.code == 2
        assert has in result.stderr
