"""`moetool compress --repair`, run as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, tensors_of
from sampling import sampled

TEXT = ("--samples", 8, "--sequence-length", 32)
MADE = {
    "quantize": ("--bits", 2, "--group-size", 16),
    "d2moe": ("--ratio", 0.4),
    "hybrid": ("--ratio", 0.6),
    "reap": ("--experts", 3),
}


@pytest.fixture
def words(tiny_mixtral: Path, tiny_text: Path) -> Any:
    def of(method: str, output: Path, *more: object) -> tuple[object, ...]:
        own = ("--method", method, *MADE[method], "--calibration", tiny_text, *TEXT)
        return ("compress", tiny_mixtral, output, *own, *more)

    return of


def equal(one: Path, other: Path) -> bool:
    ours, theirs = tensors_of(one), tensors_of(other)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("method", sampled(MADE, ("d2moe", "reap")))
def test_it_gives_what_the_two_commands_give(
    method: str, words: Any, run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    result = run_cli(*words(method, tmp_path / "out", "--repair", 3, "--json"))
    assert result.code == 0, result.stderr
    told = result.json
    assert told["stage"] == told["before_repair"]["stage"] == method
    assert told["bytes_after"] == told["before_repair"]["bytes_after"] < told["bytes_before"]
    assert told["trained_parameters"] > 0
    assert all(told["kl_after"][name] <= told["kl_before"][name] for name in told["kl_before"])
    assert {phase["name"] for phase in told["phases"]} >= {"Original", "Repair"}
    assert not (tmp_path / "out-unrepaired").exists()
    assert f"after {method}, trained to predict as its original" in (tmp_path / "out" / "README.md").read_text()

    assert run_cli(*words(method, tmp_path / "small")).code == 0
    repair = ("repair", tmp_path / "small", tmp_path / "by-hand", "--to", tiny_mixtral)
    assert run_cli(*repair, "--calibration", tiny_text, *TEXT, "--steps", 3).code == 0
    assert equal(tmp_path / "out", tmp_path / "by-hand")


def test_the_record_names_what_was_given_and_nothing_that_is_gone(
    words: Any, run_cli: Any, tiny_mixtral: Path, tmp_path: Path
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    result = run_cli(*words("reap", one, "--repair", 2))
    assert result.code == 0, result.stderr
    assert run_cli(*words("reap", other, "--repair", 2)).code == 0
    assert contents(one) == contents(other)
    assert json.loads((one / "moetool.json").read_text())["source"] == f"{tiny_mixtral.name} after reap"
    assert f"2. `repair` of `{tiny_mixtral.name} after reap`" in (one / "README.md").read_text()


def test_notes_of_the_first_job_are_in_the_result(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    words = ("compress", tiny_mixtral, tmp_path / "out", "--method", "reap", "--ratio", 0.1, "--calibration", tiny_text)
    result = run_cli(*words, *TEXT, "--repair", 2)
    assert result.code == 0, result.stderr
    assert "3 of 4 experts in every layer make it 16.6% smaller; 10.0% were asked" in result.stdout


def test_killed_in_the_repair_it_goes_on_there(
    words: Any, run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_cli(*words("quantize", whole, "--repair", 2)).code == 0

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moetool.repair.students.write_checkpoint", fail)
        assert run_cli(*words("quantize", cut, "--repair", 2)).code == 130
    assert (tmp_path / "cut-unrepaired").exists()
    other = run_cli(*words("quantize", cut, "--repair", 3, "--resume", "--dry-run"))
    assert other.code == 2
    assert "was started with other settings" in other.stderr
    assert run_cli(*words("quantize", cut, "--repair", 2, "--resume", "--dry-run")).code == 0
    with monkeypatch.context() as patch:
        patch.setattr("moetool.compress.methods.quantize.Quantize.run", fail)  # what is done is not done again
        patch.setattr("moetool.repair.training.Distilling.run", fail)
        result = run_cli(*words("quantize", cut, "--repair", 2, "--resume"))
    assert result.code == 0, result.stderr
    assert equal(whole, cut)
    assert not (tmp_path / "cut-unrepaired").exists()
    again = run_cli(*words("quantize", cut, "--repair", 2, "--resume", "--json"))
    assert again.code == 0, again.stderr
    assert again.json["status"] == "finished"
    for more in ((), ("--dry-run",)):
        other = run_cli(*words("quantize", cut, "--repair", 3, "--resume", *more))
        assert other.code == 2
        assert "was made with other settings" in other.stderr


def test_killed_while_it_deletes_what_it_repaired_it_is_finished(
    words: Any, run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused for ever, since the unrepaired model was not whole any more."""
    made, between = tmp_path / "made", tmp_path / "made-unrepaired"

    unlink = Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path == between / "model.safetensors":
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        assert run_cli(*words("quantize", made, "--repair", 2)).code == 130
    assert (between / "moetool.json").exists()  # whatever the order of the others
    (between / "config.json").unlink(missing_ok=True)
    assert run_cli(*words("quantize", made, "--repair", 2, "--resume", "--dry-run")).code == 0
    again = run_cli(*words("quantize", made, "--repair", 2, "--resume", "--json"))
    assert again.code == 0, again.stderr
    assert again.json["status"] == "finished"
    assert not between.exists()


def test_what_lies_there_and_is_not_moetools_is_left(words: Any, run_cli: Any, tmp_path: Path) -> None:
    assert run_cli(*words("quantize", tmp_path / "made", "--repair", 2)).code == 0
    notes = tmp_path / "made-unrepaired" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    assert run_cli(*words("quantize", tmp_path / "made", "--repair", 2, "--resume")).code == 2
    assert notes.read_text() == "mine"


def test_a_plan_tells_both(words: Any, run_cli: Any, tmp_path: Path) -> None:
    alone = run_cli(*words("quantize", tmp_path / "out", "--dry-run", "--json")).json
    both = run_cli(*words("quantize", tmp_path / "out", "--dry-run", "--json", "--repair", 9)).json
    assert both["repair_steps"] == 9
    assert both["output_bytes"] == alone["output_bytes"]
    assert both["peak_memory_bytes"] >= alone["peak_memory_bytes"]
    assert both["repair_most_memory_bytes"] >= both["peak_memory_bytes"]
    assert both["scratch_bytes"] > alone["output_bytes"]
    names = [phase["name"] for phase in both["phases"]]
    assert names.index("Original") < names.index("Repair")
    assert both["seconds"] > alone["seconds"]
    assert not list(tmp_path.iterdir())


def test_too_little_memory_for_the_original_is_told_as_such(words: Any, run_cli: Any, tmp_path: Path) -> None:
    for more in ((), ("--dry-run",)):
        result = run_cli(*words("quantize", tmp_path / "out", "--repair", 2, "--memory", "300MB", *more))
        assert result.code == 4
        assert "That is of --repair: the original predicts" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_most_memory_holds_of_what_was_made(
    words: Any, run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    for method in MADE:
        before = run_cli(*words(method, tmp_path / "out", "--dry-run", "--json", "--repair", 2)).json
        assert run_cli(*words(method, tmp_path / method)).code == 0
        repair = ("repair", tmp_path / method, tmp_path / "out", "--to", tiny_mixtral, "--calibration", tiny_text)
        plan = run_cli(*repair, *TEXT, "--steps", 2, "--dry-run", "--json").json
        assert plan["training_memory_bytes"] <= before["repair_most_memory_bytes"]


def test_a_place_that_is_taken_is_refused_at_once(words: Any, run_cli: Any, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    result = run_cli(*words("quantize", taken, "--repair", 2))
    assert result.code == 2
    assert "is not empty" in result.stderr
    assert not (tmp_path / "taken-unrepaired").exists()
    result = run_cli(*words("quantize", taken, "--repair", 2, "--resume"))
    assert result.code == 2
    assert "start again" in result.stderr
