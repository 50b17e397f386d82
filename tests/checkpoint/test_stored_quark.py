"""Checkpoints of Quark: FP8 and MXFP4."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file
from stored_bits import FILE, is_quantized, rewrite
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.formats import expected_bytes
from moetool.errors import InvalidInputError

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = families.build("mixtral", dtype=torch.bfloat16, intermediate_size=64)
    return save_model(model, tmp_path_factory.mktemp("quark") / "source")


def entry(kind: object, **more: object) -> dict[str, Any]:
    weight = kind if isinstance(kind, list) else {"dtype": kind}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"], **more}


def save(source: Path, target: Path, kind: str, of: Any) -> tuple[Checkpoint, dict[str, Tensor]]:
    """A checkpoint with `of(matrix)` in the place of each matrix, and what the last of these stands for."""
    held, expected = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / FILE).items():
        if is_quantized(name):
            tensors, expected[name] = of(tensor.float())
            held |= {name.replace("weight", ending): own for ending, own in tensors.items()}
        else:
            held[name] = expected[name] = tensor
    return Checkpoint.open(rewrite(source, target, held, entry(kind))), expected


def in_fp8(matrix: Tensor, each: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    scale = matrix.abs().amax(each, keepdim=True) / 448
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    held = {"weight": codes, "weight_scale": scale.flatten()[0] if len(each) == 2 else scale.flatten()}
    return {**held, "input_scale": torch.ones(())}, (codes.float() * scale).bfloat16()


def in_mxfp4(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, matrix.shape, dtype=torch.uint8, generator=generator)
    exponents = torch.randint(117, 121, (len(matrix), matrix.shape[1] // 32), dtype=torch.uint8, generator=generator)
    wide = (exponents.float() - 127).exp2().repeat_interleave(32, 1)
    held = {"weight": codes[:, 1::2] << 4 | codes[:, ::2], "weight_scale": exponents}
    return held, (LEVELS[codes.long()] * wide).bfloat16()


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("fp8_e4m3", lambda matrix: in_fp8(matrix, (0, 1))),
        ("fp8_e4m3", lambda matrix: in_fp8(matrix, (1,))),
        ("fp4", in_mxfp4),
    ],
    ids=["per tensor", "per row", "mxfp4"],
)
def test_what_is_decoded(source: Path, tmp_path: Path, kind: str, of: Any) -> None:
    shown, expected = save(source, tmp_path / "model", kind, of)
    assert shown.tensors.keys() == expected.keys()
    assert all(shown.read(name).equal(own) for name, own in expected.items())
    assert shown.stored_as == f"Quark's {kind}"


def test_bytes_from_a_config(tmp_path: Path) -> None:
    config = {"dtype": "bfloat16", "quantization_config": entry("fp4")}
    assert expected_bytes(config, {"a.up.weight": (64, 32)}, tmp_path) == {"a.up.weight": 1088}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (entry("int4"), "weights in Quark's int4; moetool decodes fp4, fp8_e4m3"),
        (entry([{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]), "several dtypes one after the other"),
        (
            entry("fp4", layer_quant_config={"*": {"weight": {"dtype": "fp4", "scale_format": "e5m3"}}}),
            "scales in e5m3",
        ),
        (entry("fp4", layer_quant_config={"*q_proj": {"weight": {"dtype": "int8"}}}), "Quark's int8"),
    ],
)
def test_schemes_that_are_not_decoded(source: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        Checkpoint.open(rewrite(source, tmp_path / "model", load_file(source / FILE), change))


def test_scales_that_are_no_exponents_are_refused(source: Path, tmp_path: Path) -> None:
    """As those of NVFP4 are, which have a scale themselves."""
    scales = torch.ones(24, 2).to(torch.float8_e4m3fn)
    held = {"extra.weight": torch.zeros(24, 16, dtype=torch.uint8), "extra.weight_scale": scales}
    with pytest.raises(InvalidInputError, match=r"extra\.weight is stored in torch\.uint8, and has scales"):
        Checkpoint.open(rewrite(source, tmp_path / "model", load_file(source / FILE) | held, entry("fp4")))
