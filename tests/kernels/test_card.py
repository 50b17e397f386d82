"""The kernels of cards, as far as they can be tried without one."""

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moetool.kernels import card, products
from moetool.kernels.launches import Launches, kind, row_starts
from moetool.kernels.operands import CODES, TRELLIS, UnsupportedMatrixError
from moetool.kernels.table import Table
from moetool.representations import parse_representation
from moetool.representations.operand import Operand, Products, numbers

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_they_compute_what_dense_matrices_do() -> None:
    tests = Path(__file__).with_name("test_card_products.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


@needs_triton
@pytest.mark.parametrize(
    ("capability", "form", "served"),
    [
        (80, CODES[3], 8),
        (90, CODES[3], 8),
        (90, CODES[5], 8),
        (80, CODES[6], 4),
        (80, TRELLIS[3], 8),
        (90, TRELLIS[2], 4),
    ],
)
def test_kernels_compile_for_cards_that_are_not_here(
    capability: int, form: int, served: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    kernels = importlib.import_module("moetool.kernels.triton_products")
    places = dict.fromkeys(("table", "chosen", "order", "places"), "*i64") | {"x": "*fp32", "y": "*fp32"}
    counts = dict.fromkeys(("pairs", "matrices", "x_length", "y_length", "number"), "i32")
    constants = {"SLOT": 0, "SLOTS": 4, "FIELDS": 11, "NUMBERS": 2, "TOKENS": 4, "FORM": form, "SERVED": served,
                 "DECODE": None, "ALIGNED": True, "WHOLE": True, "TRANSPOSED": False, "ROWS": 16 // served,
                 "PLACED": False, "COLUMNS": 128}  # fmt: skip
    signature = places | counts | dict.fromkeys(constants, "constexpr")
    made = compiler.compile(
        compiler.ASTSource(kernels.products, signature, constants), target=target, options=card.FUSED
    )
    assert "ld.global.v4.b32" in made.asm["ptx"]  # 16 bytes of codes at once


def stored(spec: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Products:
    """An empty matrix in a form."""
    return parse_representation(spec).build(shape, dtype, torch.device("cpu")).products()


def test_a_kernel_for_every_kind_of_operand_and_no_other() -> None:
    shape, specs = (32, 64), ["quantised:2:16", "quantised:2:32", "low-rank:3", "low-rank:7", "low-rank:0"]
    launches = Launches([stored(spec, shape, torch.bfloat16) for spec in specs], torch.device("cpu"))
    assert [(step.stage, step.slot, step.is_first, step.is_last) for step in launches.steps] == [
        (0, 0, True, False),
        (1, 0, False, False),
        (1, 1, False, True),
    ]
    assert launches.inner == 7
    assert launches.numbers[:, :2, 0].tolist() == [[2, 0], [2, 0], [1, 3], [1, 3], [0, 0]]


@pytest.mark.parametrize(
    ("bits", "rows", "served"),
    [(1, 32, 8), (2, 32, 4), (3, 32, 8), (4, 32, 2), (5, 32, 8), (6, 32, 4), (8, 32, 1), (2, 30, 1), (6, 30, 1)],
)
def test_one_byte_serves_rows_if_they_can_be_cut_into_stripes(bits: int, rows: int, served: int) -> None:
    [[operand]] = stored(f"quantised:{bits}:16", (rows, 64))
    assert kind(operand).served == served


def test_where_rows_of_a_sparse_matrix_begin() -> None:
    positions = torch.tensor([1, 2, 9, 10, 11], dtype=torch.int32)
    operand = Operand("sparse", (4, 4), torch.ones(5), positions)
    assert row_starts(operand).tolist() == [0, 2, 2, 5, 5]


def test_what_kernels_cannot_do_is_refused() -> None:
    sparse = Operand("sparse", (4, 4), torch.ones(1), torch.zeros(1, dtype=torch.int32), transposed=True)
    with pytest.raises(UnsupportedMatrixError, match="transposed"):
        kind(sparse)
    with pytest.raises(UnsupportedMatrixError, match=r"16384 × 16384 numbers; .* up to 268435456"):
        kind(Operand("numbers", (1 << 14, 1 << 14), torch.ones(1)))
    with pytest.raises(UnsupportedMatrixError, match="one device's memory"):
        Table([((numbers(torch.ones(2, 2, device="meta")),),)], (2, 2), [nn.Module()])


def test_there_is_a_reason_where_there_are_no_kernels(monkeypatch: Any) -> None:
    assert products.problem(torch.device("meta")) == "there are none for meta"
    card.problem.cache_clear()
    monkeypatch.setattr(card, "find_spec", lambda name: None)
    assert "there is no triton" in products.problem(torch.device("cuda"))
    card.problem.cache_clear()
    monkeypatch.setenv("MOETOOL_KERNELS", "off")
    assert products.problem(torch.device("cuda")) == "MOETOOL_KERNELS=off is set"
    card.problem.cache_clear()
