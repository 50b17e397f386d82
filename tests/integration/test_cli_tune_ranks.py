"""Several processes train together."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import load_whole
from sampling import sampled

SHORT = "--sequence-length", 32, "--no-packing", "--learning-rate", 1e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    """Examples of different lengths, which make five rows: a batch of four, and one that is not full."""
    words, path = tiny_text.read_text().split(), tmp_path_factory.mktemp("data") / "five.jsonl"
    texts = (" ".join(words[40 * row : 40 * row + 6 + 3 * row]) for row in range(5))
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts if '"' not in text and "\\" not in text))
    return path


@pytest.mark.parametrize(
    ("method", "options"),
    sampled(
        [("vanilla", ("--teacher",)), ("ders-lowrank", ()), ("simoe", ()), ("vanilla", ("--lora-rank", 2))],
        [("vanilla", ("--teacher",))],
    ),
)
def test_epochs_that_end_within_a_batch(
    run_cli: Any,
    crash: Any,
    dense: Any,
    upcycle: Any,
    data: Path,
    tmp_path: Path,
    method: str,
    options: tuple[Any, ...],
) -> None:
    """No row counts twice, and what is logged is of all processes."""
    source = upcycle(dense("llama"), "--experts", 4, "--method", method).path
    if "--teacher" in options:
        options = "--teacher", dense("llama")
    always = ("--data", data, "--eval-data", data, *SHORT, "--epochs", 2, "--log-every", 1, *options)
    one = run_cli("tune", source, tmp_path / "one", *always, "--batch-size", 4, "--json")
    assert one.code == 0, one.stderr
    two = crash(tmp_path / "two", ("tune", source, *always, "--batch-size", 2), ranks=2)
    assert two["codes"] == [0, 0], two["said"]
    steps = [line for line in one.stderr.splitlines() if line.startswith("step ")]
    assert len(steps) == 5
    assert [line for line in two["stderr"].splitlines() if line.startswith("step ")] == steps
    load_whole(tmp_path / "two")
