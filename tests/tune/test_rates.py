"""Rates of scales in training: how far a step moves what they stand for."""

import pytest
import torch

from moetool.representations import parse_representation
from moetool.tune.rates import set_rate_of_scales

RATE = 1e-5


@pytest.mark.parametrize(
    "spec",
    [
        *(f"quantised:{bits}:32" for bits in (1, 2, 3, 4, 5, 6, 8)),
        *(f"trellis:{bits}:32" for bits in (1, 2, 3, 4)),
        "quantised-rows:3.10.3:32",
        "trellis-rows:0.0.8.8:32",
    ],
)
def test_a_step_moves_weights_as_far_whatever_their_bits(spec: str) -> None:
    matrix = 0.02 * torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    form = parse_representation(spec)
    weight = form.build(tuple(matrix.shape), torch.float32, torch.device("cpu"))
    weight.load_state_dict(form.encode(matrix, torch.float32))
    before = weight.dense().detach()
    optimizer = torch.optim.AdamW(weight.parameters(), lr=RATE)
    set_rate_of_scales(optimizer, weight, 10)
    weight(torch.eye(64)).sum().backward()
    optimizer.step()
    moved = (weight.dense().detach() - before)[before.abs().sum(1) > 0].square().mean().sqrt()
    assert 0.6 < moved / (10 * RATE) < 1.6


@pytest.mark.parametrize(("bits", "times"), [(8, 10), (2, 1)])
def test_what_is_no_scale_keeps_its_rate(bits: int, times: float) -> None:
    """Scales never decay, also where their rate is that of weights."""
    weight = parse_representation(f"quantised:{bits}:32").build((64, 64), torch.float32, torch.device("cpu"))
    model = torch.nn.ModuleDict({"codes": weight, "linear": torch.nn.Linear(8, 8)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    set_rate_of_scales(optimizer, model, times)
    own, scales = optimizer.param_groups
    assert [id(each) for each in own["params"]] == [id(each) for each in model["linear"].parameters()]
    assert (own["lr"], own["weight_decay"], scales["weight_decay"]) == (RATE, 0.1, 0)
    assert scales["params"] == [weight.scales]
