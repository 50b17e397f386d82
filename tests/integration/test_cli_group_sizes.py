"""Widths that the usual groups do not divide: the largest that do are taken, and what cannot be is said at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, config_of, logits, weight_bytes
from safetensors.torch import load_file
from sampling import sampled

from moetool.architectures import Role
from moetool.job.job import Source

WIDTHS = {"192 to 97": (192, 97), "97 to 576": (97, 576)}
LARGEST = {192: 96, 576: 96, 97: 97}  # divisors up to 128
TEXT = "TEXT"

METHODS: dict[str, tuple[object, ...]] = {
    "codes": ("--method", "ders-quantize", "--bits", 3, "--base-bits", 4),
    "codes on text": ("--method", "ders-quantize", "--bits", 2, "--base-bits", 1, TEXT),
    "hybrid": ("--method", "hybrid", "--ratio", 0.3, TEXT),
    "a base in NF4": ("--method", "ders-quantize", "--bits", 1, "--base-bits", "nf4"),
    "a base in int8": ("--method", "ders-quantize", "--bits", 8, "--base-bits", "int8"),
    "few numbers": ("--method", "ders-sparsify", "--select", "magnitude", "--base-bits", 2),
}


@pytest.fixture(scope="module", params=WIDTHS.values(), ids=WIDTHS.keys())
def source(request: Any, make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hidden, intermediate = request.param
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": 8}
    model = make_mixtral(**sizes, num_hidden_layers=1, num_local_experts=3)
    return save_model(model, tmp_path_factory.mktemp("widths") / "model")


def shape(path: Path, role: Role) -> tuple[int, int]:
    return Source.open(path).experts.shape.matrix(role)


def specs(path: Path, role: Role) -> set[str]:
    """The quantized forms that `config.json` names for a role's differences and base."""
    [layer] = config_of(path)["quantization_config"]["layers"].values()
    named = {*layer[role], layer.get("base", {}).get(role, "dense")}
    return {spec for spec in named if spec.startswith("quantised")}


@pytest.mark.parametrize("method", sampled(METHODS, ("codes on text", "hybrid", "a base in NF4")))
def test_the_largest_groups_that_fit_are_taken(
    run_cli: Any, source: Path, calibration: Any, tiny_tokens: torch.Tensor, tmp_path: Path, method: str
) -> None:
    options = METHODS[method]
    text = calibration if options[-1] == TEXT else ()
    command = (
        "compress",
        source,
        "--method",
        "d2moe",
        tmp_path / "out",
        *(o for o in options if o != TEXT),
        *text,
        "--json",
    )
    plan, made = run_cli(*command, "--dry-run"), run_cli(*command)
    assert made.code == 0, made.stderr
    size, planned = weight_bytes(tmp_path / "out"), plan.json["output_bytes"]
    assert planned >= size if "hybrid" in options else planned == size
    for role in ("gate", "up", "down"):
        found = {int(spec.rsplit(":", 1)[1]) for spec in specs(tmp_path / "out", role)}
        assert found <= {LARGEST[shape(source, role)[1]]}
        assert found or "ders-sparsify" in options or "hybrid" in options
    assert run_cli("verify", tmp_path / "out", "--against", source).code == 0
    assert run_cli("export", tmp_path / "out", tmp_path / "dense").code == 0
    before, after = load_file(source / WEIGHTS), load_file(tmp_path / "dense" / WEIGHTS)
    assert all((after[name] - before[name]).norm() < 0.5 * before[name].norm() for name in before)
    assert logits(tmp_path / "out", tiny_tokens[:64].view(1, 64)).isfinite().all()


def test_factors_have_groups_of_their_own_on_each_side(
    run_cli: Any, compress: Any, source: Path, tiny_tokens: torch.Tensor, tmp_path: Path
) -> None:
    low_rank = compress(source, "--rank", 8).path
    command = ("quantize-delta", low_rank, tmp_path / "out", "--bits", 8, "--json")
    plan, made = run_cli(*command, "--dry-run"), run_cli(*command)
    assert made.code == 0, made.stderr
    assert plan.json["output_bytes"] == weight_bytes(tmp_path / "out")
    for role in ("gate", "up", "down"):
        rows, columns = shape(source, role)
        assert specs(tmp_path / "out", role) == {f"quantised-low-rank:8:8:{LARGEST[rows]}:{LARGEST[columns]}"}
    expected = logits(low_rank, tiny_tokens[:64].view(1, 64))
    found = logits(tmp_path / "out", tiny_tokens[:64].view(1, 64))
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--method", "ders-quantize"), "--group-size 64: rows of 97 numbers cannot be cut"),
        (("--method", "ders-quantize", "--base-bits", 4), "--base-bits 4: rows of 97 numbers cannot be cut"),
        (("--method", "hybrid", "--ratio", 0.3, TEXT), "--base-bits 2: rows of 97 numbers cannot be cut"),
        (("--method", "hybrid", "--ratio", 0.3, "--base-bits", "nf4", TEXT), "--group-size 64: rows of 97 numbers"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "plan"])
def test_widths_without_a_divisor_are_refused_at_once(
    run_cli: Any, source: Path, calibration: Any, tmp_path: Path, options: Any, says: str, more: Any
) -> None:
    text = calibration if options[-1] == TEXT else ()
    chosen = (option for option in options if option != TEXT)
    result = run_cli(
        "compress", source, "--method", "d2moe", tmp_path / "out", *chosen, "--group-size", 64, *text, *more
    )
    assert result.code == 2
    assert says in result.stderr
    assert "into equal groups of 2 to 64; 97 would do" in result.stderr
    assert not (tmp_path / "out").exists()
