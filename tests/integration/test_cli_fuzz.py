"""Random damage to checkpoints of every kind: each command says in a sentence what is wrong, and writes nothing."""

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import damages, linked
from families import build


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
DAMAGES = 100  # of each kind
ENDS = {0, 2, 3, 4, 5}


def commands(kind: str, source: Path, output: Path, text: Path) -> Iterator[tuple[object, ...]]:
    """What is run on one damaged checkpoint after the other: headers mostly, now and then a model."""
    few = ("--sequence-length", 16)
    calibration = ("--calibration", text, "--samples", 2, *few)
    plan = ("upcycle", source, output, "--dry-run")
    real: tuple[object, ...] = ("moefy", source, output, "--experts", 4, *calibration)
    if kind in MOE_KINDS:
        plan = ("compress", source, output, "--ratio", 0.2, "--dry-run", *calibration)
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
