"""Adapters as experts: what they compute, and what they are in transformers."""

from pathlib import Path

import pytest
import torch
from dense_families import DENSE_FAMILIES, build_dense
from sampling import DENSE_STRUCTURES, sampled
from torch import Tensor, nn
from torch.nn import functional as F
from upcycled import load, logits, open_dense, prompt, relative_error, save_dense, with_adapters, write_upcycled

from moetool.format.kinds.pesc import PescSpec
from moetool.quiet import quiet
from moetool.runtime.modules.pesc import AdapterExperts

HIDDEN, EXPERTS, WIDTH = 32, 4, 8


def adapted(
    top_k: int = 2, scale: float = 1.5, dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> AdapterExperts:
    """Trained adapters on a FFN of two layers."""
    torch.manual_seed(0)
    ffn = nn.Sequential(nn.Linear(HIDDEN, 48), nn.SiLU(), nn.Linear(48, HIDDEN)).to(dtype)
    spec = PescSpec(experts=EXPERTS, top_k=top_k, layers=(0,), width=WIDTH, scale=scale, dropout=dropout)
    module = AdapterExperts(ffn, HIDDEN, spec, "up_proj.weight")
    with torch.no_grad():
        for parameter in module.expert_parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return module.eval()


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def expected(module: AdapterExperts, hidden: Tensor) -> Tensor:
    """Eq. 5 to 7, token by token: top-k of the logits, and then a softmax over these k."""
    rows = []
    for token in hidden.flatten(0, 1):
        shared = module.ffn(token)
        scores = module.gate.weight @ token
        chosen = scores.argsort(descending=True)[: module.top_k]
        shares = scores[chosen].exp() / scores[chosen].exp().sum()
        total = shared.clone()
        for share, expert in zip(shares, chosen.tolist(), strict=True):
            inner = F.gelu(module.adapters.down_proj[expert] @ shared)
            total += share * module.adapters.scale * (module.adapters.up_proj[expert] @ inner)
        rows.append(total)
    return torch.stack(rows).view_as(hidden)


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_it_is_the_formula(top_k: int) -> None:
    module = adapted(top_k)
    with torch.no_grad():
        found, formula = module(inputs()), expected(module, inputs())
    assert relative_error(found, formula) < 1e-6  # routing weights are fp32
    assert relative_error(found, module.ffn(inputs())) > 0.1


def test_the_shape_of_the_input_is_kept() -> None:
    module = adapted()
    with torch.no_grad():
        whole = module(inputs())
        assert torch.allclose(module(inputs()[0]), whole[0])
        assert module(inputs()[:0]).shape == (0, 9, HIDDEN)


def test_adapters_that_say_nothing_change_nothing() -> None:
    module = adapted()
    with torch.no_grad():
        module.adapters.up_proj.zero_()
        assert module(inputs()).equal(module.ffn(inputs()))
        assert module.train()(inputs()).equal(module.ffn(inputs()))


def test_gradients_reach_what_was_chosen() -> None:
    module, rows = adapted(top_k=1), inputs().flatten(0, 1)
    chosen = (rows @ module.gate.weight.T).argmax(-1)
    idle = int(chosen[0])
    module(rows[chosen != idle]).square().sum().backward()
    used = [expert in chosen[chosen != idle] for expert in range(EXPERTS)]
    assert used.count(True) > 1
    for name in ("down_proj", "up_proj"):
        gradient = module.adapters.get_parameter(name).grad
        assert gradient is not None
        assert [bool(gradient[expert].any()) for expert in range(EXPERTS)] == used


@pytest.mark.parametrize(("top_k", "learns"), [(1, False), (2, True)])
def test_a_router_of_one_expert_learns_from_its_balance_alone(top_k: int, learns: bool) -> None:
    """The softmax over one logit is 1."""
    module = adapted(top_k)
    module(inputs()).square().sum().backward()
    assert module.gate.weight.grad is not None
    assert bool(module.gate.weight.grad.norm() > 1e-6) is learns


def test_gradients_are_those_of_the_formula() -> None:
    found, formula = [], []
    for compute, gradients in ((lambda module, x: module(x), found), (expected, formula)):
        module, hidden = adapted(), inputs().requires_grad_()
        compute(module, hidden).square().sum().backward()
        gradients.extend([hidden.grad, *(parameter.grad for parameter in module.parameters())])
    for ours, theirs in zip(found, formula, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_before_training_only_up_learns() -> None:
    """With `up` at zero there is no gradient for anything before it."""
    module = adapted()
    with torch.no_grad():
        module.adapters.up_proj.zero_()
    module(inputs()).square().sum().backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any() and "ffn" not in name}
    assert moved == {"adapters.up_proj"}


def test_dropout_only_while_training() -> None:
    module = adapted(dropout=0.5)
    with torch.no_grad():
        assert module(inputs()).equal(module(inputs()))
        assert relative_error(module(inputs()), expected(module, inputs())) < 1e-6
        module.train()
        assert not module(inputs()).equal(module(inputs()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    precise, module = adapted(), adapted(dtype=dtype)
    module.load_state_dict(precise.state_dict())
    rounded = adapted()
    rounded.load_state_dict({name: tensor.to(dtype).double() for name, tensor in precise.state_dict().items()})
    with torch.no_grad():
        found = module(inputs(dtype))
        formula = expected(rounded, inputs(dtype).double())
    assert found.dtype == dtype
    assert relative_error(found, formula) < (1e-5 if dtype == torch.float32 else 0.02)


# In transformers.


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize("family", sampled(DENSE_FAMILIES, DENSE_STRUCTURES))
def test_every_family_starts_as_the_dense_model(family: str, directory: Path) -> None:
    dense = save_dense(directory / f"{family}-dense", family)
    converted = with_adapters(open_dense(dense), layers=(0, 2))
    path = write_upcycled(directory / family, converted)
    model = load(path)
    assert sum(isinstance(module, AdapterExperts) for module in model.modules()) == 2
    assert logits(model).equal(logits(load(dense)))
    counted = sum(parameter.numel() for parameter in model.parameters())
    tied = build_dense(family).config.tie_word_embeddings
    assert counted == converted.parameters().total or tied
    assert converted.parameters().added == 2 * EXPERTS * (2 * HIDDEN * WIDTH + HIDDEN)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon"])
def test_trained_adapters_are_saved_and_matter(family: str, directory: Path, tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", family)
    model = load(write_upcycled(tmp_path / "pesc", with_adapters(open_dense(dense), scale=2.0)))
    before = logits(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, AdapterExperts):
                module.adapters.up_proj.normal_(0, 0.3)
                assert module.adapters.scale == 2.0
    assert relative_error(logits(model), before) > 0.01
    with quiet():
        model.save_pretrained(tmp_path / "again")
    assert logits(load(tmp_path / "again")).equal(logits(model))


def test_half_precision_in_transformers(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", "llama")
    path = write_upcycled(tmp_path / "pesc", with_adapters(open_dense(dense)))
    model = load(path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert relative_error(logits(model), logits(load(dense))) < 0.1


def test_it_generates(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", "phi")
    model = load(write_upcycled(tmp_path / "pesc", with_adapters(open_dense(dense))))
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, AdapterExperts):
            nn.init.normal_(module.adapters.up_proj, 0, 0.3)
    tokens = prompt(2, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert found[:, 6:].equal(logits(model, found)[:, 5:-1].argmax(-1))
