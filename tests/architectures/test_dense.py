"""Dense families: what is known of them against what transformers writes, and refusals of everything else."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
from dense_families import DENSE_FAMILIES, MOEFY_FAMILIES, build_dense

from moetool.architectures.dense import (
    DENSE_SIBLINGS,
    FEATURES,
    check_predicts,
    dense_architectures,
    find_dense_architecture,
)
from moetool.errors import InvalidInputError


def test_every_family_is_data_and_unambiguous() -> None:
    found = dense_architectures()
    types = [name for family in found for name in family.model_types]
    assert [family.name for family in found] == sorted(family.name for family in found)
    assert len(types) == len(set(types))
    assert {model_type for model_type, _ in {**DENSE_FAMILIES, **MOEFY_FAMILIES}.values()} == set(types)
    for family in found:
        assert family.reference.startswith("https://")
        assert set(family.roles) in ({"gate", "up", "down"}, {"up", "down"})
        assert ("ungated" in family.features) == ("gate" not in family.roles)
        assert {*family.features, *family.optional_features.values()} <= set(FEATURES)
        with pytest.raises(TypeError):
            family.weights["up"] = "x"  # type: ignore[index]
        with pytest.raises(dataclasses.FrozenInstanceError):
            family.layer = "x"  # type: ignore[misc]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_names_are_those_of_the_model(family: str) -> None:
    """In these families names in memory and on disk are the same."""
    model = build_dense(family)
    known = find_dense_architecture(model.config.to_dict())
    state = model.state_dict()
    for layer in range(3):
        stored = {name for name in state if name.startswith(known.ffn_prefix(layer))}
        weights = {known.weight_name(layer, role) for role in known.roles}
        assert stored - {known.bias_name(layer, role) for role in known.roles} == weights
    assert not any(name.startswith(known.layer_prefix(3)) for name in state)
    assert known.ffn_prefix(1).startswith(known.layer_prefix(1))
    if known.joined_qkv:
        assert known.layer_prefix(0) + known.joined_qkv in state


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        find_dense_architecture(config)
    return str(caught.value)


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_moe_models_are_refused(key: str) -> None:
    told = refusal({"model_type": "llama", key: 8})
    assert f"(llama) is an MoE model already: {key} is 8." in told
    assert "export --format dense --expert 0` makes one of what moetool upcycled to this family." in told


@pytest.mark.parametrize("model_type", DENSE_SIBLINGS)
def test_a_way_back_is_told_where_there_is_one(model_type: str) -> None:
    assert "`export --format dense --expert 0` makes one of it." in refusal(
        {"model_type": model_type, "num_experts": 8}
    )


def test_no_way_back_is_told_of_families_that_are_not_known() -> None:
    told = refusal({"model_type": "dbrx", "num_experts": 8})
    assert told.endswith("Upcycling and moefying start from a dense model.")


def test_one_expert_is_dense() -> None:
    assert find_dense_architecture({"model_type": "llama", "num_experts": 1}).name == "Llama"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "roberta"},
        {"model_type": "nomic", "architectures": ["NomicForMaskedLM"]},
        {"model_type": "gte", "architectures": ["GteForSequenceClassification"]},
    ],
)
def test_encoders_are_refused(config: dict[str, Any]) -> None:
    told = refusal(config)
    assert f"({config['model_type']}) only encodes" in told


def test_an_unknown_family_gets_a_hint() -> None:
    told = refusal({"model_type": "lama"})
    assert "Unknown dense model family 'lama'. Known families: bert, cohere, cohere2, ernie4_5" in told
    assert told.endswith("Did you mean llama?")
    assert "Did you mean" not in refusal({"model_type": "zzz"})
    assert refusal({}) == "config.json names no model_type, so that its family cannot be told."


def test_wrappers_are_told_from_typing_errors() -> None:
    told = refusal({"model_type": "llava", "text_config": {"model_type": "llama"}})
    assert told.startswith("This model (llava) is a language model (llama) with others around it.")


@pytest.mark.parametrize(
    ("config", "predicts"),
    [
        ({"model_type": "roberta"}, False),
        ({"model_type": "nomic", "architectures": ["NomicForMaskedLM"]}, False),
        ({"model_type": "roberta", "is_decoder": True}, True),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, True),
    ],
)
def test_encoders_that_would_pass_for_decoders(config: dict[str, Any], predicts: bool) -> None:
    with nullcontext() if predicts else pytest.raises(InvalidInputError, match=r"only encodes: .* takes BERT only"):
        check_predicts(config)
