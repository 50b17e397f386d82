"""`experts_implementation="moetool"`: transformers' own experts, computed as it computes them."""

from typing import Any

import pytest
import torch
from dense_families import build_dense
from families import build
from stored_experts import distance
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moetool.architectures import find_architecture
from moetool.compiled.compiler import problem
from moetool.runtime.modules import dense_experts
from moetool.runtime.modules.dense_experts import MOETOOL_EXPERTS, fits_grouped_products, run_dense_experts

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek", "phimoe", "granitemoe", "olmoe")
TOKENS = torch.arange(3, 35).view(2, 16)


def experts_of(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "_apply_gate"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens' experts at every call of the kernel."""
    calls: list[int] = []
    kernel = dense_experts._few

    def counted(inputs: Tensor, chosen: Tensor, matrices: Tensor) -> Tensor:
        calls.append(len(chosen))
        return kernel(inputs, chosen, matrices)

    monkeypatch.setattr(dense_experts, "_few", counted)
    return calls


@pytest.mark.skipif(bool(problem()), reason=problem())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_tells_the_same(family: str, few: list[int]) -> None:
    assert find_architecture({"model_type": family})
    model = build(family)
    found = {}
    for name in ("eager", MOETOOL_EXPERTS):
        model.set_experts_implementation(name)
        with torch.no_grad():
            found[name] = model(input_ids=TOKENS).logits, model(input_ids=TOKENS[:1, :1]).logits
    for own, other in zip(*found.values(), strict=True):
        assert distance(own, other) < 1e-5
    assert few


@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_near_to_fp32_as_transformers(tokens: int, dtype: torch.dtype) -> None:
    experts = experts_of(build("mixtral"))
    hidden = torch.randn(tokens, 32).to(dtype)
    weights, chosen = torch.randn(tokens, 4).softmax(-1).topk(2)
    with torch.no_grad():
        experts.to(dtype)
        own, plain = (
            run(experts, hidden, chosen, weights.to(dtype))
            for run in (run_dense_experts, type(experts).forward.__wrapped__)
        )
        experts.float()
        exact = type(experts).forward.__wrapped__(experts, hidden.float(), chosen, weights.to(dtype).float())
    assert own.dtype == dtype
    assert own.shape == plain.shape
    if tokens:
        assert distance(own, exact) < max(1.05 * distance(plain, exact), 1e-5, torch.finfo(dtype).eps)


@pytest.mark.parametrize("tokens", [2, 40])
def test_experts_on_other_machines_count_as_nothing(tokens: int) -> None:
    """transformers gives them numbers from `num_experts` on."""
    experts = experts_of(build("mixtral"))
    hidden = torch.randn(tokens, 32)
    weights, chosen = torch.randn(tokens, 4).softmax(-1).topk(2)
    elsewhere = chosen.clone()
    elsewhere[:, 1] = torch.tensor([4, 7]).repeat(tokens // 2)
    with torch.no_grad():
        expected = run_dense_experts(experts, hidden, chosen, weights * torch.tensor([1.0, 0.0]))
        assert distance(run_dense_experts(experts, hidden, elsewhere, weights), expected) < 1e-6


@pytest.mark.parametrize("name", ["has_bias", "is_transposed", "has_post_expert_norm"])
def test_unusual_experts_are_left_to_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of(build("mixtral"))
    setattr(experts, name, True)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", lambda *_: "transformers")
    with torch.no_grad():
        assert run_dense_experts(experts, *[torch.zeros(1, 1)] * 3) == "transformers"


@pytest.mark.parametrize("width", [48, 45])
def test_gradients_come_from_transformers(width: int, few: list[int]) -> None:
    """By grouped products, or one expert after the other where these cannot take the width."""
    model = build("mixtral", intermediate_size=width)
    assert fits_grouped_products(experts_of(model)) is (width == 48)
    found = []
    for name in ("eager", MOETOOL_EXPERTS):
        model.set_experts_implementation(name)
        model.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        found.append(experts_of(model).down_proj.grad.clone())
    assert distance(found[1], found[0]) < 1e-5
    assert not few


def test_a_decoding_step_is_one_graph() -> None:
    experts = experts_of(build("mixtral"))
    experts.config._experts_implementation = MOETOOL_EXPERTS
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="eager")
    with torch.no_grad():
        for tokens in (1, 5, 40):
            weights, chosen = torch.randn(tokens, 4).softmax(-1).topk(2)
            hidden = torch.randn(tokens, 32)
            assert distance(compiled(hidden, chosen, weights), experts(hidden, chosen, weights)) < 1e-6
    torch._dynamo.reset()


def test_it_can_be_exported() -> None:
    experts = experts_of(build("mixtral"))
    experts.config._experts_implementation = MOETOOL_EXPERTS
    weights, chosen = torch.randn(3, 4).softmax(-1).topk(2)
    arguments = (torch.randn(3, 32), chosen, weights)
    with torch.no_grad():
        exported = torch.export.export(experts, arguments).module()
        assert distance(exported(*arguments), experts(*arguments)) < 1e-6


def test_deepseek_takes_it_whatever_llama_was_asked_before() -> None:
    """transformers keeps what it found of a class, and finds it for those that inherit from it."""
    assert not build_dense("llama")._can_set_experts_implementation()
    model = build("deepseek")
    model.set_experts_implementation(MOETOOL_EXPERTS)
    assert model.config._experts_implementation == MOETOOL_EXPERTS
