"""Codes that are decoded once give what they give, and their scales the same gradients."""

import pytest
import torch

from moetool.representations import parse_representation
from moetool.representations.decoded_once import decoded_once

FORMS = (
    "quantised:2:8",
    "quantised-weight:4:row",
    "trellis:2:8",
    "quantised-rows:4.4.4.4:8",
    "quantised-low-rank:8:4:8",
)
SHAPE = 32, 48


@pytest.mark.parametrize("spec", FORMS)
def test_products_and_gradients_are_the_same(spec: str) -> None:
    stream = torch.Generator().manual_seed(1)
    matrix, inputs = torch.randn(SHAPE, generator=stream), torch.randn(6, SHAPE[1], generator=stream)
    form = parse_representation(spec)
    weight = form.build(SHAPE, torch.float32, torch.device("cpu"))
    weight.load_state_dict(form.encode(matrix, torch.float32), assign=True)
    for parameter in weight.parameters():
        parameter.requires_grad_(True)

    def run() -> list[torch.Tensor]:
        output = weight(inputs)
        output.square().sum().backward()
        found = [output.detach(), *(parameter.grad.clone() for parameter in weight.parameters())]
        weight.zero_grad()
        return found

    plain = run()
    with decoded_once(torch.nn.ModuleList([weight])):
        held = run()
    assert len(plain) > 1
    for one, other in zip(plain, held, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    assert all("forward" not in vars(module) for module in weight.modules())
