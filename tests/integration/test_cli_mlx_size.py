"""`export --format mlx` in bits that are chosen for a size: what they are, what they lose, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, CrashDriver, config_of, contents, logits, relative_error, weight_bytes
from families import build
from mlx_exports import decoded, export, put_back
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="module")
def model(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = save_model(
        make_mixtral(hidden_size=64, intermediate_size=64), tmp_path_factory.mktemp("mlx") / "model"
    )
    return path


@pytest.fixture(scope="module")
def ends(run_cli: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int]:
    """Bytes with all matrices in 4 bits, and with all in 3."""
    sizes = []
    for bits, others in ((4, 4), (3, 4)):
        out = tmp_path_factory.mktemp("ends") / "out"
        assert export(run_cli, model, out, "--bits", bits, "--other-bits", others).code == 0
        sizes.append(weight_bytes(out))
    return sizes[0], sizes[1]


def test_every_matrix_has_bits_of_its_own(
    run_cli: Any, calibration: Any, model: Path, ends: tuple[int, int], tmp_path: Path
) -> None:
    size = sum(ends) // 2
    options = ("--size", size, *calibration)
    plan = export(run_cli, model, tmp_path / "none", *options, "--dry-run", "--json")
    result = export(run_cli, model, tmp_path / "out", *options, "--json")
    assert result.code == 0, result.stderr
    assert 0.97 * size < weight_bytes(tmp_path / "out") <= size
    assert plan.json["output_bytes"] <= size
    assert "in bits to be chosen" in plan.json["tensors"]
    stored, entry = load_file(tmp_path / "out" / WEIGHTS), config_of(tmp_path / "out")["quantization"]
    packed = {name.removesuffix(".scales") for name in stored if name.endswith(".scales")}
    bits = result.json["bits"]
    assert bits.keys() == packed
    assert len(set(bits.values())) > 1
    for module, own in bits.items():
        assert entry.get(module, entry)["bits"] == own
        assert decoded(tmp_path / "out", module).shape[-1] == 64
    manifest = json.loads((tmp_path / "out" / "moetool.json").read_text())
    assert manifest["layers"]["1"]["types"]["self_attn.q_proj"] == f"{bits['model.layers.1.self_attn.q_proj']}-bit"
    assert manifest["layers"]["1"]["types"].keys() == {
        name.removeprefix("model.layers.1.") for name in packed if ".1." in name
    }
    assert "block_sparse_moe.switch_mlp.up_proj" in (tmp_path / "out" / "README.md").read_text()
    assert f"{result.json['bits_per_weight']:.2f} per weight" in result.stderr
    assert run_cli("verify", tmp_path / "out").code == 0
    assert export(run_cli, model, tmp_path / "out", *options, "--resume").code == 0


def test_chosen_bits_lose_less_than_alike_ones(
    run_cli: Any, calibration: Any, model: Path, ends: tuple[int, int], tiny_tokens: Tensor, tmp_path: Path
) -> None:
    tokens = tiny_tokens[1000:1256].view(4, 64)
    expected, lost = logits(model, tokens), {}
    for name, options in (("alike", ("--bits", 4, "--other-bits", 4)), ("chosen", ("--size", ends[0]))):
        assert export(run_cli, model, tmp_path / name, *options, *calibration).code == 0
        shown = put_back(model, tmp_path / name, tmp_path / f"{name}-dense")
        lost[name] = relative_error(logits(shown, tokens), expected)
    assert weight_bytes(tmp_path / "chosen") <= weight_bytes(tmp_path / "alike")
    assert lost["chosen"] < 0.9 * lost["alike"]


def test_bits_per_weight_are_those_of_all_tensors(run_cli: Any, calibration: Any, model: Path, tmp_path: Path) -> None:
    result = export(run_cli, model, tmp_path / "out", "--target-bpw", 5.5, *calibration, "--json")
    assert result.code == 0, result.stderr
    stored = load_file(tmp_path / "out" / WEIGHTS)
    numbers = sum(tensor.numel() for tensor in load_file(model / WEIGHTS).values())
    held = 8 * sum(tensor.nbytes for tensor in stored.values()) / numbers
    assert result.json["bits_per_weight"] == pytest.approx(held, abs=1e-3)
    assert 5.3 < held <= 5.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--size", "10kB"), ["in MLX's types this model takes from", "take out experts"]),
        (("--target-bpw", 2), ["--target-bpw 2 is less than this model can have", "routers"]),
        (("--size", "100kB", "--bits", 3), ["--size chooses bits", "leave out --bits"]),
        (("--target-bpw", 4, "--other-bits", 6), ["--target-bpw chooses bits", "leave out --other-bits"]),
        (("--size", "100kB", "--target-bpw", 4), ["not both"]),
        (("--size", "100kB", "--calibration", "none"), ["needs a text"]),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    run_cli: Any, model: Path, tmp_path: Path, options: tuple[object, ...], says: list[str]
) -> None:
    result = export(run_cli, model, tmp_path / "out", *options)
    assert result.code == 2, result.stderr
    assert all(part in result.stderr for part in says), result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [12, 30, 45])
def test_killed_runs_choose_the_same_bits(
    crash: CrashDriver, calibration: Any, model: Path, ends: tuple[int, int], tmp_path: Path, at: int
) -> None:
    options = ("--group-size", 32, "--size", ends[0], *calibration, "--shard-size", "20kB")
    arguments = ("export", model, "--format", "mlx", *options)
    crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, at, tmp_path / "whole")


def test_two_processes_choose_what_one_does(
    crash: CrashDriver, model: Path, ends: tuple[int, int], tiny_text: Path, tmp_path: Path
) -> None:
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 64, "--sequence-length", 64)
    arguments = ("export", model, "--format", "mlx", "--group-size", 32, "--size", ends[0], *text)
    for ranks in (1, 2):
        told = crash(tmp_path / str(ranks), arguments, ranks=ranks, rank=ranks - 1)
        assert told["codes"] == [0] * ranks, told["stderr"]
    one, two = (tmp_path / str(ranks) for ranks in (1, 2))
    assert contents(one).keys() == contents(two).keys()
    assert config_of(one) == config_of(two)
    names = {name.removesuffix(".scales") for name in load_file(one / WEIGHTS) if name.endswith(".scales")}
    same = [(decoded(one, name) - decoded(two, name)).abs() < 1e-5 for name in names]
    assert torch.cat([own.flatten() for own in same]).double().mean() > 0.9


def test_a_layer_without_experts_has_bits_of_its_own_too(
    run_cli: Any, save_model: Any, calibration: Any, tmp_path: Path
) -> None:
    widths = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    source = save_model(build("qwen2_moe", mlp_only_layers=[1], intermediate_size=64, **widths), tmp_path / "model")
    result = export(run_cli, source, tmp_path / "out", "--target-bpw", 6, *calibration, "--json")
    assert result.code == 0, result.stderr
    before = load_file(source / WEIGHTS)
    for module in ("model.layers.1.mlp.up_proj", "model.layers.0.mlp.shared_expert.up_proj"):
        assert module in result.json["bits"]
        assert relative_error(decoded(tmp_path / "out", module), before[f"{module}.weight"]) < 0.5
