"""Checkpoints of AutoRound in its own format: the layout of another one each."""

import hashlib
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file
from stored_bits import FILE, config_entry, rewrite, save_compressed_tensors, save_fp8
from stored_words import awq_tensors, gptq_tensors, save_awq, save_gptq
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.formats import expected_bytes
from moetool.errors import InvalidInputError

METHOD = "auto-round"
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = families.build("mixtral", dtype=torch.bfloat16, intermediate_size=64)
    return save_model(model, tmp_path_factory.mktemp("auto-round") / "source")


def under(path: Path, target: Path, **entry: object) -> Checkpoint:
    """The files of a checkpoint with an entry of AutoRound's."""
    return Checkpoint.open(rewrite(path, target, load_file(path / FILE), {"quant_method": METHOD, **entry}))


@pytest.mark.parametrize(
    ("layout", "form"),
    [("auto_round:auto_gptq", "gptq"), ("auto_round", "gptq_v2"), ("auto_round:gptqmodel", "gptq_v2")],
)
def test_layouts_of_gptq(source: Path, tmp_path: Path, layout: str, form: str) -> None:
    path = save_gptq(source, tmp_path / "gptq", form=form, desc_act=False)
    shown, expected = under(path, tmp_path / "own", bits=4, group_size=8, packing_format=layout), Checkpoint.open(path)
    assert all(shown.read(name).equal(expected.read(name)) for name in expected.tensors)
    assert shown.stored_as == "AutoRound's GPTQ (4 bits in groups of 8)"


def test_the_layout_of_awq(source: Path, tmp_path: Path) -> None:
    path = save_awq(source, tmp_path / "awq")
    shown = under(path, tmp_path / "own", bits=4, group_size=8, packing_format="auto_round:auto_awq")
    expected = Checkpoint.open(path)
    assert all(shown.read(name).equal(expected.read(name)) for name in expected.tensors)


def test_the_layout_of_fp8(source: Path, tmp_path: Path) -> None:
    path = save_fp8(source, tmp_path / "fp8")
    shown = under(path, tmp_path / "own", bits=8, weight_block_size=[8, 8], packing_format="auto_round:fp8")
    expected = Checkpoint.open(path)
    assert all(shown.read(name).equal(expected.read(name)) for name in expected.tensors)


@pytest.mark.parametrize(
    ("kind", "form", "weights"),
    [
        ("mx_fp", "mxfp4-pack-quantized", {"num_bits": 4, **MX}),
        ("mx_fp_rceil", "mxfp8-quantized", {"num_bits": 8, **MX}),
        (
            "nv_fp",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
    ],
)
def test_the_layouts_of_compressed_tensors(
    source: Path, tmp_path: Path, kind: str, form: str, weights: dict[str, Any]
) -> None:
    path, _ = save_compressed_tensors(source, tmp_path / "ct", form, weights)
    entry = {"bits": weights["num_bits"], "data_type": kind, "packing_format": "auto_round:llm_compressor"}
    shown, expected = under(path, tmp_path / "own", **entry), Checkpoint.open(path)
    assert all(shown.read(name).equal(expected.read(name)) for name in expected.tensors)


@pytest.mark.parametrize("layout", ["auto_round:auto_gptq", "auto_round", "auto_round:auto_awq"])
def test_bits_are_those_of_auto_round(source: Path, tmp_path: Path, layout: str) -> None:
    """The digest is of what AutoRound 0.16.1 makes of these tensors: `QuantLinear` of `qlinear_torch_zp` and
    `qlinear_torch`, by unit vectors, and its `dequantize_gemm`."""
    codes = (torch.arange(64 * 32) ** 2 // 3 % 16).view(32, 64)
    groups = torch.arange(64) // 32
    zeros, scales = (torch.arange(64) % 15 + 1).view(32, 2), (torch.arange(1, 65) / 64).half().view(32, 2)
    if layout == "auto_round:auto_awq":
        tensors = awq_tensors(codes, zeros, scales)
    else:
        tensors = gptq_tensors(codes, zeros, scales, groups, 4, less_one=layout == "auto_round:auto_gptq")
    held = {f"extra.{ending}": own for ending, own in tensors.items() if ending != "g_idx"}
    plain = load_file(source / FILE)
    entry = {"quant_method": METHOD, "bits": 4, "group_size": 32, "packing_format": layout}
    shown = Checkpoint.open(rewrite(source, tmp_path / "model", plain | held, entry))
    assert digest(shown.read("extra.weight")) == "c855539390c05d20"


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_bytes_from_a_config(source: Path, tmp_path: Path) -> None:
    entry = {"quant_method": METHOD, "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"}
    entry["extra_config"] = {"a.up": {"bits": 16}}
    config = {"dtype": "bfloat16", "quantization_config": entry}
    assert expected_bytes(config, {"a.up.weight": (64, 32), "b.up.weight": (64, 32)}, tmp_path) == {"b.up.weight": 1184}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"packing_format": "mlx"}, "in the layout 'mlx' of AutoRound; moetool decodes auto_round:auto_gptq"),
        ({"rotation_config": {"hadamard_type": "random_hadamard"}}, "AutoRound has rotated its weights"),
        (
            {"packing_format": "auto_round:llm_compressor", "data_type": "int", "bits": 4},
            "of AutoRound with 'int' in 4 bits",
        ),
        (
            {
                "packing_format": "auto_round:llm_compressor",
                "data_type": "mx_fp",
                "bits": 4,
                "extra_config": {"model.layers.0": {"bits": 8}},
            },
            "with 'mx_fp' in 4, 8 bits",
        ),
    ],
)
def test_layouts_that_are_not_decoded(source: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = save_gptq(source, tmp_path / "gptq", desc_act=False)
    with pytest.raises(InvalidInputError, match=says):
        under(path, tmp_path / "own", **{**config_entry(path), "quant_method": METHOD, **change})
