"""GPTQ and AWQ: whole numbers in words, read as their makers' libraries decode them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import change_config
from safetensors.torch import load_file
from stored_bits import FILE, check_refused, config_entry, rewrite
from stored_words import awq_tensors, coded, gptq_tensors, save_awq, save_gptq
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError

UP = "model.layers.1.block_sparse_moe.experts.1.w3.weight"
MODULE = UP.removesuffix("weight")


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(families.build("mixtral", dtype=torch.bfloat16), tmp_path_factory.mktemp("words") / "source")


@pytest.fixture(scope="module")
def gptq(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gptq(source, tmp_path_factory.mktemp("gptq") / "model")


@pytest.fixture(scope="module")
def awq(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_awq(source, tmp_path_factory.mktemp("awq") / "model")


def one_module(source: Path, target: Path, tensors: dict[str, Tensor], entry: dict[str, Any]) -> Checkpoint:
    """A model with one more matrix, `extra.weight`."""
    held = load_file(source / FILE) | {f"extra.{part}": own for part, own in tensors.items()}
    return Checkpoint.open(rewrite(source, target, held, entry))


def read_every_way(shown: Checkpoint, expected: Tensor) -> None:
    """Whole, by rows and by blocks."""
    name, rows = "extra.weight", len(expected)
    assert shown.info(name).shape == expected.shape
    assert shown.read(name).equal(expected)
    assert shown.read_rows(name, 3, rows - 2).equal(expected[3 : rows - 2])
    assert torch.cat([*shown.blocks(name, 1000)]).equal(expected.view(-1))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", ["in order", "in another", "not in the file", "one", "the last is shorter"])
def test_gptq_is_decoded_as_it_is_defined(source: Path, tmp_path: Path, bits: int, groups: str) -> None:
    form = "gptq" if groups.startswith("in") else "gptq_v2"
    generator = torch.Generator().manual_seed(bits)
    inputs = 160 if groups == "the last is shorter" else 1536
    size = {"one": inputs, "the last is shorter": 64}.get(groups, 32)
    matrix = torch.randn(96, inputs, generator=generator)
    of = torch.arange(inputs) // size
    if groups == "in another":
        of = of[torch.randperm(inputs, generator=generator)]
    codes, zeros, scales = coded(matrix, of, bits)
    tensors = gptq_tensors(codes, zeros, scales, of, bits, less_one=form == "gptq")
    if groups in ("not in the file", "the last is shorter"):
        del tensors["g_idx"]
    expected = (codes - zeros[:, of]).half() * scales[:, of]
    entry = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": form}
    shown = one_module(source, tmp_path / "model", tensors, entry)
    read_every_way(shown, expected.to(shown.info("extra.weight").dtype))
    assert (expected.float() - matrix).norm() < {2: 0.7, 3: 0.35, 4: 0.2, 8: 0.02}[bits] * matrix.norm()
    assert shown.stored_as == f"GPTQ ({bits} bits in groups of {size})"


def in_half(source: Path, target: Path) -> Path:
    """A copy of a model whose dtype is fp16."""
    path = rewrite(source, target, load_file(source / FILE), {})
    change_config(path, dtype="float16")
    return path


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()[:16]


# Digests of words, of zero points in both versions, and of the matrix [out, in] in fp16 that GPTQModel 7.7.0 makes of
# these numbers by `TorchLinear.pack_block`, `convert_gptq_v2_to_v1_format_module` and `dequantize_weight`.
GPTQMODEL = {
    2: ("c68b8132defa2af9", "6c3b7614badb180a", "16522eaef440eff4", "a08101ab216e3baf"),
    3: ("e0ae5cc387b92b2a", "8eead6ef5dcf98c5", "eb55556dc645c8f0", "356f96b0e20235ae"),
    4: ("240ab0797e1ad8d1", "2a1f8340a23604ed", "9ce4ec46df9efde2", "1d1efb9c6c0942a4"),
    8: ("1bd591face50068a", "e38758670fc5fa5b", "a63e6bae87122e44", "7b45fc824b5e661b"),
}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("less_one", [True, False])
def test_gptq_has_the_bits_of_gptqmodel(source: Path, tmp_path: Path, bits: int, less_one: bool) -> None:
    codes = (torch.arange(32 * 64) ** 2 // 3 % 2**bits).view(32, 64)
    groups = torch.arange(64) * 7 % 64 // 16
    zeros, scales = (torch.arange(32 * 4) % (2**bits - 1) + 1).view(32, 4), (torch.arange(1, 129) / 64).half()
    tensors = gptq_tensors(codes, zeros, scales.view(32, 4), groups, bits, less_one=less_one)
    words, as_they_are, one_less, matrix = GPTQMODEL[bits]
    assert digest(tensors["qweight"]) == words
    assert digest(tensors["qzeros"]) == (one_less if less_one else as_they_are)
    form = "gptq" if less_one else "gptq_v2"
    entry = {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": form}
    shown = one_module(in_half(source, tmp_path / "half"), tmp_path / "model", tensors, entry)
    assert digest(shown.read("extra.weight")) == matrix


def test_zero_points_that_borrowed_have_the_bits_of_gptqmodel(source: Path, tmp_path: Path) -> None:
    """Of a zero point of 0, one less is taken from the whole word; what was borrowed is carried back."""
    zeros = torch.tensor([3, 0, 15, 0, 0, 7, 1, 0])[:, None]
    tensors = gptq_tensors(torch.full((8, 8), 5), zeros, torch.ones(8, 1).half(), torch.zeros(8), 4, less_one=False)
    tensors["qzeros"] -= 0x11111111
    shown = one_module(source, tmp_path / "model", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 8})
    assert shown.read("extra.weight").equal((5 - zeros).expand(8, 8).bfloat16())


def test_awq_has_the_bits_of_its_libraries(source: Path, tmp_path: Path) -> None:
    """Digests are of what GPTQModel 7.7.0's `pack_awq` and AutoAWQ 0.2.9's `dequantize_gemm` make of these numbers."""
    codes = (torch.arange(64 * 32) ** 2 // 3 % 16).view(64, 32).T
    zeros = (torch.arange(4 * 32) % 16).view(4, 32).T
    scales = (torch.arange(1, 129) / 64).half().view(4, 32).T
    tensors = awq_tensors(codes, zeros, scales)
    assert (digest(tensors["qweight"]), digest(tensors["qzeros"])) == ("bc432bf6032e2e75", "c094c5626da94a99")
    entry = {"quant_method": "awq", "bits": 4, "version": "GEMM"}
    shown = one_module(in_half(source, tmp_path / "half"), tmp_path / "model", tensors, entry)
    assert digest(shown.read("extra.weight")) == "295a3336c261d2f8"


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(24, 1536, 32), (72, 96, 96), (4096, 128, 64)])
def test_awq_is_decoded_as_it_is_defined(source: Path, tmp_path: Path, outputs: int, inputs: int, group: int) -> None:
    matrix = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    of = torch.arange(inputs) // group
    codes, zeros, scales = coded(matrix, of, 4)
    entry = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    shown = one_module(source, tmp_path / "model", awq_tensors(codes, zeros, scales), entry)
    read_every_way(shown, ((codes - zeros[:, of]).half() * scales[:, of]).bfloat16())
    assert shown.stored_as == f"AWQ (4 bits in groups of {group})"


@pytest.mark.parametrize("save", [save_gptq, save_awq])
def test_a_model_has_its_own_names(source: Path, tmp_path: Path, save: Callable[..., Path]) -> None:
    shown, plain = Checkpoint.open(save(source, tmp_path / "model")), load_file(source / FILE)
    assert shown.tensors.keys() == plain.keys()
    assert len(shown.forms) == 48
    for name, own in plain.items():
        assert (shown.read(name).float() - own.float()).norm() < 0.2 * own.float().norm()
    (shown.path / "quantize_config.json").write_text("{}")
    assert "quantize_config.json" not in [file.name for file in shown.sidecars()]


def test_biases_that_no_model_has_are_left_out(gptq: Path, tmp_path: Path) -> None:
    """AutoGPTQ gave every module a bias."""
    held = load_file(gptq / FILE)
    modules = [name.removesuffix("qweight") for name in held if name.endswith("qweight")]
    biases = {f"{module}bias": torch.zeros(held[f"{module}scales"].shape[1]).half() for module in modules}
    kept = f"{modules[0]}bias"
    biases[kept][3] = 1
    every = Checkpoint.open(rewrite(gptq, tmp_path / "every", held | biases, config_entry(gptq)))
    assert [name for name in every.tensors if name.endswith("bias")] == [kept]
    some = {name: own for name, own in biases.items() if not name.endswith("w1.bias")}
    opened = Checkpoint.open(rewrite(gptq, tmp_path / "some", held | some, config_entry(gptq)))
    assert {name for name in opened.tensors if name.endswith("bias")} == some.keys()


def test_modules_in_other_bits(gptq: Path, tmp_path: Path) -> None:
    """GPTQModel's `dynamic` gives some modules bits and groups of their own."""
    of = torch.arange(32) // 16
    codes, zeros, scales = coded(torch.randn(48, 32), of, 8)
    held = load_file(gptq / FILE)
    held |= {f"{MODULE}{part}": own for part, own in gptq_tensors(codes, zeros, scales, of, 8, less_one=True).items()}
    shown = Checkpoint.open(rewrite(gptq, tmp_path / "model", held, config_entry(gptq)))
    assert shown.read(UP).equal(((codes - zeros[:, of]).half() * scales[:, of]).bfloat16())
    assert shown.stored_as == "GPTQ (4 bits in groups of 8, 8 bits in groups of 16)"


def part(ending: str) -> str:
    return f"{MODULE}{ending}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(part("scales")), "scales is missing"),
        (lambda held: held.pop(part("qzeros")), "qzeros is missing"),
        (lambda held: held.pop(part("qweight")), "qweight is missing"),
        (lambda held: held.update({part("scales"): torch.ones(4, 47).half()}), "these are not of one matrix"),
        (lambda held: held.update({part("qzeros"): torch.ones(4, 7).int()}), "these are not of one matrix"),
        (lambda held: held.update({part("qweight"): torch.ones(4, 48)}), "in torch.float32, expected a matrix"),
        (lambda held: held.update({part("scales"): torch.ones(4, 48).int()}), "expected a matrix of floating point"),
        (lambda held: held.update({part("g_idx"): torch.zeros(32)}), "expected the group of each input"),
    ],
)
def test_gptq_that_does_not_fit_is_refused(gptq: Path, tmp_path: Path, change: Any, says: str) -> None:
    check_refused(gptq, tmp_path / "model", change, says)


def test_groups_that_there_are_no_scales_of(gptq: Path, tmp_path: Path) -> None:
    held = load_file(gptq / FILE)
    held[part("g_idx")][5] = 4
    shown = Checkpoint.open(rewrite(gptq, tmp_path / "model", held, config_entry(gptq)))
    with pytest.raises(InvalidInputError, match="groups 0 to 4, and there are scales of 4"):
        shown.read(UP)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"checkpoint_format": "gptq_p"}, "layout 'gptq_p' of GPTQ; moetool decodes 'gptq' and 'gptq_v2'"),
        ({"is_marlin_format": True}, "layout 'marlin' of GPTQ"),
        ({"quant_method": "awq", "version": "gemv"}, "layout 'gemv' of AWQ with 4 bits; moetool decodes 'gemm'"),
        ({"quant_method": "awq", "version": "gemm", "bits": 8}, "of AWQ with 8 bits"),
    ],
)
def test_layouts_that_are_not_decoded(gptq: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        Checkpoint.open(rewrite(gptq, tmp_path / "model", load_file(gptq / FILE), config_entry(gptq) | change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.update({part("qzeros"): torch.ones(4, 5).int()}), "not of one matrix in 4 bits"),
        (lambda held: held.update({part("scales"): torch.ones(5, 48).half()}), "not of one matrix in 4 bits"),
        (lambda held: held.update({"model.layers.0.mlp.act.scales": torch.ones(48)}), "scales activations by"),
        (lambda held: held.pop(part("scales")), "scales is missing"),
    ],
)
def test_awq_that_does_not_fit_is_refused(awq: Path, tmp_path: Path, change: Any, says: str) -> None:
    check_refused(awq, tmp_path / "model", change, says)
