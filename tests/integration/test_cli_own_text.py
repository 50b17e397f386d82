"""Calibration on text that the model writes itself."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents

from moetool.job import own_text

METHOD = ("--method", "reap", "--experts", 2)
SMALL = ("--samples", 16, "--sequence-length", 32)
OWN = (*METHOD, *SMALL, "--calibration", "self")


@pytest.fixture(scope="module")
def made(run_cli: Any, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("own") / "model"
    result = run_cli("compress", tiny_mixtral, "--method", "d2moe", output, *OWN, "--json")
    assert result.code == 0, result.stderr
    assert result.json["calibration"] == {**result.json["calibration"], "windows": 16, "tokens": 512}
    assert "--data self" not in result.stderr, "nobody else has that text"
    return output


def test_the_same_bytes_every_time(run_cli: Any, tiny_mixtral: Path, made: Path, tmp_path: Path) -> None:
    assert run_cli("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", *OWN).code == 0
    assert contents(tmp_path / "out") == contents(made)
    assert "Calibrated on `16 windows of the model's own text`, 512 tokens." in (made / "README.md").read_text()
    assert not (made / ".moetool").exists()


def test_beside_another_text(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the windows is the model's own, at the temperature that is asked for."""
    asked = []
    sampled = own_text.sampled_windows

    def noting(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return sampled(*given, **options)

    monkeypatch.setattr(own_text, "sampled_windows", noting)
    text = f"{tiny_text}@3,self:0.5"
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", *METHOD, *SMALL, "--calibration", text)
    assert result.code == 0, result.stderr
    (options,) = asked
    assert (options["windows"], options["length"], options["temperatures"]) == (4, 32, (0.5,))


def test_resumed_with_the_same_tokens(
    crash: Any, made: Path, run_cli: Any, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was killed behind the sampling goes on with its tokens, and samples none again."""
    arguments = ("compress", tiny_mixtral, "--method", "d2moe", *OWN)
    crash(tmp_path / "out", arguments, at=12)
    assert [*(tmp_path / "out" / ".moetool").glob("own-text-*.safetensors")]
    monkeypatch.delattr(own_text, "sampled_windows")
    result = run_cli("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", *OWN, "--resume")
    assert result.code == 0, result.stderr
    assert contents(tmp_path / "out") == contents(made)


def test_several_processes_have_the_same_tokens(crash: Any, made: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    told = crash(tmp_path / "out", ("compress", tiny_mixtral, "--method", "d2moe", *OWN), ranks=2, rank=1)
    assert told["codes"] == [0, 0], told["stderr"]
    assert contents(tmp_path / "out").keys() == contents(made).keys()
    assert (tmp_path / "out" / "config.json").read_bytes() == (made / "config.json").read_bytes()


@pytest.fixture(scope="module")
def deep(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is much larger than one layer of it, and what is measured there. Read-only."""
    return save_model(make_mixtral(num_hidden_layers=16), tmp_path_factory.mktemp("deep") / "model")


def test_the_plan_counts_it(run_cli: Any, deep: Path, tiny_text: Path, tmp_path: Path) -> None:
    planned = run_cli("compress", deep, "--method", "d2moe", tmp_path / "out", *OWN, "--dry-run", "--json").json
    other = run_cli(
        "compress", deep, tmp_path / "out", *METHOD, *SMALL, "--calibration", tiny_text, "--dry-run", "--json"
    ).json
    assert [phase["name"] for phase in planned["phases"]] == ["Sample", *(phase["name"] for phase in other["phases"])]
    assert planned["own_text_memory_bytes"] == planned["peak_memory_bytes"] > other["peak_memory_bytes"]


def test_a_model_that_does_not_fit_in_memory(run_cli: Any, deep: Path, tmp_path: Path) -> None:
    result = run_cli("compress", deep, "--method", "d2moe", tmp_path / "out", *OWN, "--memory", "300MB")
    assert result.code == 4
    assert "has 300.0 MB. The model writes its own text" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_dense_model(run_cli: Any, dense: Any, tmp_path: Path) -> None:
    options = ("--experts", 4, "--center-router", *SMALL, "--calibration", "self")
    result = run_cli("upcycle", dense("llama"), tmp_path / "out", *options)
    assert result.code == 0, result.stderr
    assert "--data self" not in result.stderr


def test_an_encoder_writes_nothing(run_cli: Any, dense: Any, tmp_path: Path) -> None:
    result = run_cli("moefy", dense("bert"), tmp_path / "out", "--experts", 4, *SMALL, "--calibration", "self")
    assert result.code == 2
    assert "an encoder writes no text" in result.stderr


@pytest.mark.parametrize("command", ["eval", "tune"])
def test_for_calibration_alone(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, command: str) -> None:
    output = (tmp_path / "out", "--dry-run") if command == "tune" else ()
    result = run_cli(command, tiny_mixtral, *output, "--data", "self")
    assert result.code == 2
    assert "Only --calibration takes 'self'" in result.stderr
