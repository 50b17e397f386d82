"""Router losses: their scale, and that padding and gradient checkpointing change nothing."""

import pytest
import torch
from dense_families import build_dense
from upcycled import load, open_dense, save_dense, upcycled, write_upcycled

from moetool.runtime.modules.routers import Routers
from moetool.tune.balance import balance_loss, balance_of, z_loss
from moetool.tune.trainer import recompute_activations


def test_the_scale_of_the_balance_loss() -> None:
    """1 for even routing, E for everything to one expert, whatever the number of tokens."""
    even = 10.0 * torch.eye(4).repeat(25, 1)
    assert balance_loss(even, 1, torch.ones(100, dtype=torch.bool)).item() == pytest.approx(1, rel=1e-3)
    one = torch.tensor([[20.0, 0, 0, 0]]).repeat(100, 1)
    assert balance_loss(one, 1, torch.ones(100, dtype=torch.bool)).item() == pytest.approx(4, rel=1e-3)
    flat = torch.zeros(8, 4)
    assert z_loss(flat, torch.ones(8, dtype=torch.bool)).item() == pytest.approx(torch.tensor(4.0).log().item() ** 2)


def test_padding_counts_for_nothing() -> None:
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    real = torch.arange(40) < 25
    for loss in (lambda values, mask: balance_loss(values, 2, mask), z_loss):
        alone = loss(logits[:25], torch.ones(25, dtype=torch.bool))
        torch.testing.assert_close(loss(logits, real), alone)
        changed = torch.where(real[:, None], logits, 100 * logits)
        torch.testing.assert_close(loss(changed, real), alone)


def test_its_gradient_evens_out_routing() -> None:
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0)) + 1
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    real = torch.ones(512, dtype=torch.bool)
    first = balance_loss(inputs @ rows.T, 2, real)
    optimizer = torch.optim.Adam([rows], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        balance_loss(inputs @ rows.T, 2, real).backward()
        optimizer.step()
    assert first > 1.3
    assert balance_loss(inputs @ rows.T, 2, real) < 1.1


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("llama", "mixtral"),
        ("llama", "granitemoe"),
        ("qwen2", "qwen2_moe"),
        ("qwen3", "qwen3_moe"),
        ("olmo2", "flex_olmo"),
        ("llama", "moetool"),
        ("gpt_neox", "moetool"),
    ],
)
def test_every_router_is_heard(family: str, target: str, tmp_path) -> None:
    """One set of logits per MoE layer, those of its own weight, with gradients, also through checkpointing."""
    dense = open_dense(save_dense(tmp_path / "dense", family))
    model = load(write_upcycled(tmp_path / "moe", upcycled(dense, target, layers=(0, 1, 2))))
    routers = Routers(model)
    assert len(routers) == 3
    tokens = torch.randint(288, (2, 10), generator=torch.Generator().manual_seed(0))
    real = torch.ones(20, dtype=torch.bool)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            recompute_activations(model)
        model.train()
        model.zero_grad()
        with routers.watched():
            model(input_ids=tokens, use_cache=False)
        assert [logits.shape for logits in routers.logits] == [(20, 4)] * 3
        balance_of(routers, 2, real).backward()
        assert len(routers.logits) == 3
        found = [parameter.grad for module in routers.modules for parameter in module.parameters()]
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in found)
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_dense_model_has_no_routers() -> None:
    assert len(Routers(build_dense("llama"))) == 0
