"""The precision of products that refinement takes."""

import pytest
import torch

from moetool.numerics import precision
from moetool.numerics.precision import fast_products


@pytest.mark.parametrize(("has_units", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_products_are_bf16_where_the_processor_has_units_for_it(monkeypatch, has_units, expected) -> None:
    """And gradients of fp32 parameters are fp32."""
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: has_units)
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with fast_products(torch.device("cpu")):
        product = torch.ones(2, 8) @ weight.T
    assert product.dtype == expected
    product.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(product.float(), torch.ones(2, 8) @ weight.T, rtol=0.02, atol=0.05)
