"""What `moetool tune` trains, planned and done."""

from pathlib import Path
from typing import Any

import pytest

from moetool.checkpoint.reader import Checkpoint
from moetool.tune.checks import trained_by
from moetool.tune.options import TuneOptions


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (None, ("--train", "experts"), "this model has none"),
        (None, ("--train", "task-experts"), "this model has none"),
        (None, ("--lora-alpha", 8), "--lora-alpha is for --lora-rank"),
        ("pesc", ("--train", "all", "--lora-rank", 2), "no linear layer is left"),
        ("simoe", ("--lora-rank", 2), "a model that stays as it is"),
        ("vanilla", ("--freeze-shared",), "no deltas to a base"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(
    run_cli: Any, dense: Any, upcycle: Any, tiny_text: Path, tmp_path: Path, method: str | None, options: Any, said: str
) -> None:
    source = dense("llama") if method is None else upcycle(dense("llama"), "--method", method).path
    result = run_cli("tune", source, tmp_path / "out", "--data", tiny_text, *options, "--dry-run")
    assert result.code == 2, result.stdout
    assert said in result.stderr


@pytest.mark.parametrize(
    ("method", "options", "typed"),
    [
        ("ders-lowrank", {}, ()),
        ("ders-lowrank", {"lora_rank": 2}, ("--lora-rank", 2)),
        ("vanilla", {"train": "experts"}, ("--train", "experts")),
        ("simoe", {}, ()),
    ],
)
def test_the_plan_counts_what_is_trained(
    run_cli: Any, dense: Any, upcycle: Any, tiny_text: Path, tmp_path: Path, method: str, options: Any, typed: Any
) -> None:
    source = upcycle(dense("llama"), "--method", method).path
    text, few = tmp_path / "few.txt", ("--sequence-length", 32, "--steps", 6, "--batch-size", 1)
    text.write_text(tiny_text.read_text()[:2000])
    result = run_cli("tune", source, tmp_path / "out", "--data", text, *few, *typed, "--json")
    assert result.code == 0, result.stderr
    counted = trained_by(TuneOptions(data=str(text), **options), Checkpoint.open(source))
    assert counted.numbers == result.json["trained_parameters"]
