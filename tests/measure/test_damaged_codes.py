"""Codes and positions that no encoder writes: named by `verify`, and refused where they would be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetool.architectures import MoEShape
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, VerificationError
from moetool.format.families import architecture_of
from moetool.format.layout import LayerLayout
from moetool.measure.verification import verify_checkpoint
from moetool.quiet import quiet
from moetool.representations import Representation, parse_representation

SHAPE = (24, 32)
Damage = Callable[[Tensor], object]


def encoded(form: Representation) -> dict[str, Tensor]:
    return form.encode(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), torch.float32)


DAMAGES = [
    ("int8", "codes", lambda codes: codes[3].fill_(-128), "32 codes are -128"),
    ("int8", "absmax", lambda absmax: absmax[:2].neg_(), "2 absmax are negative"),
    ("nf4", "absmax", lambda absmax: absmax[-1:].neg_(), "1 absmax are negative"),
    ("sparse-magnitude:0.5", "mask", lambda mask: mask[:2].bitwise_not_(), "are damaged"),
    ("sparse-magnitude:0.02", "low", lambda low: low.fill_(255), "are damaged"),
    ("low-rank-sparse:3:sparse-magnitude:0.1", "high", lambda high: high.zero_(), "are damaged"),
]


@pytest.mark.parametrize(("spec", "name", "change", "told"), DAMAGES, ids=lambda value: str(value)[:24])
def test_every_form_knows_what_it_never_writes(spec: str, name: str, change: Damage, told: str) -> None:
    form = parse_representation(spec)
    tensors = encoded(form)
    assert form.damage(tensors, SHAPE) is None
    change(tensors[name])
    assert told in str(form.damage(tensors, SHAPE))


def test_damaged_positions_are_an_error_of_the_input_when_they_are_needed() -> None:
    form = parse_representation("sparse-magnitude:0.5")
    tensors = encoded(form)
    tensors["mask"].zero_()
    with pytest.raises(InvalidInputError, match="A sparse delta cannot be read"):
        form.decode(tensors, SHAPE, torch.float32)


@pytest.fixture
def pruned(tiny_mixtral: Path, make_compressed: Any, tmp_path: Path) -> Path:
    """One layer without half of its base's channels."""
    checkpoint = Checkpoint.open(tiny_mixtral)
    shape: MoEShape = architecture_of(checkpoint.config).shape
    layout = LayerLayout.uniform(shape, parse_representation("low-rank:2"), shape.intermediate // 2)
    return make_compressed(tiny_mixtral, tmp_path / "pruned", {1: layout})


@pytest.mark.parametrize("wrong", [-1, 10_000, None], ids=["negative", "beyond", "twice"])
def test_channels_outside_the_matrix(pruned: Path, wrong: int | None) -> None:
    name = "model.layers.1.block_sparse_moe.experts.base_channels"
    tensors = load_file(pruned / "model.safetensors")
    tensors[name][0] = tensors[name][1] if wrong is None else wrong
    save_file(tensors, pruned / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(pruned)
    told = "base_channels must hold different indices below"
    with pytest.raises(InvalidInputError, match=told):
        ExpertReader(checkpoint, architecture_of(checkpoint.config)).base_channels(1)
    with pytest.raises(InvalidInputError, match=told), quiet():
        AutoModelForCausalLM.from_pretrained(pruned)
    with pytest.raises(VerificationError, match=told):
        verify_checkpoint(pruned)


def test_verify_names_the_expert(tiny_mixtral: Path, run_cli: Any, tmp_path: Path) -> None:
    """In a checkpoint without a manifest, whose digests would say it first."""
    path = tmp_path / "hybrid"
    arguments = "--method", "ders-sparsify", "--select", "magnitude", "--drop", 0.5
    assert run_cli("compress", tiny_mixtral, "--method", "d2moe", path, *arguments).code == 0
    (path / "moetool.json").unlink()
    assert list(verify_checkpoint(path).notes) == []
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("up.mask"))
    tensors[name].zero_()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationError, match=rf"{name.removesuffix('.mask')}: 0 indices were found"):
        verify_checkpoint(path)
