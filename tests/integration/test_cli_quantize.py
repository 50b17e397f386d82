"""Experts in few bits, each on its own: `compress --method quantize`."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, CrashDriver, check_use, config_of, logits, relative_error, weight_bytes
from safetensors.torch import load_file
from sampling import sampled
from torch import Tensor

from moetool.architectures import ROLES
from moetool.job.job import Source
from moetool.numerics.quantization import dequantize, quantize
from moetool.numerics.rotation import Rotation

GROUP = ("--group-size", 16)
CHOICES: dict[str, tuple[object, ...]] = {
    "nearest": ("--bits", 8, *GROUP, "--rounding", "nearest"),
    "on text": ("--bits", 3, *GROUP),
    "rotated": ("--bits", 2, *GROUP, "--rotate"),
    "rotated, nearest": ("--bits", 4, *GROUP, "--rotate", "--rounding", "nearest"),
    "trellis": ("--bits", 2, *GROUP, "--trellis"),
    "nf4": ("--bits", "nf4"),
    "int8": ("--bits", "int8"),
    "ratio": ("--ratio", 0.5, *GROUP),
    "ratio, one per role": ("--ratio", 0.5, *GROUP, "--scheme", "role", "--rotate"),
    "ratio, trellis": ("--ratio", 0.5, *GROUP, "--trellis", "--rotate"),
    "ratio, one per layer": ("--ratio", 0.5, *GROUP, "--scheme", "layer", "--sensitivity", "none"),
}
METHOD = ("--method", "quantize")
EXPERT = re.compile(r"layers\.(\d+)\..*\.(\d+)\.(?:gate|up|down)\.")


def layers(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = config_of(path)["quantization_config"]
    return dict(entry["layers"])


@pytest.mark.parametrize("bits", [8, 2])
def test_nearest_codes_are_those_of_each_matrix(compress: Any, tiny_mixtral: Path, bits: int) -> None:
    made = compress(tiny_mixtral, *METHOD, "--bits", bits, *GROUP, "--rounding", "nearest")
    source, result = (Source.open(path).experts for path in (tiny_mixtral, made.path))
    for layer in source.moe_layers:
        for role in ROLES:
            for expert in range(source.shape.experts):
                codes, scales = quantize(source.dense(layer, expert, role), bits, 16, source.dtype)
                expected = dequantize(codes, scales, bits, torch.float32)
                assert result.dense(layer, expert, role).equal(expected)
    assert made.told["layers"]["0"]["relative_error"]["gate"][0] < (0.01 if bits == 8 else 0.5)


@pytest.mark.parametrize("name", sampled(CHOICES, ("rotated", "trellis", "int8", "ratio, one per role")))
def test_no_base_is_stored_and_the_result_runs(
    run_cli: Any, compress: Any, tiny_mixtral: Path, tokens: Tensor, tmp_path: Path, name: str
) -> None:
    path = compress(tiny_mixtral, *METHOD, *CHOICES[name]).path
    reader = Source.open(path).experts
    assert all(reader.layout(layer).is_baseless for layer in reader.moe_layers)
    assert not [tensor for tensor in reader.checkpoint.tensors if "moetool.base" in tensor]
    check_use(run_cli, path, tiny_mixtral, tokens, tmp_path)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_trellis_loses_less_in_as_many_bytes(compress: Any, tiny_mixtral: Path, bits: int) -> None:
    ways = [(), ("--trellis",)]
    levels, trellis = (
        compress(tiny_mixtral, *METHOD, "--bits", bits, "--group-size", 32, "--rounding", "nearest", *way)
        for way in ways
    )
    assert weight_bytes(trellis.path) == weight_bytes(levels.path)

    def lost(made: Any) -> float:
        layers = made.told["layers"].values()
        return sum(error for layer in layers for own in layer["relative_error"].values() for error in own)

    assert lost(trellis) < 0.95 * lost(levels)


def test_refinement_moves_the_scales_of_a_trellis(compress: Any, tiny_mixtral: Path) -> None:
    chosen = (*METHOD, "--bits", 2, *GROUP, "--trellis")
    layers = compress(tiny_mixtral, *chosen, "--refine", 8).told["layers"].values()
    assert all(layer["refined"]["after"] <= layer["refined"]["before"] for layer in layers)
    assert any(layer["refined"]["after"] < layer["refined"]["before"] for layer in layers)


def test_experts_that_refinement_leaves_are_encoded_as_without_it(compress: Any, tiny_mixtral: Path) -> None:
    chosen = (*METHOD, "--bits", 2, *GROUP, "--sensitivity", "none")  # --bits alone takes no gradients
    plain, refined = (compress(tiny_mixtral, *chosen, *more) for more in ((), ("--refine", 1)))
    expected, found = (load_file(made.path / WEIGHTS) for made in (plain, refined))
    differing = {EXPERT.findall(name)[0] for name, tensor in found.items() if not tensor.equal(expected[name])}
    layers = refined.told["layers"].values()
    assert sum(layer["refined"]["kept"] for layer in layers) > 0
    assert len(differing) == sum(layer["refined"]["experts"] for layer in layers)


@pytest.mark.parametrize("name", ["ratio", "ratio, one per role", "ratio, one per layer"])
def test_a_ratio_is_met(run_cli: Any, compress: Any, calibration: Any, tiny_mixtral: Path, name: str) -> None:
    made = compress(tiny_mixtral, *METHOD, *CHOICES[name])
    whole = name == "ratio"
    assert made.told["achieved_ratio"] >= 0.5
    assert -0.005 if whole else -0.05 <= weight_bytes(made.path) / weight_bytes(tiny_mixtral) - 0.5 <= 0
    forms = [{role: set(layer[role]) for role in ROLES} for layer in layers(made.path).values()]
    if not whole:
        assert all(len(own) == 1 for layer in forms for own in layer.values())
    if name.endswith("layer"):
        assert all(layer["gate"] == layer["up"] == layer["down"] for layer in forms)
    plan = run_cli("compress", tiny_mixtral, "unused", *METHOD, *CHOICES[name], *calibration, "--dry-run", "--json")
    assert plan.json["output_bytes"] >= weight_bytes(made.path)


def test_gradients_are_taken_only_where_they_decide_something(
    run_cli: Any, compress: Any, calibration: Any, tiny_mixtral: Path
) -> None:
    unweighed = (*METHOD, *CHOICES["ratio, one per layer"])
    beside = (*unweighed, "--include", "embeddings")
    for options, expected in (
        (unweighed, ["Forward", "Encode and write"]),
        (beside, ["Forward", "Backward", "Encode and write"]),
    ):
        told = compress(tiny_mixtral, *options).told
        assert [phase["name"] for phase in told["phases"]] == expected
        assert ("gradient_windows" in told["calibration"]) == ("Backward" in expected)
        plan = run_cli("compress", tiny_mixtral, "unused", *options, *calibration, "--dry-run", "--json").json
        assert [phase["name"] for phase in plan["phases"]] == expected
        assert plan["scratch_bytes"] >= told["scratch_bytes"] > 0


def test_the_plan_is_exact(run_cli: Any, compress: Any, tiny_mixtral: Path) -> None:
    made = compress(tiny_mixtral, *METHOD, *CHOICES["nearest"])
    plan = run_cli("compress", tiny_mixtral, "unused", *METHOD, *CHOICES["nearest"], "--dry-run", "--json")
    assert plan.code == 0, "no text is needed"
    assert plan.json["output_bytes"] == weight_bytes(made.path)


def test_feedback_on_a_text_loses_less(run_cli: Any, compress: Any, tiny_mixtral: Path, tokens: Tensor) -> None:
    expected = logits(tiny_mixtral, tokens)
    fed = compress(tiny_mixtral, *METHOD, *CHOICES["on text"]).path
    nearest = compress(tiny_mixtral, *METHOD, *CHOICES["on text"], "--rounding", "nearest").path
    assert weight_bytes(fed) == weight_bytes(nearest)
    assert relative_error(logits(fed, tokens), expected) < relative_error(logits(nearest, tokens), expected)


def test_rotated_codes_are_those_of_the_rotated_matrix(compress: Any, tiny_mixtral: Path) -> None:
    path = compress(tiny_mixtral, *METHOD, *CHOICES["rotated, nearest"]).path
    source, result = (Source.open(path).experts for path in (tiny_mixtral, path))
    seeds = [layer["rotation"] for layer in layers(path).values()]
    assert all(own["gate"] == own["up"] != own["down"] for own in seeds)
    assert len({own["up"] for own in seeds}) == len(seeds), "every layer has its own"
    for role in ROLES:
        matrix, turn = source.dense(1, 2, role), Rotation(source.shape.matrix(role)[1], seeds[1][role])
        codes, scales = quantize(turn(matrix), 4, 16, source.dtype)
        expected = turn.back(dequantize(codes, scales, 4, torch.float32))
        torch.testing.assert_close(result.dense(1, 2, role), expected)
        assert relative_error(result.dense(1, 2, role), matrix) < 0.12


def test_rotation_takes_no_bytes_and_depends_on_the_seed(compress: Any, tiny_mixtral: Path) -> None:
    plain, turned, other = (
        compress(tiny_mixtral, *METHOD, "--bits", 2, *GROUP, *more).path
        for more in ((), ("--rotate",), ("--rotate", "--seed", 1))
    )
    assert weight_bytes(plain) == weight_bytes(turned) == weight_bytes(other)
    assert layers(turned)["0"]["rotation"] != layers(other)["0"]["rotation"]
    assert "rotation" not in layers(plain)["0"]


def test_inspection_says_so(run_cli: Any, compress: Any, tiny_mixtral: Path) -> None:
    path = compress(tiny_mixtral, *METHOD, *CHOICES["on text"]).path
    entry = run_cli("inspect", path, "--json").json["moe"][0]
    assert (entry["representation"], entry["base_channels"]) == ("no-base", 0)
    assert "no base" in run_cli("inspect", path).stdout
    analysis = run_cli("inspect", path, "--analysis", "--json").json["analysis"]["layers"][0]
    assert analysis["gate"]["base"] == "mean"


def test_killed_runs_resume_to_the_same_bytes(
    crash: CrashDriver, calibration: Any, tiny_mixtral_bf16: Path, tmp_path: Path
) -> None:
    arguments = ("compress", tiny_mixtral_bf16, *METHOD, "--ratio", 0.4, *GROUP, *calibration, "--shard-size", "40kB")
    crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, 40, tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "Give one of --bits, --ratio or --size."),
        (("--bits", 4, "--ratio", 0.5), "--bits and --ratio exclude each other"),
        (("--bits", "nf4", "--rotate"), "knows no rotation"),
        (("--bits", "nf4", "--rounding", "error-feedback"), "use --bits 4 or 8"),
        (("--ratio", 0.5, "--rounding", "nearest", "--calibration", "x.txt"), "take --rounding out"),
        (("--ratio", 0.99, "--calibration", "x.txt", *GROUP), "at most 0."),
    ],
)
def test_what_cannot_be(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, options: Any, says: str) -> None:
    refused = run_cli("compress", tiny_mixtral, tmp_path / "out", *METHOD, *options)
    assert refused.code == 2
    assert says in refused.stderr


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (("compress", *METHOD, "--bits", 4), 2, "has experts in moetool's format already"),
        (("decompose",), 2, "without a base: start from its source"),
        (("prune-base", "--ratio", 0.2), 3, "stored without a base"),
        (("quantize-delta", "--bits", 4), 3, "already. Start from"),
    ],
)
def test_stages_that_need_a_base(
    run_cli: Any, compress: Any, tiny_mixtral: Path, tmp_path: Path, command: Any, code: int, says: str
) -> None:
    path = compress(tiny_mixtral, *METHOD, *CHOICES["on text"]).path
    refused = run_cli(command[0], path, tmp_path / "out", *command[1:])
    assert refused.code == code
    assert says in refused.stderr


def test_what_is_smaller_than_asked_for_says_so(
    run_cli: Any, calibration: Any, tiny_mixtral: Path, tmp_path: Path
) -> None:
    """Rotated matrices are never kept as they are, so that 8 bits are the most."""
    job = ("compress", tiny_mixtral, tmp_path / "out", *METHOD, "--ratio", 0.02, *GROUP, "--rotate", *calibration)
    told = run_cli(*job, "--dry-run", "--json").json
    found = run_cli(*job, "--json").json
    assert 0 <= told["output_bytes"] - found["bytes_after"] < 0.01 * found["bytes_after"]
    [note] = found["notes"]
    smaller = f"{1 - found['bytes_after'] / found['bytes_before']:.1%}"
    assert note.startswith(f"It is {smaller} smaller, more than the 2.0% that were asked for")
