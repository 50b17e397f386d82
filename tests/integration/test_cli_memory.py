"""`--memory`: what is too large is worked on in smaller sets, and comes out the same."""

from pathlib import Path

import families
import pytest
import torch
from derived_families import DERIVED
from safetensors.torch import load_file
from sampling import sampled


def tensors(path: Path) -> dict:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def twice(run_cli, tmp_path: Path, *arguments: object) -> tuple[dict, dict]:
    """What a job writes with all the memory that it likes, and with one byte less."""
    plenty = run_cli(arguments[0], arguments[1], tmp_path / "plenty", *arguments[2:], "--dry-run", "--json").json
    assert plenty["experts_at_once"] == plenty["experts"]
    less = "--memory", plenty["peak_memory_bytes"] - 1
    scarce = run_cli(arguments[0], arguments[1], tmp_path / "scarce", *arguments[2:], *less, "--dry-run", "--json").json
    assert scarce["experts_at_once"] < scarce["experts"]
    assert scarce["peak_memory_bytes"] < plenty["peak_memory_bytes"]
    assert scarce["scratch_bytes"] > plenty["scratch_bytes"]
    for name, more in (("plenty", ()), ("scarce", less)):
        result = run_cli(arguments[0], arguments[1], tmp_path / name, *arguments[2:], *more)
        assert result.code == 0, result.stderr
        assert not (tmp_path / name / ".moetool").exists()
    return tensors(tmp_path / "plenty"), tensors(tmp_path / "scarce")


METHODS = (
    "d2moe --ratio 0.4 --refine 2",
    "d2moe --ratio 0.4 --prune-base 0.25 --pruning svd --merge fisher-frequency",
    "hybrid --ratio 0.5 --group-size 16 --merge regmean --refine 2",
    "ders-quantize --bits 3 --group-size 16",
    "quantize --ratio 0.5 --group-size 16 --sensitivity none",
    "reap --experts 2",
    "m-smoe --experts 3",
)


@pytest.mark.parametrize("method", sampled(METHODS, (METHODS[1], METHODS[3], METHODS[4], METHODS[6])))
def test_less_memory_same_model(run_cli, tiny_mixtral_bf16, calibration, tmp_path, method) -> None:
    method = method.split()
    found, expected = twice(run_cli, tmp_path, "compress", tiny_mixtral_bf16, "--method", *method, *calibration)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("family", ["gpt_oss", "longcat_flash", "dbrx"])
@pytest.mark.parametrize("method", [("d2moe", "--ratio", 0.2), ("m-smoe", "--experts", 5)])
def test_less_memory_where_experts_are_otherwise(run_cli, save_model, calibration, tmp_path, method, family) -> None:
    own = DERIVED.get(family, {})
    model = save_model(families.build(family, dtype=torch.bfloat16, **own), tmp_path / "model")
    found, expected = twice(run_cli, tmp_path, "compress", model, "--method", *method, *calibration)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


def test_less_memory_for_every_stage(run_cli, tiny_mixtral_bf16, calibration, tmp_path) -> None:
    def equal(*arguments: object) -> Path:
        directory = tmp_path / str(arguments[0])
        directory.mkdir()
        found, expected = twice(run_cli, directory, *arguments, *calibration)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].equal(tensor), name
        return directory / "plenty"

    base = equal("fisher-merge", tiny_mixtral_bf16)
    whole = tmp_path / "whole"
    assert run_cli("decompose", tiny_mixtral_bf16, whole, "--base", base).code == 0
    equal("svd-compress", whole, "--rank", 4)
    equal("quantize-delta", whole, "--bits", 3, "--group-size", 16)


def test_no_set_is_small_enough_for_nothing(run_cli, tiny_mixtral_bf16, calibration, tmp_path) -> None:
    result = run_cli("fisher-merge", tiny_mixtral_bf16, tmp_path / "base", *calibration, "--memory", "1MB")
    assert result.code == 4
    assert "of memory and has 1.0 MB" in result.stderr
