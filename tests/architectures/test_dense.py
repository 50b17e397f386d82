"""Dense families: what is derived of them against what transformers writes and what is known of them, and refusals."""

import dataclasses
import time
from contextlib import nullcontext
from typing import Any

import pytest
from dense_families import COMMON, DENSE_FAMILIES, MOEFY_FAMILIES, build_dense
from derived_dense import DERIVED_DENSE
from sampling import DENSE_STRUCTURES, sampled
from transformers import AutoConfig

from moetool.architectures.base import GATED, GATED_JOINED
from moetool.architectures.dense import (
    DENSE_SIBLINGS,
    ENCODERS,
    FEATURES,
    KNOWN_DENSE,
    check_predicts,
    find_dense_architecture,
    is_encoder,
)
from moetool.architectures.dense.known import CHECKED
from moetool.errors import InvalidInputError

NEOX = {"up": "dense_h_to_4h.weight", "down": "dense_4h_to_h.weight"}
FC = {"up": "fc1.weight", "down": "fc2.weight"}
C_FC = {"up": "c_fc.weight", "down": "c_proj.weight"}
BERT = {"up": "intermediate.dense.weight", "down": "output.dense.weight"}
# Where the networks of families lie, by model type: prefix of a layer, path in it, matrices, features.
PLACES: dict[str, tuple[str, str, dict[str, str], tuple[str, ...]]] = {
    "gpt_neox": ("gpt_neox.layers.{layer}", "mlp", NEOX, ("own_block", "ungated")),
    "falcon": ("transformer.h.{layer}", "mlp", NEOX, ("own_block", "ungated")),
    "gpt_bigcode": ("transformer.h.{layer}", "mlp", C_FC, ("own_block", "ungated")),
    "starcoder2": ("model.layers.{layer}", "mlp", C_FC, ("own_block", "ungated")),
    "phi": ("model.layers.{layer}", "mlp", FC, ("own_block", "ungated")),
    "opt": ("model.decoder.layers.{layer}", "fc1", FC, ("own_block", "ungated")),
    "bert": ("bert.encoder.layer.{layer}", "intermediate", BERT, ("own_block", "ungated")),
}
PLACES |= dict.fromkeys(("glm", "glm4"), ("model.layers.{layer}", "mlp", GATED_JOINED, ("own_block",)))
PLACES |= {name: ("model.layers.{layer}", "mlp", GATED, known.features) for name, known in KNOWN_DENSE.items()}
PLACES["phi3"] = ("model.layers.{layer}", "mlp", GATED_JOINED, ())
FAMILIES = {**DENSE_FAMILIES, **MOEFY_FAMILIES}


@pytest.mark.parametrize("family", sampled(FAMILIES, [*DENSE_STRUCTURES, "opt", "bert"]))
def test_what_is_derived(family: str) -> None:
    model_type, own = FAMILIES[family]
    found = find_dense_architecture(AutoConfig.for_model(model_type, **{**COMMON, **own}).to_dict())
    place = PLACES.get(model_type, ("model.layers.{layer}", "mlp", GATED, ("own_block",)))
    assert (found.layer, found.ffn, dict(found.weights), found.features) == place
    assert (found.layers, found.ffn_layers, found.layer_module, found.kept) == (3, (0, 1, 2), "", ())
    assert not found.is_transposed
    assert found.returns_tuple == (model_type == "falcon")
    assert found.norm_offset == (1.0 if model_type == "gemma" else 0.0)
    assert found.is_encoder == (model_type == "bert")
    assert found.unused == (("bert.pooler.", "cls.seq_relationship.") if found.is_encoder else ())
    assert found.reference.startswith("https://")
    assert {*found.features, *found.optional_features.values()} <= set(FEATURES)
    with pytest.raises(TypeError):
        found.weights["up"] = "x"  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.layer = "x"  # type: ignore[misc]


def test_every_family_whose_entries_are_checked_is_tested() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == CHECKED
    assert set(KNOWN_DENSE) < CHECKED


@pytest.mark.parametrize("family", sampled([*DENSE_FAMILIES, *DERIVED_DENSE], DENSE_STRUCTURES))
def test_names_are_those_of_the_model(family: str) -> None:
    """In these families names in memory and on disk are the same, but for one that says so."""
    model = build_dense(family)
    known = find_dense_architecture(model.config.to_dict())
    if known.layer_module:
        known = dataclasses.replace(known, layer=known.layer_module)
    state = model.state_dict()
    for layer in known.ffn_layers:
        weights = {known.weight_name(layer, role) for role in known.roles}
        biases = {known.bias_name(layer, role) for role in known.roles}
        kept = {known.ffn_prefix(layer) + name for name in known.kept}
        assert weights | kept <= state.keys()
        if known.spread is None:
            assert {name for name in state if name.startswith(known.ffn_prefix(layer))} - biases == weights | kept
    assert not any(name.startswith(known.layer_prefix(known.layers)) for name in state)
    assert known.ffn_prefix(1).startswith(known.layer_prefix(1))
    if known.joined_qkv:
        assert known.layer_prefix(0) + known.joined_qkv in state


def test_what_is_not_derived_by_names() -> None:
    """Networks in some layers, whose names on disk are others than in memory; matrices `[in, out]`; an activation with
    numbers of its own."""
    nemotron, gpt2, apertus = (
        find_dense_architecture(build_dense(family).config.to_dict()) for family in ("nemotron_h", "gpt2", "apertus")
    )
    assert (nemotron.layers, nemotron.ffn_layers, nemotron.ffn) == (4, (1, 3), "mixer")
    assert (nemotron.layer, nemotron.layer_module) == ("backbone.layers.{layer}", "model.layers.{layer}")
    assert gpt2.is_transposed
    assert apertus.kept == ("act_fn.alpha_n", "act_fn.alpha_p", "act_fn.beta", "act_fn.eps")


def test_it_takes_no_time() -> None:
    """The model of 80 layers is never in memory."""
    config = {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672}
    find_dense_architecture({"model_type": "llama"})  # what is imported once
    start = time.perf_counter()
    assert find_dense_architecture({**config, "num_attention_heads": 64, "vocab_size": 128256}).layers == 80
    assert time.perf_counter() - start < 5  # a fifth of that where nothing else runs


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        find_dense_architecture(config)
    return str(caught.value)


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_moe_models_are_refused(key: str) -> None:
    told = refusal({"model_type": "qwen2_moe", key: 8})
    assert f"(qwen2_moe) is an MoE model already: {key} is 8." in told
    assert "export --format dense --expert 0` makes one of what moetool upcycled to this family." in told


@pytest.mark.parametrize("model_type", DENSE_SIBLINGS)
def test_a_way_back_is_told_where_there_is_one(model_type: str) -> None:
    assert "`export --format dense --expert 0` makes one of it." in refusal(
        {"model_type": model_type, "num_experts": 8}
    )


def test_no_way_back_is_told_of_families_that_are_not_known() -> None:
    told = refusal({"model_type": "jamba", "num_experts": 8})
    assert told.endswith("Upcycling and moefying start from a dense model.")


@pytest.mark.parametrize("config", [{"model_type": "llama", "num_experts": 1}, {"model_type": "doge"}])
def test_what_has_no_experts_is_dense(config: dict[str, Any]) -> None:
    """Whatever `config.json` says: Doge's has a number of experts that its layers have not."""
    settings = AutoConfig.for_model(**config).to_dict()
    assert config["model_type"] == "llama" or settings["num_experts"] > 1
    assert find_dense_architecture(settings | config).ffn == "mlp"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "camembert"},
        {"model_type": "nomic", "architectures": ["NomicForMaskedLM"]},
        {"model_type": "gte", "architectures": ["GteForSequenceClassification"]},
    ],
)
def test_encoders_are_refused(config: dict[str, Any]) -> None:
    told = refusal(config)
    assert f"({config['model_type']}) only encodes" in told
    assert f"moefy takes {', '.join(ENCODERS)} too" in told


def test_an_unknown_family_gets_a_hint() -> None:
    told = refusal({"model_type": "lama"})
    assert "Unknown model family 'lama': transformers" in told
    assert "Did you mean" in told
    assert "Did you mean" not in refusal({"model_type": "zzz"})
    assert refusal({}) == "config.json names no model_type, so that its family cannot be told."


def test_wrappers_are_told_from_typing_errors() -> None:
    told = refusal({"model_type": "llava", "text_config": {"model_type": "llama"}})
    assert told.startswith("This model (llava) is a language model (llama) with others around it.")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "none of its layers has one"),
        ({"model_type": "bitnet"}, r"BitNetMLP computes one neuron of others \(ffn_sub_norm\)"),
        ({"model_type": "xlnet"}, r"XLNetFeedForward does more with its output than a feed-forward network"),
        ({"model_type": "gemma3n_text"}, r"Gemma3nTextMLP computes one neuron of others"),
        ({"model_type": "zamba"}, "its layers share weights with each other"),
        ({"model_type": "hrm_text"}, r"they lie in several places \(model\.L_module\.layers"),
        ({"model_type": "xlm"}, "none of its layers has one"),
        (
            {"model_type": "bart", "is_encoder_decoder": True},
            "has an encoder that reads one text and a decoder",
        ),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but should be at most"),
    ],
)
def test_other_networks_are_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        find_dense_architecture(config)


@pytest.mark.parametrize(
    ("config", "predicts"),
    [
        ({"model_type": "camembert", "architectures": ["CamembertForMaskedLM"]}, False),
        ({"model_type": "nomic", "architectures": ["NomicForMaskedLM"]}, False),
        ({"model_type": "camembert", "architectures": ["CamembertForMaskedLM"], "is_decoder": True}, True),
        ({"model_type": "roberta", "is_decoder": True}, True),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, True),
    ],
)
def test_encoders_that_would_pass_for_decoders(config: dict[str, Any], predicts: bool) -> None:
    with nullcontext() if predicts else pytest.raises(InvalidInputError, match=r"only encodes: .* takes bert, .* only"):
        check_predicts(config)


def test_a_decoder_of_a_family_of_encoders_is_none() -> None:
    assert is_encoder({"model_type": "roberta"})
    assert not is_encoder({"model_type": "roberta", "is_decoder": True})
