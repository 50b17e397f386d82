"""The stages on a card, run as a user runs them, against the same on a CPU."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import load
from torch import Tensor

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

COMMANDS: dict[str, tuple[object, ...]] = {
    "compress": ("--ratio", 0.4),
    "compress --method hybrid": ("--ratio", 0.6),
    "upcycle": ("--experts", 4),
    "moefy": ("--experts", 4, "--keep", 0.5),
}


@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_model_made_on_a_card_is_as_good(
    command: str, run_cli: Any, tiny_mixtral: Path, dense: Any, calibration: Any, tiny_text: Path, tmp_path: Path
) -> None:
    source = tiny_mixtral if command.startswith("compress") else dense("llama")
    found = {}
    for device in ("cuda", "cpu"):
        made = run_cli(
            *command.split(), source, tmp_path / device, *COMMANDS[command], *calibration, "--device", device, "--json"
        )
        assert made.code == 0, made.stderr
        assert run_cli("verify", tmp_path / device).code == 0
        told = run_cli(
            *("eval", tmp_path / device, "--data", tiny_text, "--sequence-length", 32, "--windows", 16),
            *("--device", device, "--json"),
        )
        assert told.code == 0, told.stderr
        found[device] = told.json["nll"]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-2)


@pytest.mark.parametrize("options", [(), ("--lora-rank", 4), ("--lora-rank", 4, "--quantize-base", "nf4")])
def test_it_learns_on_a_card(options: tuple[object, ...], run_cli: Any, tiny_mixtral: Path, tiny_text: Path,
                             tmp_path: Path) -> None:  # fmt: skip
    told = run_cli(
        *("tune", tiny_mixtral, tmp_path / "tuned", "--data", tiny_text, "--eval-data", tiny_text, "--steps", 12),
        *("--sequence-length", 64, "--batch-size", 2, "--learning-rate", 1e-2, "--eval-every", 6, "--device", "cuda"),
        *(*options, "--json"),
    )
    assert told.code == 0, told.stderr
    assert told.json["steps"] == 12
    assert run_cli("verify", tmp_path / "tuned").code == 0


def test_a_compressed_model_generates_on_a_card(compress: Any, tiny_mixtral: Path, tiny_tokens: Tensor) -> None:
    path = compress(tiny_mixtral, "--ratio", 0.4).path
    prompt = tiny_tokens[None, :16]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = load(path).generate(prompt, **options)
    assert load(path).cuda().generate(prompt.cuda(), **options).cpu().equal(expected)


def test_bench_says_what_is_on_the_card(run_cli: Any, tiny_mixtral: Path) -> None:
    told = run_cli(
        *("bench", tiny_mixtral, "--device", "cuda", "--batch", 1, "--lengths", 16, "--new-tokens", 4, "--rounds", 1),
        "--json",
    )
    assert told.code == 0, told.stderr
    assert told.json["model"]["device_bytes"] > 0
