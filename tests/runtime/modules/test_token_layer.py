"""Layers of compressed models run single tokens in one call beside that of their experts, where the family is known."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM as Auto
from transformers import LlamaConfig, MixtralConfig, Olmo2Config, PreTrainedModel, Qwen2MoeConfig, Qwen3MoeConfig

from moetool.compiled.compiler import problem
from moetool.kernels.layer import TokenLayer
from moetool.runtime.attention import attend_by_kernels
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.modules.linear import multiply_by_kernels
from moetool.runtime.modules.token_attention import attend_in_one_call
from moetool.runtime.modules.token_layer import DecodingLayer, decode_in_few_calls

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
IDS = torch.randint(0, 64, (1, 14), generator=torch.Generator().manual_seed(0))
PROMPT, LAYERS = 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
KNOWN = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
    "qwen3_moe, shares of all": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=False),
    "llama": LlamaConfig(**SIZES),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **MOE, qkv_bias=True),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has for every token of a layer that runs in one call whether that routed, too."""
    calls, run = [], TokenLayer.__call__

    def call(*given: Any) -> Any:
        around = run(*given)
        calls.append(around.chosen is not None)
        return around

    monkeypatch.setattr(TokenLayer, "__call__", call)
    return calls


def built(config: Any) -> PreTrainedModel:
    """Its attention runs by kernels, as `decode_in_few_calls` finds it."""
    torch.manual_seed(1)
    model = Auto.from_config(config, dtype=torch.bfloat16).eval()
    for name, own in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(own, 0.5, 1.5)
    attend_by_kernels(model)
    multiply_by_kernels(model)
    attend_in_one_call(model)
    return model


@torch.no_grad()
def follow(model: PreTrainedModel) -> Tensor:
    cache = cache_of(model(IDS[:, :PROMPT], use_cache=True))
    following = IDS[:, PROMPT:].split(1, 1)
    return torch.cat([model(token, **{CACHE: cache}).logits for token in following], 1).float()


@pytest.mark.parametrize("family", KNOWN)
def test_the_same_logits(family: str, counted: list[bool]) -> None:
    model = built(KNOWN[family])
    expected = follow(model)
    decode_in_few_calls(model)
    assert not counted
    found = follow(model)
    routes = family not in ("llama", "qwen2_moe")  # which has a shared expert beside
    assert counted == [routes] * LAYERS * (IDS.shape[1] - PROMPT)
    assert (found - expected).norm() < 0.02 * expected.norm()
    copied = copy.deepcopy(model)
    assert isinstance(copied.model.layers[0], DecodingLayer)
    assert follow(copied).equal(found)


def test_without_a_cache_or_with_gradients_the_family_runs(counted: list[bool]) -> None:
    model = built(KNOWN["mixtral"])
    expected = model(IDS).logits
    decode_in_few_calls(model)
    assert model(IDS).logits.equal(expected)
    model(IDS[:, :1]).logits.sum().backward()
    with torch.no_grad():
        model(IDS.expand(2, -1), use_cache=True)
    assert not counted


def test_who_watches_sees_everything(counted: list[bool]) -> None:
    model, seen = built(KNOWN["mixtral"]), []
    decode_in_few_calls(model)
    follow(model)
    count = len(counted)
    for part in ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp", "mlp.gate"):
        watched = model.model.layers[1].get_submodule(part)
        handle = watched.register_forward_hook(lambda *_: seen.append(1))
        follow(model)
        assert len(seen) == 1 + IDS.shape[1] - PROMPT, part
        handle.remove()
        seen.clear()
        assert len(counted) == count + count // 2
        counted[:] = counted[:count]
    outputs = model(IDS, output_hidden_states=True, output_router_logits=True)
    assert len(outputs.hidden_states) == LAYERS + 1
    assert len(outputs.router_logits) == LAYERS


def test_replaced_tensors() -> None:
    model = built(KNOWN["qwen3_moe"])
    plain = copy.deepcopy(model)
    decode_in_few_calls(model)
    follow(model)
    for own in (model, plain):
        layer = own.model.layers[0]
        layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.roll(1, 0)
        layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight * 2)
    expected = follow(plain)
    assert (follow(model) - expected).norm() < 0.02 * expected.norm()
    for own in (model, plain):
        own.model.layers[1].post_attention_layernorm = nn.Identity()
    expected = follow(plain)
    assert (follow(model) - expected).norm() < 0.02 * expected.norm()


def test_families_that_do_more_stay(counted: list[bool]) -> None:
    model = built(Olmo2Config(**SIZES))
    decode_in_few_calls(model)
    follow(model)
    assert not any(isinstance(module, DecodingLayer) for module in model.modules())
    assert not counted
