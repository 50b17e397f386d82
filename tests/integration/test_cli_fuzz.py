"""Random damage to checkpoints of every kind: each command says in a sentence what is wrong, and writes nothing."""

import itertools
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load, tensors_of
from damage import damages, linked
from families import build

from moetool.quiet import quiet


@pytest.fixture(scope="module")
def sources(
    tiny_mixtral_bf16: Path,
    dense: Any,
    save_model: Any,
    compress: Any,
    upcycle: Any,
    moefy: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """A checkpoint of every kind, by name."""
    made = tmp_path_factory.mktemp("families")
    families = {name: save_model(build(name), made / name) for name in ("qwen2_moe", "deepseek_v3")}
    llama, bigcode = dense("llama"), dense("gpt_bigcode")
    small = ("--experts", 4, "--top-k", 2)
    return {
        **families,
        "mixtral": tiny_mixtral_bf16,
        "llama": llama,
        "d2moe": compress(tiny_mixtral_bf16, "--ratio", 0.35).path,
        "hybrid": compress(tiny_mixtral_bf16, "--method", "hybrid", "--ratio", 0.5, "--group-size", 16).path,
        "mixture": upcycle(bigcode, *small).path,
        "pesc": upcycle(llama, "--method", "pesc", "--experts", 4, "--width", 8).path,
        "simoe": upcycle(llama, "--method", "simoe", "--experts", 4, "--router-width", 8, "--sparsity", 0.5).path,
        "moefied": moefy(llama, "--experts", 4, "--keep", 0.5).path,
    }


KINDS = (
    "llama", "mixtral", "qwen2_moe", "deepseek_v3", "d2moe", "hybrid", "mixture", "pesc", "simoe", "moefied"
)  # fmt: skip
MOE_KINDS = ("mixtral", "qwen2_moe", "deepseek_v3", "d2moe", "hybrid", "mixture")
DAMAGES = int(os.environ.get("MOETOOL_TEST_DAMAGES", "6"))  # of each kind
ENDS = {0, 2, 3, 4, 5}


def commands(kind: str, source: Path, output: Path, text: Path) -> Iterator[tuple[object, ...]]:
    """What is run on one damaged checkpoint after the other: headers mostly, now and then a model."""
    few = ("--sequence-length", 16)
    calibration = ("--calibration", text, "--mix", 0, "--samples", 2, *few)
    plan = ("upcycle", source, output, "--dry-run")
    real: tuple[object, ...] = ("moefy", source, output, "--experts", 4, *calibration)
    if kind in MOE_KINDS:
        plan = ("compress", source, "--method", "d2moe", output, "--ratio", 0.2, "--dry-run", *calibration)
        real = ("compress", source, output, "--method", "ders-sparsify")
    elif kind != "llama":
        plan = real = ("tune", source, output, "--data", text, *few, "--dry-run")
    evaluate = ("eval", source, "--data", text, "--windows", 1, *few)
    for number in itertools.count(1):
        if number % 25 == 0:
            yield evaluate
        elif number % 25 == 12:
            yield real
        elif number % 5 == 1:
            yield plan
        else:
            yield ("inspect" if number % 5 else "verify"), source


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_is_said_in_a_sentence(
    run_cli: Any, sources: dict[str, Path], tiny_text: Path, tmp_path: Path, kind: str
) -> None:
    """No traceback, nothing written by what ends with an error, and numbers where there is none."""
    source, output = tmp_path / "source", tmp_path / "output"
    series = zip(damages(sources[kind], seed=1), commands(kind, source, output, tiny_text), strict=False)
    for damage, command in itertools.islice(series, DAMAGES):
        linked(sources[kind], source)
        damage.apply(source)
        result = run_cli(*command, "--json")
        told = f"{command[0]} of {kind}, {damage.what}: {result.code}, {result.stderr[-2000:]}"
        assert result.code in ENDS, told
        if result.code:
            assert result.stderr.splitlines()[-1].startswith("error: "), told
            assert not output.exists(), told
        elif command[0] == "eval":
            assert math.isfinite(result.json["nll"]), told
        shutil.rmtree(source)
        shutil.rmtree(output, ignore_errors=True)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_every_damage_to_a_gguf_file_is_said_in_a_sentence(
    run_cli: Any,
    sources: dict[str, Path],
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """No traceback, no half of a conversion left in the cache, and numbers where there is no error."""
    pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")
    from damage_gguf import MODEL, gguf_damages

    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(cache))
    whole, source = tmp_path / "whole", tmp_path / "source"
    result = run_cli("export", sources[family], whole, "--format", "gguf")
    assert result.code == 0, result.stderr
    few = ("--data", tiny_text, "--windows", 1, "--sequence-length", 16)
    for number, damage in enumerate(itertools.islice(gguf_damages(whole, seed=1), DAMAGES // 2)):
        linked(whole, source)
        damage.apply(source)
        command = (
            ("eval", source / MODEL, *few) if number % 8 == 7 else (["inspect", "verify"][number % 2], source / MODEL)
        )
        result = run_cli(*command, "--json")
        told = f"{command[0]} of {family}, {damage.what}: {result.code}, {result.stderr[-2000:]}"
        assert result.code in ENDS, told
        assert not [*cache.rglob("*.tmp")], told
        if result.code:
            assert result.stderr.splitlines()[-1].startswith("error: "), told
        else:
            assert "NaN" not in damage.what or command[0] != "verify", told
            assert command[0] != "eval" or math.isfinite(result.json["nll"]), told
        shutil.rmtree(source)
        shutil.rmtree(cache, ignore_errors=True)


# What an adapter's config may say otherwise, so that other weights come of it.
MEANT = ("lora_alpha", "use_rslora", "alpha_pattern", "fan_in_fan_out")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_every_damage_to_an_adapter_is_said_in_a_sentence(run_cli: Any, dense: Any, tmp_path: Path) -> None:
    """No traceback, nothing written, and what is made in spite of it is what is made without."""
    from damage_gguf import adapter_damages
    from peft import LoraConfig, get_peft_model

    llama, whole, source, output = dense("llama"), tmp_path / "whole", tmp_path / "source", tmp_path / "output"
    with quiet(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "gate_proj"], init_lora_weights=False)
        get_peft_model(load(llama), settings).save_pretrained(whole)
    command = ("upcycle", llama, output, "--method", "branch-train-mix", "--source", llama, "--source", source)
    linked(whole, source)
    assert run_cli(*command).code == 0
    expected = tensors_of(output)
    for number, damage in enumerate(itertools.islice(adapter_damages(whole, seed=1), DAMAGES // 2)):
        shutil.rmtree(source)
        shutil.rmtree(output, ignore_errors=True)
        linked(whole, source)
        damage.apply(source)
        result = run_cli(*(("inspect", source) if number % 10 == 9 else command), "--json")
        told = f"{damage.what}: {result.code}, {result.stderr[-2000:]}"
        assert result.code in ENDS, told
        if result.code:
            assert result.stderr.splitlines()[-1].startswith("error: "), told
            assert not (output / "config.json").exists(), told
        elif not any(key in damage.what for key in MEANT):
            found = tensors_of(output)
            assert found.keys() == expected.keys(), told
            assert all(torch.equal(found[name], expected[name]) for name in found), told
