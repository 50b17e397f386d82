"""Checkpoints of compressed-tensors, read as that library decompresses them."""

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from around_dense import build_around
from checkpoints import change_config, copy_of
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file
from stored_bits import FILE, config_entry, dequantized, rewrite, save_compressed_tensors
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.matrix import GroupScales
from moetool.errors import InvalidInputError

UP = "model.layers.1.block_sparse_moe.experts.1.w3.weight"
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "int4 zero points": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False}),
    "int8 groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}),
    "int3 rows": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 16}),
    "int4 rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int8 rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "float8 rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float8 blocks": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(families.build("mixtral", dtype=torch.bfloat16), tmp_path_factory.mktemp("ct") / "source")


def decompressed(path: Path, form: str, weights: dict[str, Any]) -> dict[str, Tensor]:
    """What the library makes of each module."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
    compressor, modules = BaseCompressor.get_value_from_registry(form), {}
    for name, tensor in load_file(path / FILE).items():
        module, _, ending = name.rpartition(".")
        modules.setdefault(module, {})[ending] = tensor
    return {
        f"{module}.weight": compressor.decompress(held, scheme)["weight"] if "weight_scale" in held else held["weight"]
        for module, held in modules.items()
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_bits_are_those_of_the_library(source: Path, tmp_path: Path, name: str) -> None:
    form, weights = SCHEMES[name]
    path, weights = save_compressed_tensors(source, tmp_path / "model", form, weights)
    shown, expected = Checkpoint.open(path), decompressed(path, form, weights)
    assert shown.tensors.keys() == expected.keys() == load_file(source / FILE).keys()
    assert len(shown.forms) == 48
    for tensor, own in expected.items():
        assert shown.read(tensor).equal(own.bfloat16())
    assert shown.read_rows(UP, 5, 19).equal(expected[UP].bfloat16()[5:19])
    assert shown.stored_as == f"compressed-tensors ({form} with {weights['num_bits']} bits)"
    error = (shown.read(UP).float() - load_file(source / FILE)[UP].float()).norm()
    assert error < 0.2 * load_file(source / FILE)[UP].float().norm()


@pytest.mark.parametrize(("form", "bits"), [("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8)])
def test_scales_that_are_exponents(save_model: Any, tmp_path: Path, form: str, bits: int) -> None:
    source = save_model(families.build("mixtral", dtype=torch.bfloat16, intermediate_size=64), tmp_path / "source")
    weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    path, weights = save_compressed_tensors(source, tmp_path / "model", form, weights)
    shown, expected = Checkpoint.open(path), decompressed(path, form, weights)
    assert all(shown.read(tensor).equal(own.bfloat16()) for tensor, own in expected.items())
    assert shown.read_rows(UP, 5, 19).equal(expected[UP].bfloat16()[5:19])
    assert shown.scales_of(UP) is None


def test_zero_points_that_are_not_packed(source: Path, tmp_path: Path) -> None:
    """The library's versions before 0.9.4 wrote them in 8 bits."""
    path, _ = save_compressed_tensors(source, tmp_path / "packed", *SCHEMES["int4 zero points"])
    held, packed = load_file(path / FILE), Checkpoint.open(path)
    for name in [name for name in held if name.endswith("zero_point")]:
        shape = held[name.replace("zero_point", "scale")].shape
        held[name] = unpack_from_int32(held[name], 4, shape, packed_dim=0).contiguous()
    shown = Checkpoint.open(rewrite(path, tmp_path / "model", held, config_entry(path)))
    assert all(shown.read(tensor).equal(packed.read(tensor)) for tensor in packed.tensors)
    assert shown.read_rows(UP, 5, 19).equal(packed.read_rows(UP, 5, 19))


def by_group(held: dict[str, Tensor], order: Tensor) -> Tensor:
    """What compressed-tensors 0.9.2 makes of `UP`, where inputs have groups in an order of their own."""
    words, scale, zeros = (held[part(ending)] for ending in ("weight_packed", "weight_scale", "weight_zero_point"))
    codes = unpack_from_int32(words, 4, torch.Size((48, 32))).bfloat16()
    unpacked = unpack_from_int32(zeros, 4, scale.shape, packed_dim=0).bfloat16()
    return (codes - unpacked[:, order]) * scale[:, order]


def test_inputs_in_an_order_of_their_own(source: Path, tmp_path: Path) -> None:
    path, weights = save_compressed_tensors(source, tmp_path / "plain", *SCHEMES["int4 zero points"])
    held, order = load_file(path / FILE), torch.arange(32, dtype=torch.int32) * 7 % 32 // 8
    entry, plain = config_entry(path), Checkpoint.open(path)
    entry["config_groups"]["group_0"]["weights"] = {**weights, "actorder": "group"}
    held[part("weight_g_idx")] = order
    shown = Checkpoint.open(rewrite(path, tmp_path / "model", held, entry))
    assert shown.read(UP).equal(by_group(held, order))
    assert shown.read_rows(UP, 5, 19).equal(by_group(held, order)[5:19])
    assert (shown.scales_of(UP), plain.scales_of(UP)) == (None, GroupScales(part("weight_scale"), 8))
    held[part("weight_g_idx")] = torch.full((32,), -1)
    unset = Checkpoint.open(rewrite(path, tmp_path / "unset", held, entry))
    assert unset.read(UP).equal(plain.read(UP))
    held[part("weight_g_idx")] = order + 1
    with pytest.raises(InvalidInputError, match="groups 1 to 4, and there are scales of 4"):
        Checkpoint.open(rewrite(path, tmp_path / "too-many", held, entry)).read(UP)


@pytest.mark.parametrize("name", ["int4 groups", "float8 rows"])
def test_bits_are_those_of_transformers(source: Path, tmp_path: Path, name: str) -> None:
    path, _ = save_compressed_tensors(source, tmp_path / "model", *SCHEMES[name])
    shown = Checkpoint.open(path)
    change_config(path, quantization_config={**config_entry(path), "dequantize": True})
    expected = dequantized(path)
    assert all(shown.read(tensor).equal(expected[tensor]) for tensor in shown.tensors)


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    form, weights = SCHEMES["int4 groups"]
    return save_compressed_tensors(source, tmp_path_factory.mktemp("packed") / "model", form, weights)[0]


def test_an_entry_under_its_name_of_2024(packed: Path, tmp_path: Path) -> None:
    entry, shown = {**config_entry(packed), "sparsity_config": {"format": "dense"}}, Checkpoint.open(packed)
    del entry["quant_method"]
    path = copy_of(packed, tmp_path / "model")
    change_config(path, quantization_config=None, compression_config=entry)
    found = Checkpoint.open(path)
    assert found.config == shown.config
    assert found.stored_as == shown.stored_as
    assert found.read(UP).equal(shown.read(UP))
    change_config(path, compression_config={"sparsity_config": {"format": "sparse-bitmask"}})
    with pytest.raises(InvalidInputError, match="its weights have a sparsity_config, which moetool does not decode"):
        Checkpoint.open(path)


def test_a_compression_config_of_weights_as_they_were(source: Path, tmp_path: Path) -> None:
    path = copy_of(source, tmp_path / "model")
    change_config(path, compression_config={"sparsity_config": {"format": "dense"}})
    assert Checkpoint.open(path).config == Checkpoint.open(source).config


def test_an_entry_of_the_language_model_within_one_that_sees(save_model: Any, tmp_path: Path) -> None:
    source = save_model(build_around("llava/llama").to(torch.bfloat16), tmp_path / "source")
    path, _ = save_compressed_tensors(source, tmp_path / "model", *SCHEMES["int8 rows"])
    shown = Checkpoint.open(path)
    config = json.loads((path / "config.json").read_text())
    text = {**config["text_config"], "quantization_config": config["quantization_config"]}
    change_config(path, quantization_config=None, text_config=text)
    found = Checkpoint.open(path)
    assert found.config == shown.config
    assert found.stored_as == shown.stored_as == "compressed-tensors (int-quantized with 8 bits)"


def part(ending: str) -> str:
    return UP.replace("weight", ending)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(part("weight_scale")), "weight_scale is missing"),
        (lambda held: held.update({part("weight_scale"): torch.ones(48, 3)}), "these are not those of groups of 16"),
        (lambda held: held.update({part("weight_scale"): torch.ones(47, 2)}), "these are not those of the strategy"),
        (lambda held: held.update({part("weight_packed"): torch.ones(48, 4)}), "stored in torch.float32, expected"),
        (lambda held: held.update({part("weight_g_idx"): torch.ones(32)}), "expected the group of each input"),
        (lambda held: held.update({part("weight_g_idx"): torch.ones(31).int()}), "expected the group of each input"),
        (lambda held: held.update({part("weight_zero_point"): torch.ones(48, 3).char()}), "not zero points of such"),
        (lambda held: held.update({part("weight_zero_point"): torch.ones(5, 2).int()}), "not zero points of such"),
    ],
    ids=["no scales", "groups", "rows", "dtype", "order", "length of the order", "zero points", "packed zero points"],
)
def test_what_does_not_fit_is_refused(packed: Path, tmp_path: Path, change: Any, says: str) -> None:
    held = load_file(packed / FILE)
    change(held)
    entry = config_entry(packed)
    with pytest.raises(InvalidInputError, match=says):
        Checkpoint.open(rewrite(packed, tmp_path / "model", held, entry))


def test_an_order_in_another_format(source: Path, tmp_path: Path) -> None:
    path, _ = save_compressed_tensors(source, tmp_path / "plain", *SCHEMES["int8 rows"])
    held = {**load_file(path / FILE), part("weight_g_idx"): torch.zeros(32).int()}
    with pytest.raises(InvalidInputError, match="which moetool decodes for groups in 'pack-quantized' alone"):
        Checkpoint.open(rewrite(path, tmp_path / "model", held, config_entry(path)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config_groups": {}}, "has no config_groups"),
        ({"format": "marlin-24"}, "in the format 'marlin-24' of compressed-tensors; moetool decodes pack-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "have a sparsity_config"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "have a transform_config"),
        ({"targets": ["re:.*q_proj"]}, "no group of quantization_config.config_groups has it as a target"),
        ({"group_size": 0}, "group_size must be above 0"),
    ],
)
def test_schemes_that_are_not_decoded(packed: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    entry = config_entry(packed)
    group = entry["config_groups"]["group_0"]
    for key, value in change.items():
        held = {"targets": group, "group_size": group["weights"], "format": group}.get(key, entry)
        held[key] = value
    with pytest.raises(InvalidInputError, match=says):
        Checkpoint.open(rewrite(packed, tmp_path / "model", load_file(packed / FILE), entry))
