"""Rows of a matrix that tokens choose, against plain torch."""

import pytest
import torch

from moetool.compiled.compiler import problem
from moetool.kernels import neurons

pytestmark = pytest.mark.skipif(bool(problem()), reason="nothing compiles")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [7, 64, 200])
@pytest.mark.parametrize("chosen", [1, 3, 70])
def test_products_with_chosen_rows(dtype: torch.dtype, columns: int, chosen: int) -> None:
    draw = torch.Generator().manual_seed(columns + chosen)
    matrix = torch.randn(90, columns, generator=draw).to(dtype)
    index = torch.stack([torch.randperm(90, generator=draw)[:chosen] for _ in range(2)])
    inputs, values = torch.randn(2, columns, generator=draw), torch.randn(2, chosen, generator=draw)
    rows = matrix.double()[index]
    assert neurons.takes(matrix)
    dots = neurons.chosen_dots(matrix, index, inputs)
    torch.testing.assert_close(dots.double(), torch.einsum("tkc,tc->tk", rows, inputs.double()), rtol=1e-5, atol=1e-5)
    sums = neurons.chosen_sum(matrix, index, values)
    torch.testing.assert_close(sums.double(), torch.einsum("tkc,tk->tc", rows, values.double()), rtol=1e-5, atol=1e-5)


def test_sums_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, index = torch.randn(300, 192).bfloat16(), torch.arange(0, 300, 2)[None]
    inputs, values, found = torch.randn(1, 192), torch.randn(1, 150), []
    for count in (1, 2, 3):
        monkeypatch.setattr(neurons, "threads", lambda count=count: count)
        found.append((neurons.chosen_dots(matrix, index, inputs), neurons.chosen_sum(matrix, index, values)))
    for dots, sums in found[1:]:
        assert dots.equal(found[0][0])
        assert sums.equal(found[0][1])


def test_matrices_that_kernels_do_not_read_are_refused() -> None:
    assert not neurons.takes(torch.zeros(4, 4, dtype=torch.float64))
    assert not neurons.takes(torch.zeros(4, 6).t())
