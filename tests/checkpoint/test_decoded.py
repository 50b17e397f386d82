"""A checkpoint that is quantized beside its experts, read as if it were not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import save_kind
from safetensors.torch import load_file, save_file

from moetool.checkpoint.decoded import decoded, quantized_tensors
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.representations.quantized import QuantizedMatrix

WEIGHT = "model.layers.2.self_attn.k_proj.weight"
CODES, SCALES = (WEIGHT.replace("weight", f"moetool.{tensor}") for tensor in ("codes", "scales"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kind("beside", tmp_path_factory.mktemp("decoded") / "model")


def test_matrices_stand_where_codes_were(path: Path) -> None:
    stored, shown = Checkpoint.open(path), decoded(Checkpoint.open(path))
    assert shown.forms.keys() >= {WEIGHT}
    assert not [name for name in shown.tensors if ".moetool." in name and ".experts." not in name]
    assert "beside" not in shown.config["quantization_config"]
    assert shown.config["quantization_config"]["format_version"] == 1
    expected = QuantizedMatrix(8, 16).decode(
        {"codes": stored.read(CODES), "scales": stored.read(SCALES)}, (16, 32), torch.float32
    )
    assert shown.read(WEIGHT).equal(expected)
    assert shown.info(WEIGHT).shape == (16, 32)
    assert shown.info(WEIGHT).nbytes == 16 * 32 * 4
    assert shown.read_rows(WEIGHT, 3, 9).equal(expected[3:9])
    assert torch.cat([*shown.blocks(WEIGHT, 100)]).equal(expected.view(-1))
    other = "model.norm.weight"
    assert shown.read(other).equal(stored.read(other))
    assert torch.cat([*shown.blocks(other)]).equal(stored.read(other))
    assert shown.read_rows(other, 1, 3).equal(stored.read(other)[1:3])
    assert decoded(shown) is shown
    with pytest.raises(IndexError):
        shown.read_rows(WEIGHT, 3, 17)


def test_what_stores_it_is_known_by_name(path: Path) -> None:
    stored = Checkpoint.open(path)
    names = quantized_tensors(stored)
    assert {WEIGHT, CODES, SCALES} <= names <= stored.tensors.keys()
    assert len(names) == 3 * 10
    assert not quantized_tensors(decoded(stored))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: tensors.pop(CODES), f"Tensor {CODES} is missing"),
        (lambda tensors: tensors.update({SCALES: tensors[SCALES][:, :1].contiguous()}), "do not make one matrix"),
        (lambda tensors: tensors.update({CODES: tensors[CODES][:-3].contiguous()}), "do not"),
        (lambda tensors: tensors.update({CODES: tensors[CODES].view(torch.int8)}), "do not make one matrix"),
    ],
)
def test_damage_is_named(path: Path, tmp_path: Path, change: Any, told: str) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(InvalidInputError, match=told):
        decoded(Checkpoint.open(tmp_path))
