"""Compressed models run a token through all layers in one call, with the same numbers, unless asked for more."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM as Auto
from transformers import MixtralConfig, PreTrainedModel, Qwen3MoeConfig

from moetool.compiled.compiler import problem
from moetool.kernels.layers import TokenLayers
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.modules.token_model import DecodingModel

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
IDS = torch.randint(0, 64, (1, 14), generator=torch.Generator().manual_seed(0))
PROMPT, LAYERS = 8, 3
TOKENS = IDS.shape[1] - PROMPT
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
FAMILIES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
}
NEAREST = "--method", "quantize", "--rounding", "nearest", "--group-size", 32
METHODS: dict[str, tuple[Any, ...]] = {
    "4 bits": (*NEAREST, "--bits", 4),
    "4 bits, attention in 8": (*NEAREST, "--bits", 4, "--include", "attention,embeddings"),
    "2 bits on a base": ("--method", "ders-quantize", "--bits", 2, "--group-size", 32),
}
Make = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def made(run_cli: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`made(family, method)`: a compressed model in bf16, read anew."""
    sources: dict[str, Path] = {}

    def make(family: str = "mixtral", method: str = "4 bits", **options: Any) -> PreTrainedModel:
        if family not in sources:
            torch.manual_seed(1)
            sources[family] = save_model(Auto.from_config(FAMILIES[family]), tmp_path_factory.mktemp(family) / "model")
        path = sources[family].parent / method
        if not path.exists():
            assert run_cli("compress", sources[family], path, *METHODS[method]).code == 0
        model: PreTrainedModel = Auto.from_pretrained(path, dtype=torch.bfloat16, **options).eval()
        return model

    return make


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has for every token that ran in one call how many layers that had."""
    found, run = [], TokenLayers.__call__

    def call(self: TokenLayers, *given: Any) -> Any:
        found.append(len(self._layers))
        return run(self, *given)

    monkeypatch.setattr(TokenLayers, "__call__", call)
    return found


def layer_by_layer(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that never takes one call."""
    copied = copy.deepcopy(model)
    copied.model.is_refused = True
    return copied


@torch.no_grad()
def follow(model: PreTrainedModel, **options: Any) -> Tensor:
    cache = cache_of(model(IDS[:, :PROMPT], use_cache=True))
    following = IDS[:, PROMPT:].split(1, 1)
    return torch.cat([model(token, **{CACHE: cache}, **options).logits for token in following], 1)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits(
    family: str, method: str, rounds: bool, made: Make, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rounds:
        monkeypatch.delenv("MOETOOL_KERNELS")
    model = made(family, method)
    assert isinstance(model.model, DecodingModel)
    expected = follow(layer_by_layer(model))
    assert not calls
    assert follow(model).equal(expected)
    assert calls == [LAYERS] * TOKENS


@torch.no_grad()
def test_generating_takes_it(made: Make, calls: list[int], tmp_path: Path) -> None:
    model = made()
    told = {"do_sample": False, "max_new_tokens": TOKENS}
    expected = layer_by_layer(model).generate(IDS, **told)
    assert model.generate(IDS, **told).equal(expected)
    assert calls == [LAYERS] * (TOKENS - 1)
    model.save_pretrained(tmp_path)
    assert "Mixtral" in (tmp_path / "config.json").read_text()
    for options in ({"num_beams": 2}, {"attention_mask": (IDS[0, 0] != IDS).long()}, {"use_cache": False}):
        calls.clear()
        assert model.generate(IDS, **told, **options).equal(layer_by_layer(model).generate(IDS, **told, **options))
        assert not calls, options


@torch.no_grad()
def test_a_cache_that_is_cropped_or_copied_goes_on(made: Make, calls: list[int]) -> None:
    model, tokens = made(), IDS[:, PROMPT:].split(1, 1)

    def both_ways(own: PreTrainedModel) -> Tensor:
        cache = cache_of(own(IDS[:, :PROMPT], use_cache=True))
        found = [own(token, **{CACHE: cache}).logits for token in tokens[:3]]
        other = copy.deepcopy(cache)
        cache.crop(-2)
        found += [own(token, **{CACHE: cache}).logits for token in tokens[3:]]
        found += [own(token, **{CACHE: other}).logits for token in tokens[1:4]]
        return torch.cat(found, 1)

    assert both_ways(model).equal(both_ways(layer_by_layer(model)))
    assert len(calls) == 9


def test_who_watches_or_asks_for_more_sees_everything(made: Make, calls: list[int]) -> None:
    model, seen = made(), []
    layer = model.model.layers[1]
    for part in ("", "self_attn", "self_attn.q_proj", "input_layernorm", "mlp", "mlp.gate", "mlp.experts"):
        handle = layer.get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
        follow(model)
        handle.remove()
        assert len(seen) == 1 + TOKENS, part
        seen.clear()
    assert not calls
    forward = layer.mlp.forward
    layer.mlp.forward = lambda *given: (seen.append(1), forward(*given))[1]  # as accelerate puts its hooks
    follow(model)
    assert len(seen) == 1 + TOKENS
    del layer.mlp.forward
    model.set_experts_implementation("eager")
    follow(model)
    assert not calls
    model(IDS[:, :1]).logits.sum().backward()
    model.train()
    follow(model)
    assert not calls
    model.eval()
    model.set_experts_implementation("moetool")
    follow(model)
    assert len(calls) == TOKENS
    for asked in ("output_hidden_states", "output_router_logits"):
        follow(model, **{asked: True})
        setattr(model.config, asked, True)
        follow(model)
        setattr(model.config, asked, False)
    assert len(calls) == TOKENS


def test_what_is_replaced_is_seen(made: Make, calls: list[int]) -> None:
    """Also of single experts, whose tensors are looked at when it is known who was chosen."""

    def a_scale(model: PreTrainedModel) -> None:
        experts = model.model.layers[1].mlp.experts
        for expert in range(experts.num_experts):
            scales = experts.delta(expert, "down").scales
            scales.data = scales.data * 2

    def a_norm(model: PreTrainedModel) -> None:
        norm = model.model.layers[0].input_layernorm
        norm.weight = nn.Parameter(norm.weight * 2)

    def fewer(model: PreTrainedModel) -> None:
        model.config.num_hidden_layers = 2

    model = made()
    follow(model)
    for change in (a_scale, a_norm, fewer):
        before = follow(model)
        change(model)
        after = follow(model)
        assert not after.equal(before), change
        assert after.equal(follow(layer_by_layer(model))), change
    calls.clear()
    assert model.to(torch.float32) is model
    follow(model)
    assert not calls
    model.config.num_hidden_layers = LAYERS
    follow(model.to(torch.bfloat16))
    assert len(calls) == TOKENS


def test_layers_in_another_order(made: Make, calls: list[int]) -> None:
    model = made()
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]
    assert follow(model).equal(follow(layer_by_layer(model)))
    assert not calls


def test_another_dtype_has_the_family_run(made: Make, calls: list[int]) -> None:
    for dtype in (torch.float32, torch.float16):
        model = made().to(dtype)
        assert follow(model).equal(follow(layer_by_layer(model)))
    assert not calls


def test_any_number_of_threads_gives_the_same_bits(made: Make, request: pytest.FixtureRequest) -> None:
    model = made()
    alone = follow(model)
    request.getfixturevalue("two_threads")
    assert all(follow(model).equal(alone) for _ in range(3))
