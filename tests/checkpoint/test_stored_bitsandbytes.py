"""Checkpoints of bitsandbytes, read as that library dequantizes them."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from bitsandbytes import functional
from dense_families import build_dense
from safetensors.torch import load_file
from stored_bits import FILE, check_refused, rewrite
from stored_words import save_bitsandbytes
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from moetool.checkpoint.reader import Checkpoint

UP = "model.layers.1.block_sparse_moe.experts.1.w3.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(families.build("mixtral", dtype=torch.bfloat16), tmp_path_factory.mktemp("bnb") / "source")


@pytest.fixture(scope="module")
def four(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bitsandbytes(source, tmp_path_factory.mktemp("four") / "model")


def by_library(codes: Tensor, state: functional.QuantState) -> Tensor:
    """What the library makes of codes as one row: its kernels for processors give other numbers than all its other
    devices for blocks that begin in one row and end in the next."""
    shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
    found = functional.dequantize_4bit(codes, state).view(shape)
    state.shape = shape
    return found


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("held", [torch.uint8, torch.bfloat16])
def test_bits_of_four_are_those_of_the_library(
    source: Path, tmp_path: Path, kind: str, nested: bool, held: torch.dtype
) -> None:
    """Rows that blocks divide, that they do not, and more scales than one scale is for."""
    matrices, expected = {}, {}
    for name, shape in {"whole": (48, 128), "crossed": (33, 96), "large": (300, 260)}.items():
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).bfloat16()
        codes, state = functional.quantize_4bit(
            matrix, blocksize=64, compress_statistics=nested, quant_type=kind, quant_storage=held
        )
        matrices |= {f"{name}.weight": codes}
        matrices |= {f"{name}.weight.{key}": own for key, own in state.as_dict(packed=True).items()}
        expected[f"{name}.weight"] = by_library(codes, state)
        if name == "whole":
            assert functional.dequantize_4bit(codes, state).equal(expected["whole.weight"])
    shown = Checkpoint.open(rewrite(source, tmp_path / "model", load_file(source / FILE) | matrices, FOUR))
    for name, own in expected.items():
        assert shown.read(name).equal(own)
        assert shown.read_rows(name, 5, 31).equal(own[5:31])
        assert torch.cat([*shown.blocks(name, 1000)]).equal(own.view(-1))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bits_are_those_of_transformers(save_model: Any, tmp_path: Path, kind: str) -> None:
    """A dense model: experts of transformers 5 are not linear layers, and stay as they are."""
    how = {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }[kind]
    widths = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # blocks divide rows
    path = save_model(build_dense("qwen3", dtype=torch.bfloat16, **widths), tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=how, dtype=torch.bfloat16, device_map="cpu")
    model.save_pretrained(tmp_path / "model")
    shown = Checkpoint.open(tmp_path / "model")
    expected = model.dequantize(torch.bfloat16).state_dict()
    assert len(shown.forms) == 7 * model.config.num_hidden_layers
    assert all(shown.read(name).equal(expected[name]) for name in shown.tensors)
    told = {"nf4": "bitsandbytes (NF4, double quantization)", "int8": "bitsandbytes (int8)"}
    assert shown.stored_as == told[kind]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_experts_by_themselves(source: Path, tmp_path: Path, kind: str) -> None:
    """As transformers 4 had them, whose experts were linear layers each."""
    shown, plain = Checkpoint.open(save_bitsandbytes(source, tmp_path / "model", kind)), load_file(source / FILE)
    assert shown.tensors.keys() == plain.keys()
    assert len(shown.forms) == 48
    for name, own in plain.items():
        assert (shown.read(name).float() - own.float()).norm() < 0.2 * own.float().norm()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(f"{UP}.absmax"), "absmax is missing, expected 24 for a matrix .48, 32."),
        (lambda held: held.pop(f"{UP}.nested_absmax"), "nested_absmax is missing, expected 1"),
        (lambda held: held.pop(UP), "is missing, expected 768 bytes"),
        (lambda held: held.update({UP: held[UP][1:].clone()}), "of 767 bytes, expected 768"),
        (lambda held: held.pop(STATE), "is stored in bytes, and there is no"),
        (lambda held: held.update({STATE: torch.zeros(7, dtype=torch.uint8)}), "holds no JSON"),
        (lambda held: held.update({STATE: torch.tensor([*b'{"shape": [3]}'], dtype=torch.uint8)}), "no shape of a"),
        (lambda held: held.update({STATE: noted("nf4", 50)}), "in blocks of 50; expected nf4 or fp4"),
        (lambda held: held.update({STATE: noted("int8", 64)}), "names the dtype 'int8'"),
    ],
)
def test_what_does_not_fit_is_refused(four: Path, tmp_path: Path, change: Any, says: str) -> None:
    check_refused(four, tmp_path / "model", change, says)


def noted(dtype: str, block: int) -> Tensor:
    text = f'{{"shape": [48, 32], "blocksize": {block}, "dtype": "{dtype}"}}'
    return torch.tensor([*text.encode()], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(UP.replace("weight", "SCB")), "the scales of its rows are missing"),
        (lambda held: held.update({UP.replace("weight", "SCB"): torch.ones(47)}), "scales of its rows are .47."),
        (lambda held: held.update({f"{UP}_format": torch.tensor(2, dtype=torch.uint8)}), "as a card has them"),
    ],
)
def test_int8_that_does_not_fit_is_refused(source: Path, tmp_path: Path, change: Any, says: str) -> None:
    path = save_bitsandbytes(source, tmp_path / "right", "int8")
    check_refused(path, tmp_path / "model", change, says)
