"""Experts in MXFP4, read as transformers unpacks them."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file
from stored_bits import FILE, rewrite
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError

NAME = "model.layers.0.block_sparse_moe.experts.gate_up_proj"


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(families.build("mixtral", dtype=torch.bfloat16), tmp_path_factory.mktemp("mxfp4") / "source")


def experts() -> dict[str, Tensor]:
    scales = torch.randint(90, 150, (3, 24, 2), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 254])
    return {f"{NAME}_blocks": torch.randint(256, (3, 24, 2, 16), dtype=torch.uint8), f"{NAME}_scales": scales}


def opened(source: Path, target: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    return Checkpoint.open(rewrite(source, target, {**load_file(source / FILE), **tensors}, {"quant_method": "mxfp4"}))


def test_bits_are_those_of_transformers(source: Path, tmp_path: Path) -> None:
    stored = experts()
    shown = opened(source, tmp_path / "model", stored)
    expected = convert_moe_packed_tensors(stored[f"{NAME}_blocks"], stored[f"{NAME}_scales"])
    assert shown.info(NAME).shape == tuple(expected.shape) == (3, 64, 24)
    assert shown.read(NAME).equal(expected)
    assert shown.read_part(NAME, 1, 5, 50).equal(expected[1, 5:50])
    assert shown.read_rows(NAME, 1, 3).equal(expected[1:3])
    assert torch.cat([*shown.blocks(NAME, 1000)]).equal(expected.reshape(-1))
    assert shown.stored_as == "MXFP4"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(f"{NAME}_scales"), f"there is no {NAME}_scales"),
        (lambda held: held.update({f"{NAME}_scales": torch.zeros(3, 24, 3, dtype=torch.uint8)}), "expected .experts"),
        (lambda held: held.update({f"{NAME}_scales": torch.zeros(3, 24, 2)}), "not bytes"),
    ],
)
def test_what_does_not_fit_is_refused(source: Path, tmp_path: Path, change: Any, says: str) -> None:
    held = experts()
    change(held)
    with pytest.raises(InvalidInputError, match=says):
        opened(source, tmp_path / "model", held)
