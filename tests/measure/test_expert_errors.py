"""Errors of single matrices beside what they were made from: told, and judged by what the form accounts for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from moetool.bases.delta import Deltas
from moetool.job.job import Source
from moetool.job.progress import SILENT
from moetool.measure.expert_errors import ExpertErrors, effects_of
from moetool.stages import stages

DERS = ("--method", "ders-quantize", "--group-size", 16, "--bits", 4)


@pytest.fixture(scope="module")
def quantized(run_cli: Any, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quantized") / "model"
    made = run_cli("compress", tiny_mixtral, output, *DERS)
    assert made.code == 0, made.stderr
    return output


def problems(made: Path, original: Path, *names: str) -> list[str]:
    errors = ExpertErrors(Source.open(made), Source.open(original), effects_of(names, stages()))
    errors.compare(SILENT)
    return errors.problems


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("1.down.codes", lambda own, other: other),
        ("1.down.scales", lambda own, other: -own),
        ("1.down.scales", lambda own, other: own.roll(1, 0) * 3),
        ("1.down.codes", lambda own, other: own.roll(1)),
    ],
    ids=["another's codes", "signs", "scales of other rows", "codes that slipped"],
)
def test_a_wrong_matrix_is_named(quantized: Path, tiny_mixtral: Path, tmp_path: Path, name: str, change: Any) -> None:
    assert problems(quantized, tiny_mixtral, "ders-quantize") == []
    made = tmp_path / "model"
    made.mkdir()
    for file in quantized.iterdir():
        if file.is_file() and file.name != "moetool.json":
            (made / file.name).write_bytes(file.read_bytes())
    tensors = load_file(made / "model.safetensors")
    [full] = [full for full in tensors if full.endswith(f"moetool.{name}") and ".layers.1." in full]
    tensors[full] = change(tensors[full], tensors[full.replace(".1.down.", ".2.down.")]).clone()
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    [problem] = problems(made, tiny_mixtral, "ders-quantize")
    assert problem.startswith("layer 1, down of expert 1, stored as 'quantised:4:16', differs from its source by ")
    assert problem.endswith("if it is encoded afresh")
    assert problems(made, tiny_mixtral, "ders-quantize", "d2moe") == [], "who knows what the first of two steps lost"
    assert problems(made, tiny_mixtral, "prune-base") == [], "deltas keep the form that they had to another base"


def test_a_matrix_of_its_own_that_was_made_as_a_delta(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As moetool once did where an edited plan said so."""
    plan, command = tmp_path / "plan.yaml", ("compress", tiny_mixtral)
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 8, "--sequence-length", 32)
    forms = {"int8": [0], "nf4": [1], "quantised-weight:4:16": [2], "trellis-weight:3:16": [3]}
    roles = {role: {"base": "quantised-weight:2:16", "forms": forms} for role in ("gate", "up", "down")}
    layers = dict.fromkeys(Source.open(tiny_mixtral).experts.moe_layers, roles)
    plan.write_text(yaml.safe_dump({"format": 1, "layers": layers}))
    options = ("--method", "auto", "--plan", plan, *text)
    assert run_cli(*command, tmp_path / "right", *options).code == 0
    told = run_cli("verify", tmp_path / "right", "--against", tiny_mixtral, "--json")
    assert told.code == 0, told.stderr
    errors = told.json["expert_error"]["0"]["up"]
    assert errors[0] < 0.02
    assert max(errors) < 0.4
    monkeypatch.setattr(Deltas, "target", lambda self, role, expert, form: self.of(role, expert))
    assert run_cli(*command, tmp_path / "wrong", *options).code == 0
    refused = run_cli("verify", tmp_path / "wrong", "--against", tiny_mixtral)
    assert refused.code == 5
    assert "which nobody adds to it: it was made as a delta" in refused.stderr


def test_a_large_number_in_a_row_is_no_damage(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    """One matrix of few bits loses far more than its peers, with good reason."""
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny_mixtral.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    [name] = [name for name in tensors if ".layers.1." in name and name.endswith("experts.2.w2.weight")]
    tensors[name][:, ::16] *= 30
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    options = ("--method", "quantize", "--bits", 8, "--group-size", 16)
    assert run_cli("compress", source, "--method", "d2moe", tmp_path / "out", *options).code == 0
    assert run_cli("verify", tmp_path / "out", "--against", source).code == 0
    tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert len(problems(tmp_path / "out", source, "quantize")) == 1


def test_an_export_is_what_it_was_made_from(run_cli: Any, quantized: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    assert run_cli("export", quantized, tmp_path / "out").code == 0
    for against in (quantized, tiny_mixtral):
        told = run_cli("verify", tmp_path / "out", "--against", against, "--json")
        assert told.code == 0, told.stderr
        assert len(told.json["expert_error"]["0"]["down"]) == 4
    assert problems(tmp_path / "out", tiny_mixtral, "dense-experts")[0].endswith("should be the same")
