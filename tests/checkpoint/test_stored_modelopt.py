"""Checkpoints of ModelOpt: NVFP4, FP8 and MXFP8."""

import hashlib
import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import change_config
from safetensors.torch import load_file
from stored_bits import FILE, check_refused, config_entry, rewrite
from stored_words import nvfp4_tensors, save_nvfp4
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.formats import expected_bytes
from moetool.errors import InvalidInputError

UP = "model.layers.1.block_sparse_moe.experts.1.w3.weight"


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(families.build("mixtral", dtype=torch.bfloat16), tmp_path_factory.mktemp("nv") / "source")


@pytest.fixture(scope="module")
def nvfp4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_nvfp4(source, tmp_path_factory.mktemp("nvfp4") / "model")


def one_module(source: Path, target: Path, tensors: dict[str, Tensor], algorithm: str) -> Checkpoint:
    """A model with one more matrix, `extra.weight`."""
    held = load_file(source / FILE) | {f"extra.{part}": own for part, own in tensors.items()}
    return Checkpoint.open(rewrite(source, target, held, {"quant_method": "modelopt", "quant_algo": algorithm}))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()[:16]


def test_nvfp4_has_the_bits_of_modelopt(source: Path, tmp_path: Path) -> None:
    """Digests are of what `NVFP4QTensor.quantize` and `dequantize` of ModelOpt 0.47.0 make of this matrix."""
    matrix = torch.sin(torch.arange(64 * 32, dtype=torch.float64)).float().view(32, 64).bfloat16()
    tensors = nvfp4_tensors(matrix)
    assert (digest(tensors["weight"]), digest(tensors["weight_scale"])) == ("b04eaca01de81224", "ccd84e9b9272a277")
    assert tensors["weight_scale_2"].item() == 0.00037202381645329297
    shown = one_module(source, tmp_path / "model", tensors, "NVFP4")
    assert digest(shown.read("extra.weight") + 0.0) == "e02b066c10f8303e"  # there, no zero has a sign
    assert shown.read_rows("extra.weight", 3, 20).equal(shown.read("extra.weight")[3:20])


@pytest.mark.parametrize(
    ("algorithm", "shape", "block"),
    [
        ("FP8", (), (32, 64)),
        ("FP8_PER_CHANNEL_PER_TOKEN", (32,), (1, 64)),
        ("FP8_PB_WO", (4, 1, 4, 1), (8, 16)),
        ("MXFP8", (32, 2), (1, 32)),
    ],
)
def test_eight_bits(
    source: Path, tmp_path: Path, algorithm: str, shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    codes = (torch.randn(32, 64) * 40).to(torch.float8_e4m3fn)
    kind = torch.randint(110, 130, shape, dtype=torch.uint8)
    scales = kind if algorithm == "MXFP8" else torch.rand(shape) + 0.01
    each = (kind.float() - 127).exp2() if algorithm == "MXFP8" else scales
    each = each.reshape(32 // block[0], 64 // block[1])
    each = each.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    shown = one_module(source, tmp_path / "model", {"weight": codes, "weight_scale": scales}, algorithm)
    assert shown.read("extra.weight").equal((codes.float() * each).bfloat16())
    assert shown.stored_as == f"ModelOpt's {algorithm}"


def test_a_model_has_its_own_names(source: Path, nvfp4: Path) -> None:
    shown, plain = Checkpoint.open(nvfp4), load_file(source / FILE)
    assert shown.tensors.keys() == plain.keys()
    assert len(shown.forms) == 48
    for name, own in plain.items():
        assert (shown.read(name).float() - own.float()).norm() < 0.2 * own.float().norm()


def test_first_exports_name_the_format_in_a_file_beside(nvfp4: Path, tmp_path: Path) -> None:
    """Their config.json has no quantization_config. What is made of the decoded matrices must not have that file."""
    path = rewrite(nvfp4, tmp_path / "model", load_file(nvfp4 / FILE), {})
    change_config(path, quantization_config=None)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    shown = Checkpoint.open(path)
    assert shown.read(UP).equal(Checkpoint.open(nvfp4).read(UP))
    assert "hf_quant_config.json" not in [file.name for file in shown.sidecars()]
    (path / "hf_quant_config.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"Cannot use .*hf_quant_config\.json"):
        Checkpoint.open(path)


def test_bytes_from_a_config(nvfp4: Path) -> None:
    """Modules that a pattern with stars excepts are in 16 bits."""
    config = {"dtype": "bfloat16", "quantization_config": {**config_entry(nvfp4), "ignore": ["*self_attn*"]}}
    shapes = {"model.layers.0.self_attn.q_proj.weight": (32, 32), "model.layers.0.mlp.up_proj.weight": (64, 32)}
    assert expected_bytes(config, shapes, nvfp4) == {"model.layers.0.mlp.up_proj.weight": 64 * 32 * 4.5 / 8}


def part(ending: str) -> str:
    return UP.replace("weight", ending)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(part("weight_scale")), "there is no .*weight_scale"),
        (lambda held: held.pop(part("weight_scale_2")), "there is no .*weight_scale_2"),
        (lambda held: held.update({part("weight_scale_2"): torch.ones(2)}), "expected one number"),
        (lambda held: held.update({part("weight_scale"): torch.ones(48, 2)}), "do not make a matrix"),
        (lambda held: held.update({part("pre_quant_scale"): torch.ones(32)}), "changes what a matrix gets"),
    ],
)
def test_what_does_not_fit_is_refused(nvfp4: Path, tmp_path: Path, change: Any, says: str) -> None:
    check_refused(nvfp4, tmp_path / "model", change, says)


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_algo": "W4A16_AWQ"},
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_AWQ"}},
        },
    ],
)
def test_schemes_that_are_not_decoded(nvfp4: Path, tmp_path: Path, entry: dict[str, Any]) -> None:
    entry = {"quant_method": "modelopt", **entry}
    with pytest.raises(InvalidInputError, match="in ModelOpt's 'W4A16_AWQ'; moetool decodes NVFP4"):
        Checkpoint.open(rewrite(nvfp4, tmp_path / "model", load_file(nvfp4 / FILE), entry))
