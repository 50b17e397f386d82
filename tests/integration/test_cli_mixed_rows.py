"""Rows of a matrix in different bits, as `compress` chooses them within a budget."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import check_use, config_of, copy_of, weight_bytes
from safetensors.torch import load_file, save_file
from sampling import sampled
from torch import Tensor

from moetool.representations import parse_representation
from moetool.representations.mixed_rows import MixedRows

GROUP = ("--group-size", 16)
WAYS: dict[str, tuple[object, ...]] = {
    "on a base": ("--method", "hybrid", "--ratio", 0.55, *GROUP),
    "on their own": ("--method", "quantize", "--ratio", 0.6, *GROUP),
    "in trellises": ("--method", "quantize", "--ratio", 0.6, *GROUP, "--trellis", "--refine", 2),
}
every_way = pytest.mark.parametrize("name", sampled(WAYS, ("on a base", "in trellises")))


@pytest.fixture(scope="module")
def uneven(make_mixtral: Callable[..., Any], save_model: Callable[..., Path], tmp_path_factory: Any) -> Path:
    """A Mixtral some of whose neurons reach the output more than others."""
    model = make_mixtral(intermediate_size=144, num_local_experts=2)
    spread = torch.logspace(-1.5, 0.5, 144)[torch.randperm(144, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(spread)
    return save_model(model, tmp_path_factory.mktemp("models") / "uneven")


def forms(path: Path, role: str) -> list[Any]:
    layers = config_of(path)["quantization_config"]["layers"].values()
    return [parse_representation(spec) for layer in layers for spec in layer[role]]


@every_way
def test_neurons_that_count_more_have_more_bits(
    run_cli: Any, compress: Any, uneven: Path, tokens: Tensor, tmp_path: Path, name: str
) -> None:
    path = compress(uneven, *WAYS[name]).path
    assert any(isinstance(form, MixedRows) for form in forms(path, "gate") + forms(path, "up"))
    assert not any(isinstance(form, MixedRows) for form in forms(path, "down"))
    check_use(run_cli, path, uneven, tokens, tmp_path)


def test_schemes_for_other_engines_have_none(compress: Any, uneven: Path) -> None:
    path = compress(uneven, *WAYS["on their own"], "--scheme", "role").path
    assert not any(isinstance(form, MixedRows) for form in forms(path, "gate"))


@every_way
def test_a_dry_run_tells_the_bytes(run_cli: Any, compress: Any, calibration: Any, uneven: Path, name: str) -> None:
    made = compress(uneven, *WAYS[name])
    told = run_cli("compress", uneven, "unused", *WAYS[name], *calibration, "--dry-run", "--json").json
    assert 0 <= told["output_bytes"] - weight_bytes(made.path) < 0.03 * weight_bytes(uneven)


def test_damaged_numbers_of_bits_are_found(run_cli: Any, compress: Any, uneven: Path, tmp_path: Path) -> None:
    path = copy_of(compress(uneven, *WAYS["on their own"]).path, tmp_path / "copy")
    [file] = path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("row_bits"))
    tensors[name] = tensors[name].flip(0) ^ 1
    save_file(tensors, file, {"format": "pt"})
    (path / "moetool.json").unlink()
    found = run_cli("verify", path)
    assert found.code == 5
    assert "numbers of bits" in found.stdout + found.stderr
