import pytest
import torch
from torch import Tensor

from moetool.numerics import gram as gram_module
from moetool.numerics.gram import Gram
from moetool.numerics.precision import bf16_products, fp32_products_are_exact


def rows_of(tokens: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(tokens, n, generator=torch.Generator().manual_seed(tokens + n))
    rows[:, :2] *= 100  # outlier channels
    return rows.to(dtype)


def relative(result: Tensor, rows: Tensor) -> float:
    exact = rows.double().T @ rows.double()
    return float(torch.linalg.norm(result - exact) / torch.linalg.norm(exact))


@pytest.mark.parametrize("n", [1, 5, 130, 300])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-14), (torch.float16, 1e-14), (torch.bfloat16, 2e-6)],
)
def test_equals_the_product_in_fp64(n: int, dtype: torch.dtype, tolerance: float) -> None:
    rows = rows_of(700, n, dtype)
    gram = Gram(n)
    gram.add(rows)
    matrix = gram.matrix()
    assert gram.count == 700
    assert matrix.dtype == torch.float64
    assert torch.equal(matrix, matrix.T)
    assert relative(matrix, rows) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_views_and_snapshots_add_up(dtype: torch.dtype) -> None:
    rows = rows_of(900, 200, dtype)
    gram = Gram(200)
    gram.add(rows[:0])
    gram.add(rows[:301])
    gram.matrix()  # reading in between changes nothing
    gram.add(rows.T.contiguous().T[301:302])  # not contiguous
    gram.add(rows[302:])
    assert gram.count == 900
    assert relative(gram.matrix(), rows) <= (1e-14 if dtype == torch.float32 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exact", [True, False])
def test_in_fp32_it_is_as_good_as_fp32_can_be(dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_module, "fp32_products_are_exact", lambda: exact)
    monkeypatch.setattr(gram_module, "_TOKENS", 64)
    rows = rows_of(2000, 130, dtype)
    gram = Gram(130, dtype=torch.float32)
    for part in rows.split(333):
        gram.add(part)
    matrix = gram.matrix()
    assert matrix.dtype == torch.float32
    assert torch.equal(matrix, matrix.T)
    assert 0 < relative(matrix, rows) <= 2e-6
    small = rows[:, 2:]  # beside outliers
    assert relative(matrix[2:, 2:], small) <= 2e-6


def test_without_rows_it_is_zero() -> None:
    gram = Gram(4)
    gram.add(torch.zeros(0, 4))
    assert gram.count == 0
    assert not gram.matrix().any()


def test_long_input_is_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_module, "_TOKENS", 64)
    monkeypatch.setattr(gram_module, "_TOKENS_FP64", 50)
    for dtype, tolerance in ((torch.float32, 1e-14), (torch.bfloat16, 2e-6)):
        rows = rows_of(333, 40, dtype)
        gram = Gram(40)
        gram.add(rows)
        assert relative(gram.matrix(), rows) <= tolerance


def test_bf16_units_give_the_same_and_the_switch_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(gram_module, "has_fast_bf16", lambda: True)
    rows = rows_of(2048, 256, torch.bfloat16)
    gram = Gram(256)
    gram.add(rows)
    assert relative(gram.matrix(), rows) <= 2e-6
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert fp32_products_are_exact()


def test_the_switch_survives_nesting_and_exceptions() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    with bf16_products():
        with pytest.raises(RuntimeError, match="flew"), bf16_products():
            raise RuntimeError("flew")
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert not fp32_products_are_exact()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_lossy_process_wide_precision_is_not_trusted() -> None:
    rows = rows_of(600, 130, torch.bfloat16)
    gram = Gram(130)
    with bf16_products():
        gram.add(rows)
    assert relative(gram.matrix(), rows) <= 1e-14  # took the fp64 path


def test_without_blas_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_module, "routine", lambda *_: None)
    rows = rows_of(600, 130)
    gram = Gram(130)
    gram.add(rows)
    assert relative(gram.matrix(), rows) <= 1e-14


def test_bf16_accumulation_would_not_pass() -> None:
    rows = rows_of(2048, 128, torch.bfloat16)
    assert relative((rows.T @ rows).double(), rows) > 1e-5


@pytest.mark.parametrize("rows", [torch.zeros(3, 5), torch.zeros(4), torch.zeros(3, 4, dtype=torch.int64)])
def test_rows_that_do_not_fit_are_refused(rows: Tensor) -> None:
    gram = Gram(4)
    with pytest.raises(ValueError, match=r"\[tokens, 4\]"):
        gram.add(rows)
    assert gram.count == 0
