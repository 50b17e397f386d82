"""`moetool repair` of models that other tools have stored in few bits: their scales learn, their codes stay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import contents, tensors_of
from derived_families import DERIVED
from sampling import sampled
from scrambled import scrambled
from stored_bits import save_compressed_tensors, save_fp8
from stored_words import save_awq, save_bitsandbytes, save_gptq

from moetool.checkpoint.reader import Checkpoint
from moetool.repair.training import Distilling

GROUP = 8
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
Saved = tuple[str, Callable[[Path, Path], Any]]
SAVED: dict[str, Saved] = {
    "compressed-tensors": ("qwen3_moe", lambda one, two: save_compressed_tensors(one, two, "pack-quantized", _INT4)),
    "gptq": ("mixtral", lambda one, two: save_gptq(one, two, desc_act=False)),
    "awq": ("qwen3_moe", save_awq),
}
WITHOUT: dict[str, Saved] = {
    "fp8": ("deepseek_v3", save_fp8),
    "bitsandbytes": ("mixtral", save_bitsandbytes),
    "gptq with an order": ("mixtral", save_gptq),
}
SHORT = ("--samples", 8, "--sequence-length", 32, "--held-out", 4, "--batch-size", 4)


@pytest.fixture
def stored(save_model: Any, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """`stored(format)`: a tiny model, and the same in that format."""

    def make(form: str) -> tuple[Path, Path]:
        family, save = {**SAVED, **WITHOUT}[form]
        model = families.build(family, dtype=torch.bfloat16, **DERIVED.get(family, {}))
        source = save_model(model, tmp_path / "source")
        save(source, tmp_path / "stored")
        return source, tmp_path / "stored"

    return make


@pytest.fixture
def repair(run_cli: Any, tiny_text: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(model: Path, source: Path, *options: object) -> Any:
        words = ("--to", source, "--calibration", tiny_text, *SHORT, *options, "--json")
        result = run_cli("repair", model, tmp_path / "out", *words)
        assert result.code == 0, result.stderr
        return result.json

    return run


@pytest.mark.parametrize("form", sampled(SAVED, ("gptq", "compressed-tensors")))
def test_all_scales_can_learn_and_codes_stay(
    form: str, stored: Any, repair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Distilling, "run", scrambled)
    source, model = stored(form)
    result = repair(model, source)
    assert result["bytes_before"] == result["bytes_after"]
    before, after = Checkpoint.open(model), Checkpoint.open(tmp_path / "out")
    assert before.forms.keys() == after.forms.keys()
    for name, matrix in before.forms.items():
        scales = before.scales_of(name)
        assert scales is not None
        assert scales.group == GROUP
        for part in matrix.parts:
            assert before.read_stored(part).equal(after.read_stored(part)) == (part != scales.name)
        old, new = (one.read(name).float().unflatten(-1, (-1, GROUP)) for one in (before, after))
        factors = (new * old).sum(-1) / old.square().sum(-1).clamp_min(1e-30)
        factors = factors[old.square().sum(-1) > 0]
        assert 0.99 < float(factors.min()) < 1.06 < float(factors.max()) < 1.11
    assert contents(tmp_path / "out") != contents(model)


def test_it_comes_nearer_to_its_original(
    stored: Any, repair: Any, tiny_text: Path, run_cli: Any, tmp_path: Path
) -> None:
    source, model = stored("gptq")
    told = repair(model, source, "--steps", 12, "--samples", 32)
    assert told["kept_step"] > 0
    before, after = Checkpoint.open(model), Checkpoint.open(tmp_path / "out")
    scales = [before.scales_of(name) for name in before.forms]
    assert not any(before.read_stored(own.name).equal(after.read_stored(own.name)) for own in scales)
    words = ("--data", tiny_text, "--sequence-length", 32, "--windows", 16, "--against", source, "--json")
    lost = [run_cli("eval", path, *words).json["against"]["kl"] for path in (model, tmp_path / "out")]
    assert 0 < lost[1] < lost[0]


@pytest.mark.parametrize("form", WITHOUT)
def test_what_has_no_scales_of_groups_stays(
    form: str, stored: Any, repair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Distilling, "run", scrambled)
    source, model = stored(form)
    repair(model, source)
    before, after = Checkpoint.open(model), Checkpoint.open(tmp_path / "out")
    parts = [part for matrix in before.forms.values() for part in matrix.parts]
    assert parts
    assert all(before.read_stored(part).equal(after.read_stored(part)) for part in parts)
    assert not all(tensor.equal(tensors_of(tmp_path / "out")[name]) for name, tensor in tensors_of(model).items())
