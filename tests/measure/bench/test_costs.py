"""FLOPs and bytes of one token: counted by hand, and by torch as the model runs."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import DENSE_FAMILIES, build_dense
from families import FAMILIES, build
from kinds import KINDS, MIXTRAL, layout
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from moetool.format.layout import LayerLayout
from moetool.measure.bench.costs import Attention, Cost, Costs, model_costs, of_module
from moetool.quiet import quiet
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.shared_expert import SharedExpertOnBase
from moetool.runtime.timing import begun_cache

# Of the tiny Mixtral: 3 layers of hidden size 32, 4 heads of 8 with 2 of keys, 288 tokens; experts 32 → 48, 2 of 4.
ATTENTION, ROUTER, HEAD = 32 * 32 + 2 * 16 * 32 + 32 * 32, 4 * 32, 288 * 32
NORMS, KEYS = 7 * 32, 3 * 2 * 2 * 8  # all norms; what the cache holds of one token
SEEN = 3 * 4 * (8 + 8)  # multiplications of a token and one that it sees
MATRIX = 32 * 48


def compressed(stored: LayerLayout) -> Any:
    """A Mixtral all layers of which are stored like that, empty."""
    model = build("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = SharedBaseExperts(layer.mlp.experts, stored)
    return model


# How a layer's experts are stored → multiplications of one token, and bytes of fp32 that it reads.
STORED: dict[str, tuple[Callable[[], Any], int, int]] = {
    "native": (lambda: build("mixtral"), 2 * 3 * MATRIX, 2 * 3 * MATRIX * 4),
    "dense": (lambda: compressed(layout(MIXTRAL, "dense")), (1 + 2) * 3 * MATRIX, (1 + 2) * 3 * MATRIX * 4),
    "low-rank": (
        lambda: compressed(layout(MIXTRAL, "low-rank:3")),
        3 * MATRIX + 2 * 3 * 3 * (32 + 48),
        (3 * MATRIX + 2 * 3 * 3 * (32 + 48)) * 4,
    ),
    "half of them without a delta": (
        lambda: compressed(layout(MIXTRAL, "low-rank:3", "low-rank:0")),
        3 * MATRIX + 3 * 3 * (32 + 48),
        (3 * MATRIX + 3 * 3 * (32 + 48)) * 4,
    ),
    "pruned": (
        lambda: compressed(layout(MIXTRAL, "low-rank:3", channels=40)),
        3 * 32 * 40 + 2 * 3 * 3 * (32 + 48),
        (3 * 32 * 40 + 2 * 3 * 3 * (32 + 48) + 40) * 4,
    ),
    "down left alone": (
        lambda: compressed(layout(MIXTRAL, "low-rank:3", native=("down",))),
        2 * MATRIX + 2 * 2 * 3 * (32 + 48) + 2 * MATRIX,
        (2 * MATRIX + 2 * 2 * 3 * (32 + 48) + 2 * MATRIX) * 4,
    ),
    "quantized": (  # codes of 4 bits, a scale of fp32 per 16
        lambda: compressed(layout(MIXTRAL, "quantised:4:16")),
        (1 + 2) * 3 * MATRIX,
        3 * MATRIX * 4 + 2 * 3 * (MATRIX // 2 + MATRIX // 16 * 4),
    ),
    "quantized low-rank on a base of 8 bits": (
        lambda: compressed(layout(MIXTRAL, "quantised-low-rank:8:4:16", base="quantised-weight:8:16")),
        3 * MATRIX + 2 * 3 * 8 * (32 + 48),
        3 * (MATRIX + MATRIX // 16 * 4) + 2 * 3 * 8 * ((32 + 48) // 2 + (32 + 48) // 16 * 4),
    ),
    "one factor for all": (
        lambda: compressed(layout(MIXTRAL, "shared-v:5")),
        3 * MATRIX + 2 * 3 * 5 * (32 + 48),
        # V of gate and up [5, 32], of down [5, 48]; U of two experts
        (3 * MATRIX + 5 * (32 + 32 + 48) + 2 * 5 * (48 + 48 + 32)) * 4,
    ),
    "sparse": (
        lambda: compressed(layout(MIXTRAL, "sparse:0.75:1")),
        3 * MATRIX + 2 * 3 * MATRIX // 4,
        (3 * MATRIX + 2 * 3 * MATRIX // 4) * 4,
    ),
}


@pytest.mark.parametrize("stored", list(STORED))
def test_counted_by_hand(stored: str) -> None:
    make, multiplications, nbytes = STORED[stored]
    with quiet():
        costs = model_costs(make())
    each = ATTENTION + ROUTER + multiplications
    assert costs.decode_flops(11) == 2 * (3 * each + HEAD + 11 * SEEN)
    read = 4 * (3 * (ATTENTION + ROUTER) + HEAD + NORMS + 32 + 11 * KEYS) + 3 * nbytes
    assert costs.decode_bytes(11) == read, "weights, norms, one row of the embedding, the cache"
    assert costs.prefill_flops(11) == 2 * (11 * 3 * each + HEAD + 66 * SEEN), "logits of the last token"


def test_bytes_are_those_of_the_dtype() -> None:
    full, half = (model_costs(build("mixtral", dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert half.decode_bytes(7) * 2 == full.decode_bytes(7)
    assert half.decode_flops(7) == full.decode_flops(7)


def counted_by_torch(model: Any, context: int) -> tuple[int, int]:
    """FLOPs of a prompt of one token less, and of the token after it. Gradients keep products where torch counts them:
    it does not see those of kernels."""
    with torch.enable_grad(), quiet():
        model.eval().set_attn_implementation("eager")
        if hasattr(model.get_decoder(), "set_experts_implementation"):
            model.set_experts_implementation("eager")
        with FlopCounterMode(display=False) as prefill:
            prompt = torch.arange(3, 2 + context)[None]
            cache = cache_of(model(input_ids=prompt, use_cache=True, logits_to_keep=1, **begun_cache(model)))
        with FlopCounterMode(display=False) as decode:
            model(input_ids=torch.tensor([[7]]), **{CACHE: cache}, use_cache=True)
    return prefill.get_total_flops(), decode.get_total_flops()


# Their linear attention and short convolutions are counted as attention and as products, which torch does not see.
WITH_STATES = ("minimax", "lfm2_moe", "qwen3_next")


@pytest.mark.parametrize("family", WITH_STATES)
def test_counted_nearly_as_a_family_with_states_runs(family: str) -> None:
    model = build(family)
    assert model_costs(model).decode_flops(11) == pytest.approx(counted_by_torch(model, 11)[1], rel=0.04)


def test_experts_without_matrices_cost_nothing() -> None:
    """Of LongCat-Flash's nine experts, of which a token chooses three, three give back what they are given: as many
    products are counted as a token meets on average that chooses all alike."""
    model, chosen = build("longcat_flash"), []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
        for layer in model.model.layers
    ]
    runs, counted = counted_by_torch(model, 11)[1], model_costs(model).decode_flops(11)
    for hook in hooks:
        hook.remove()
    met = sum(int((own < 6).sum()) for own in chosen[3:])  # by the token after the prompt, in three layers
    assert runs - counted == 2 * (met - 3 * 2) * 3 * 24 * 32


def test_experts_without_matrices_cost_nothing_beside_compressed_ones(
    run_cli: Any, save_model: Any, tmp_path: Path
) -> None:
    source = save_model(build("longcat_flash"), tmp_path / "model")
    options = ("--method", "quantize", "--bits", 8, "--rounding", "nearest")
    assert run_cli("compress", source, tmp_path / "small", *options).code == 0
    native, small = (model_costs(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("model", "small"))
    assert small.decode_flops(11) == native.decode_flops(11)
    assert small.decode_bytes(11) < native.decode_bytes(11)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*WITH_STATES, "longcat_flash")])
def test_counted_as_a_family_runs(family: str) -> None:
    model = build(family)
    costs = model_costs(model)
    prefill, decode = counted_by_torch(model, 11)
    assert costs.decode_flops(11) == decode
    above = sum(layer.multiplications for layer in costs.attention)  # what eager attention computes and then hides
    assert costs.prefill_flops(10) == prefill - 2 * above * 45


@pytest.mark.parametrize("family", [name for name in DENSE_FAMILIES if name != "phi3-longrope"])
def test_counted_as_a_dense_family_runs(family: str) -> None:
    model = build_dense(family)
    assert model_costs(model).decode_flops(11) == counted_by_torch(model, 11)[1]


@pytest.mark.parametrize("kind", ["mixture", "mixture-half", "mixture-with-biases", "adapters", "neurons-all"])
def test_counted_as_a_custom_module_runs(kind: str) -> None:
    model = KINDS[kind]()
    assert model_costs(model).decode_flops(11) == counted_by_torch(model, 11)[1]


def test_neurons_count_as_far_as_they_are_kept() -> None:
    """Half of the neurons of two layers of three, 8 experts of 6 each, and what selects them."""
    dense, moefied = model_costs(build_dense("llama")), model_costs(KINDS["neurons-mlp"]())
    selector = 8 * 32 + 8 * 8
    assert dense.decode_flops(5) - moefied.decode_flops(5) == 2 * 2 * (3 * MATRIX // 2 - selector)
    centre = 48
    assert dense.decode_bytes(5) - moefied.decode_bytes(5) == 2 * 4 * (3 * MATRIX // 2 - selector - centre)


def test_an_oracle_computes_all_activations_first() -> None:
    dense, oracle = model_costs(build_dense("phi3")), model_costs(KINDS["neurons-oracle-joined"]())
    assert oracle.decode_flops(5) - dense.decode_flops(5) == 2 * 2 * (3 * MATRIX // 2 - MATRIX)


def test_masks_are_folded() -> None:
    dense, masks = model_costs(build_dense("llama")), model_costs(KINDS["masks"]())
    assert masks.decode_flops(5) == dense.decode_flops(5)
    assert masks.decode_bytes(5) == dense.decode_bytes(5)


def test_masks_are_counted_as_they_run() -> None:
    """A prompt first runs without deltas, for its mixture; then, as in a batch of prompts, nothing is folded."""
    model = KINDS["masks"]()
    costs, dense = model_costs(model), model_costs(build_dense("llama"))
    prefill, decode = counted_by_torch(model, 11)  # with gradients nothing is folded, and masks are mixed in each call
    above = sum(layer.multiplications for layer in costs.attention)
    router = sum(own.weight.numel() for own in (model.model.interpolation.first, model.model.interpolation.second))
    mixed = sum(own.log_phi.numel() for own in model.modules() if hasattr(own, "log_phi"))
    assert costs.prefill_flops(10) == prefill - 2 * (2 * above * 45 + router + mixed)
    assert costs.prefill_flops(10) > 2 * dense.prefill_flops(10)
    assert costs.decode_flops(11, batch=2) == decode - 2 * mixed > costs.decode_flops(11)


def test_shared_expert_on_the_base() -> None:
    """It reads the bases once more, and a delta of its own: 32 → 24, of rank 3."""
    with quiet():
        model = KINDS["shared-expert-on-base"]()
    shared = model.model.layers[0].mlp.shared_expert
    assert isinstance(shared, SharedExpertOnBase)
    numbers = 3 * (32 * 24 + 3 * (32 + 24))
    assert of_module(shared, 2) == Cost(Fraction(numbers), Fraction(4 * numbers))


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_is_counted(kind: str) -> None:
    with quiet():
        costs = model_costs(KINDS[kind]())
    assert 50_000 < costs.decode_flops(5) < 130_000
    assert 80_000 < costs.decode_bytes(5) < 300_000


def test_a_model_without_attention() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    with quiet():
        costs = model_costs(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes)))
    assert costs.attention == ()
    assert costs.decode_flops(5) == costs.decode_flops(500) > 0


def test_windows_and_directions() -> None:
    head = Cost()
    windowed = Costs(Cost(), head, (Attention(3, 5, window=4),), is_causal=True, keeps_last=True)
    assert windowed.decode_flops(3) == 2 * 3 * 3
    assert windowed.decode_flops(9) == 2 * 3 * 4
    assert windowed.decode_bytes(9) == 5 * 4
    assert windowed.prefill_flops(6) == 2 * 3 * (1 + 2 + 3 + 4 + 4 + 4)
    encoder = Costs(Cost(), head, (Attention(3, 5),), is_causal=False, keeps_last=False)
    assert encoder.prefill_flops(6) == 2 * 3 * 36


def test_codes_beside_experts_are_read_as_they_are_stored() -> None:
    """A byte per number and a scale of fp32 per 16; of an embedding a row, and all of it for a head that is tied."""
    with quiet():
        model = KINDS["beside-tied"]()
    table = 288 * (32 + 2 * 4)
    assert of_module(model.model.embed_tokens, 2) == Cost(nbytes=Fraction(table, 288))
    assert of_module(model.lm_head, 2) == Cost(Fraction(288 * 32), Fraction(table))
    assert of_module(model.model.layers[0].self_attn.k_proj, 2) == Cost(Fraction(16 * 32), Fraction(16 * (32 + 2 * 4)))
