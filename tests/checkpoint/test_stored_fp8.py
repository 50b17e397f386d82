"""FP8 checkpoints, read as transformers dequantizes them."""

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file
from stored_bits import FILE, dequantized, rewrite, save_fp8
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.fp8 import small_floats
from moetool.errors import InvalidInputError

UP = "model.layers.1.mlp.experts.1.up_proj.weight"
UP_SCALES = UP.replace("weight", "weight_scale_inv")
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}


@pytest.fixture(scope="module")
def saved(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fp8")
    names = ("mixtral", "qwen3_moe", "deepseek_v3", "minimax_m2")
    return {name: save_model(families.build(name, dtype=torch.bfloat16), root / name) for name in names}


@pytest.fixture(scope="module")
def path(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fp8(saved["deepseek_v3"], tmp_path_factory.mktemp("deepseek") / "model")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "minimax_m2"])
@pytest.mark.parametrize(("block", "scales"), [((8, 8), "float"), ((8, 4), "ue8m0"), (None, "float")])
def test_bits_are_those_of_transformers(
    saved: dict[str, Path], tmp_path: Path, name: str, block: tuple[int, int] | None, scales: str
) -> None:
    path = save_fp8(saved[name], tmp_path / "model", block, scales)
    shown = Checkpoint.open(path)
    how = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scales, dequantize=True)
    expected = dequantized(path, quantization_config=how)
    raw = load_file(path / FILE)
    assert shown.tensors.keys() == expected.keys()
    for tensor in shown.tensors:
        own = expected[tensor] if f"{tensor}_scale_inv" in raw else raw[tensor]
        assert shown.read(tensor).dtype == own.dtype == shown.info(tensor).dtype
        assert shown.read(tensor).equal(own)
    assert any(info.dtype == torch.float8_e4m3fn for info in shown.stored.values())
    assert "quantization_config" not in shown.config
    assert shown.weight_bytes == (path / FILE).stat().st_size < shown.shown_bytes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_number_of_eight_bits_is_what_torch_makes_of_it(dtype: torch.dtype) -> None:
    """Zeros with their sign, subnormal numbers, infinities and NaN among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(2, 128)
    found, expected = small_floats(codes), codes.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    finite = ~expected.isnan()
    assert found[finite].signbit().equal(expected[finite].signbit())
    assert small_floats(codes[:, :120]).equal(codes[:, :120].float())  # and where no number is NaN


def test_mxfp8(saved: dict[str, Path], tmp_path: Path) -> None:
    """Exponents of 32 numbers each, and no block in the config: transformers tells by the shapes."""
    path = save_fp8(saved["deepseek_v3"], tmp_path / "blocks", (1, 8), "ue8m0")
    held = load_file(path / FILE)
    held |= {name: own.view(torch.uint8) for name, own in held.items() if own.dtype == torch.float8_e8m0fnu}
    path = rewrite(path, tmp_path / "model", held, {"quant_method": "mxfp8", "scale_fmt": "ue8m0"})
    shown = Checkpoint.open(path)
    expected = dequantized(path, quantization_config=FineGrainedFP8Config(weight_block_size=None, dequantize=True))
    assert sum(own.dtype == torch.uint8 for own in held.values()) == len(shown.forms) > 0
    assert all(shown.read(name).equal(expected[name]) for name in shown.forms)


def test_every_way_to_read_gives_the_same(path: Path) -> None:
    shown = Checkpoint.open(path)
    whole = shown.read(UP)
    assert whole.shape == (24, 32)
    assert shown.read_rows(UP, 3, 21).equal(whole[3:21])
    assert torch.cat([*shown.blocks(UP, 50)]).equal(whole.view(-1))
    assert [len(block) for block in shown.blocks(UP, 50)] == [50] * 15 + [18]
    with pytest.raises(IndexError):
        shown.read_rows(UP, 3, 25)


def one_matrix(saved: dict[str, Path], target: Path, **tensors: torch.Tensor) -> Checkpoint:
    """An ordinary model with more tensors, beside a norm."""
    held = load_file(saved["mixtral"] / FILE)
    return Checkpoint.open(rewrite(saved["mixtral"], target, {**held, **tensors}, FP8))


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((3, 24, 32), (3, 3, 4)),
        ((3, 24, 32), (3, 1, 1)),
        ((3, 24, 32), (3, 1, 32)),
        ((24, 32), (24, 1)),
        ((24, 32), (24,)),
        ((24, 32), ()),
        ((24, 32), (1,)),
    ],
    ids=["fused", "fused per tensor", "fused per column", "per row", "row by row", "scalar", "one number"],
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_grids_of_scales(
    saved: dict[str, Path], tmp_path: Path, shape: tuple[int, ...], scales: tuple[int, ...], kind: torch.dtype
) -> None:
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    own = torch.randint(120, 130, scales, dtype=kind) if kind == torch.uint8 else torch.rand(scales, dtype=kind)
    shown = one_matrix(saved, tmp_path / "model", experts=codes, experts_scale_inv=own)
    wide = own.view(-1, 1) if own.ndim == 1 else own
    expected = Fp8Dequantize(None)._dequantize_one(codes, wide, torch.bfloat16)  # type: ignore[no-untyped-call]
    assert shown.read("experts").equal(expected)
    if len(shape) == 3:
        assert shown.read_part("experts", 2, 5, 19).equal(expected[2, 5:19])
        assert shown.read_rows("experts", 1, 3).equal(expected[1:])


def test_two_numbers_in_a_byte(saved: dict[str, Path], tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (24, 32), dtype=torch.int8)
    scales = torch.randint(120, 130, (24, 2), dtype=torch.uint8)
    shown = one_matrix(saved, tmp_path / "model", experts=codes, experts_scale_inv=scales)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)  # type: ignore[no-untyped-call]
    assert shown.info("experts").shape == (24, 64)
    assert shown.read("experts").equal(expected)


def test_the_last_blocks_may_be_cut_off(saved: dict[str, Path], tmp_path: Path) -> None:
    """As DeepSeek-V3's own kernel reads the 576 rows of its `kv_a_proj_with_mqa`, which transformers refuses."""
    codes, scales = torch.randn(21, 30).to(torch.float8_e4m3fn), torch.rand(3, 4)
    shown = one_matrix(saved, tmp_path / "model", **{"a.weight": codes, "a.weight_scale_inv": scales})
    spread = scales.repeat_interleave(8, 0)[:21].repeat_interleave(8, 1)[:, :30]
    assert shown.read("a.weight").equal((codes.float() * spread).bfloat16())
    assert shown.read_rows("a.weight", 7, 18).equal((codes.float() * spread).bfloat16()[7:18])


def test_what_only_engines_need_is_not_shown(path: Path, tmp_path: Path) -> None:
    more = {UP.replace("weight", "activation_scale"): torch.ones(())}
    shown = Checkpoint.open(rewrite(path, tmp_path / "model", {**load_file(path / FILE), **more}, FP8))
    assert shown.tensors.keys() == Checkpoint.open(path).tensors.keys()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(UP_SCALES), f"{UP} is stored in FP8, and there is no {UP_SCALES}"),
        (lambda held: held.update({UP_SCALES: torch.ones(5, 4)}), r"these are not the scales .* blocks of 8 × 8"),
        (lambda held: held.update({UP_SCALES: torch.ones(12)}), "these are not the scales"),
        (lambda held: held.update({UP_SCALES: torch.ones(3, 4, dtype=torch.int32)}), "which no scales are"),
        (lambda held: held.update({UP: held[UP].bfloat16()}), "it is FP8 or not"),
    ],
    ids=["no scales", "wrong grid", "wrong dimensions", "whole numbers", "mixed"],
)
def test_what_does_not_fit_is_refused(path: Path, tmp_path: Path, change: Any, says: str) -> None:
    held = load_file(path / FILE)
    change(held)
    broken = rewrite(path, tmp_path / "model", held, FP8)
    with pytest.raises(InvalidInputError, match=says):
        Checkpoint.open(broken)


@pytest.mark.parametrize("block", [[8], [8, 0], "8", [8.0, 8]])
def test_a_size_of_blocks_that_is_none(path: Path, tmp_path: Path, block: object) -> None:
    entry = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(InvalidInputError, match="weight_block_size must be two numbers above 0"):
        Checkpoint.open(rewrite(path, tmp_path / "model", load_file(path / FILE), entry))


def test_a_config_that_promises_what_no_file_has(saved: dict[str, Path], tmp_path: Path) -> None:
    plain = load_file(saved["mixtral"] / FILE)
    with pytest.raises(InvalidInputError, match=r"says that its weights are quantized \(quant_method 'fp8'\), and no"):
        Checkpoint.open(rewrite(saved["mixtral"], tmp_path / "model", plain, FP8))


@pytest.mark.parametrize(
    ("said", "norm", "dtype"),
    [
        ("float16", torch.bfloat16, torch.float16),
        (None, torch.float16, torch.float16),
        (None, torch.float32, torch.bfloat16),
        ("float8_e4m3fn", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_of_a_model(
    path: Path, tmp_path: Path, said: str | None, norm: torch.dtype, dtype: torch.dtype
) -> None:
    held = {name: own.to(norm) if name.endswith("norm.weight") else own for name, own in load_file(path / FILE).items()}
    made = rewrite(path, tmp_path / "model", held, FP8)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "dtype": said}))
    assert Checkpoint.open(made).read(UP).dtype == dtype
