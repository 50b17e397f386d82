"""Attention of compressed models gives in one call what the family's own gives for a token, where it is known."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from moetool.compiled.compiler import problem
from moetool.kernels.self_attention import SelfAttention
from moetool.representations.quantized import QuantizedMatrix
from moetool.runtime.attention import attend_by_kernels
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.modules import token_attention
from moetool.runtime.modules.linear import multiply_by_kernels
from moetool.runtime.modules.quantized import QuantizedLinear
from moetool.runtime.modules.token_attention import TokenAttention, attend_in_one_call

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
IDS = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(make_mixtral: Any) -> PreTrainedModel:
    """Its attention runs by kernels, one after the other, as `attend_in_one_call` finds it."""
    made = make_mixtral(dtype=torch.bfloat16, head_dim=32).eval()
    attend_by_kernels(made)
    multiply_by_kernels(made)
    return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every token of a layer that runs in one call."""
    calls, run = [], SelfAttention.__call__

    def call(*given: Any) -> Tensor:
        calls.append(1)
        return run(*given)

    monkeypatch.setattr(SelfAttention, "__call__", call)
    return calls


@torch.no_grad()
def follow(model: PreTrainedModel, cache: Any = None, start: int = 8) -> Tensor:
    """Logits of tokens that follow one by one, after a prompt or what is in a cache."""
    cache = cache_of(model(IDS[:, :start], use_cache=True)) if cache is None else cache
    return torch.cat([model(IDS[:, t : t + 1], **{CACHE: cache}).logits for t in range(start, IDS.shape[1])], 1)


def test_the_same_logits(model: PreTrainedModel, counted: list[int]) -> None:
    expected = follow(model)
    attend_in_one_call(model)
    assert not counted
    assert follow(model).equal(expected)
    assert len(counted) == (IDS.shape[1] - 8) * model.config.num_hidden_layers
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, MixtralAttention)
    assert type(attention).__name__ == "MixtralAttention"


def test_what_is_left_to_the_family(model: PreTrainedModel, counted: list[int]) -> None:
    attend_in_one_call(model)
    first, mask = model.model.layers[0].self_attn, torch.ones(1, 9, dtype=torch.int64)
    mask[0, 0] = 0
    ways: list[Callable[[], Any]] = [
        lambda: model(IDS[:, :1]),
        lambda: model(IDS[:, 8:10], **{CACHE: prompt()}),
        lambda: model(IDS[:, 8:9], **{CACHE: prompt()}, attention_mask=mask),
        lambda: model(IDS[:, :1].expand(2, 1), **{CACHE: DynamicCache()}),
        lambda: model(IDS[:, :1], **{CACHE: DynamicCache(config=model.config)}),  # an empty one
    ]

    def prompt() -> Any:
        return cache_of(model(IDS[:, :8], use_cache=True))

    with torch.no_grad():
        for way in ways:
            way()
    assert not counted
    model(IDS[:, 8:9], **{CACHE: prompt()}).logits.sum().backward()  # gradients
    handle = first.o_proj.register_forward_hook(lambda *_: None)
    follow(model, start=19)
    assert len(counted) == model.config.num_hidden_layers - 1
    handle.remove()
    model.set_attn_implementation("sdpa")
    follow(model)
    assert len(counted) == model.config.num_hidden_layers - 1


def test_replaced_tensors_and_modules(model: PreTrainedModel) -> None:
    plain = copy.deepcopy(model)
    attend_in_one_call(model)
    follow(model)
    for own in (model, plain):
        attention = own.model.layers[0].self_attn
        attention.q_proj.weight = nn.Parameter(attention.q_proj.weight * 2)
        attention.k_proj.weight.data = attention.k_proj.weight.data * 3
    assert follow(model).equal(follow(plain))
    for own in (model, plain):
        own.model.layers[0].self_attn.o_proj = nn.Sequential(own.model.layers[0].self_attn.o_proj, nn.Identity())
    assert follow(model).equal(follow(plain))


@torch.no_grad()
def in_codes(model: PreTrainedModel, group: int, bits: int = 8) -> PreTrainedModel:
    """Its attention in few bits, as `--include attention` stores it."""
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            matrix = getattr(layer.self_attn, name).weight
            form = QuantizedMatrix(bits, group)
            stored = form.build((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device)
            for own, tensor in form.encode(matrix.float(), matrix.dtype).items():
                getattr(stored, own).copy_(tensor.view(getattr(stored, own).shape))
            made = QuantizedLinear(stored, None)
            made.is_filled = True
            setattr(layer.self_attn, name, made)
    return model.requires_grad_(False)


@pytest.mark.parametrize(("bits", "group"), [(8, 16), (8, 32), (6, 32), (5, 16)])
def test_attention_in_codes(bits: int, group: int, model: PreTrainedModel, counted: list[int]) -> None:
    plain = in_codes(model, group, bits)
    model = copy.deepcopy(plain)
    attend_in_one_call(model)
    expected = follow(plain)
    assert not counted
    torch.testing.assert_close(follow(model), expected, rtol=0.02, atol=0.02)
    assert len(counted) == (IDS.shape[1] - 8) * model.config.num_hidden_layers
    for own in (model, plain):
        own.model.layers[0].self_attn.q_proj.stored.scales.data = own.model.layers[0].self_attn.q_proj.stored.scales * 2
    torch.testing.assert_close(follow(model), follow(plain), rtol=0.02, atol=0.02)
    assert not torch.allclose(follow(model), expected, rtol=0.02, atol=0.02)


def test_attention_in_groups_that_kernels_do_not_read(model: PreTrainedModel, counted: list[int]) -> None:
    model = in_codes(model, 8)
    attend_in_one_call(model)
    follow(model)
    assert not counted


def test_caches_that_part_ways(model: PreTrainedModel) -> None:
    attend_in_one_call(model)
    expected = follow(model)
    with torch.no_grad():
        cache = cache_of(model(IDS[:, :8], use_cache=True))
        model(IDS[:, 8:9], **{CACHE: cache})  # from here on there is room
    shared = copy.copy(cache)
    shared.layers = [copy.copy(layer) for layer in cache.layers]
    kept = copy.deepcopy(cache)
    before = [(layer.keys, layer.keys.clone()) for layer in cache.layers]
    for own in (shared, cache, kept):
        assert follow(model, own, 9).equal(expected[:, 1:])
    cache.crop(-3)
    with torch.no_grad():
        model(IDS[:, :1], **{CACHE: cache})
    assert all(keys.equal(then) for keys, then in before)
    assert follow(
        model, DynamicCache([(layer.keys[:, :, :9], layer.values[:, :, :9]) for layer in shared.layers]), 9
    ).equal(expected[:, 1:])
    assert shared.layers[0].keys[:, :, :17].equal(cache.layers[0].keys[:, :, :17])


def test_copies_and_files(model: PreTrainedModel) -> None:
    attend_in_one_call(model)
    expected, file = follow(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        attention = other.model.layers[0].self_attn
        assert isinstance(attention, TokenAttention)
        assert follow(other).equal(expected)
        attention.v_proj.weight.data.zero_()
        assert not follow(other).equal(expected)
    assert follow(model).equal(expected)


@pytest.mark.parametrize("known", [MixtralAttention, Qwen3MoeAttention])
def test_families_that_are_known(known: type[nn.Module]) -> None:
    assert token_attention._is_known(known)


@pytest.mark.parametrize("other", [OlmoeAttention, GlmAttention, Gemma2Attention, nn.MultiheadAttention])
def test_families_that_do_more(other: type[nn.Module]) -> None:
    assert not token_attention._is_known(other)
