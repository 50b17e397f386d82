"""What is said of experts that are custom modules: networks by layer, masks by linear layer."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from upcycled import interpolated, open_dense, save_dense, with_adapters, write_upcycled

from moetool.convert.parts import Converted
from moetool.measure.inspected import Masks, MoELayer, StoredLayers
from moetool.measure.inspection import inspect_checkpoint
from moetool.numerics.hard_concrete import median_gate
from moetool.runtime.dense import DenseModel


@pytest.fixture
def dense(tmp_path: Path) -> DenseModel:
    return open_dense(save_dense(tmp_path / "dense", "llama"))


def made_and_alone(made: Converted, path: Path) -> tuple[Path, Path]:
    """The checkpoint, and its `config.json` alone."""
    written, alone = write_upcycled(path / "made", made), path / "alone"
    alone.mkdir()
    shutil.copy(written / "config.json", alone)
    return written, alone


def test_networks(dense: DenseModel, tmp_path: Path) -> None:
    written, alone = map(inspect_checkpoint, made_and_alone(with_adapters(dense, layers=(0, 2)), tmp_path))
    layers = [MoELayer(layer=layer, representation="native") for layer in (0, 2)]
    assert written.moe == alone.moe == StoredLayers(moe=layers)
    assert written.parameters == alone.parameters


def test_masks(dense: DenseModel, tmp_path: Path) -> None:
    """What they leave open is in the files, and `config.json` alone does not say it."""
    path, empty = made_and_alone(interpolated(dense), tmp_path)
    written, alone = inspect_checkpoint(path), inspect_checkpoint(empty)
    found = written.moe
    assert isinstance(found, Masks)
    assert alone.moe == StoredLayers(moe=[])
    assert written.parameters == alone.parameters
    tensors = load_file(path / "model.safetensors")
    opened = {
        name.removesuffix(".log_phi"): median_gate(tensor.float()) != 0
        for name, tensor in tensors.items()
        if name.endswith(".log_phi")
    }
    assert {layer.site: layer.channels for layer in found.moe} == {
        site: gates.shape[1] for site, gates in opened.items()
    }
    for layer in found.moe:
        gates = opened[layer.site]
        assert layer.channels == gates.shape[1]
        assert layer.mean_density == pytest.approx(gates.float().mean().item(), abs=1e-6)
        assert layer.union_density == pytest.approx(gates.any(0).float().mean().item(), abs=1e-6)
    assert [row[expert] for expert, row in enumerate(found.overlap)] == [1] * len(found.overlap)
