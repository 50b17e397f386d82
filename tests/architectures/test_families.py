"""Names and numbers of the model families, against what transformers itself writes and holds."""

import dataclasses
from pathlib import Path
from typing import Any

import families
import pytest
from safetensors import safe_open

from moetool.architectures import ROLES, Architecture, MoEShape, find_architecture
from moetool.architectures.dense import find_dense_architecture
from moetool.architectures.known import KNOWN, REFUSED
from moetool.architectures.listing import families_with_experts
from moetool.errors import InvalidInputError

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def mixtral() -> Architecture:
    return find_architecture(CONFIG)


def test_numbers_of_the_config(mixtral: Architecture) -> None:
    assert mixtral.name == "Mixtral"
    assert mixtral.shape == MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
    assert (mixtral.layers, mixtral.moe_layers) == (3, (0, 1, 2))


def test_matrices_are_stored_out_by_in() -> None:
    shape = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
    assert [shape.matrix(role) for role in ("gate", "up", "down")] == [(48, 32), (48, 32), (32, 48)]


def test_names_on_disk_are_those_transformers_writes(mixtral: Architecture, tiny_mixtral: Path) -> None:
    with safe_open(tiny_mixtral / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    shape = mixtral.shape
    for layer in range(3):
        block = {name for name in shapes if name.startswith(mixtral.block_prefix(layer))}
        experts = {
            mixtral.weight_name(layer, expert, role): shape.matrix(role) for expert in range(4) for role in ROLES
        }
        assert block == {*experts, mixtral.router_name(layer)}
        assert {name: shapes[name] for name in experts} == experts
        assert shapes[mixtral.router_name(layer)] == (4, 32)
        assert {name for name in shapes if name.startswith(mixtral.experts_prefix(layer))} == set(experts)


def test_roles_are_what_the_model_computes(mixtral: Architecture, tiny_mixtral: Path, make_mixtral: Any) -> None:
    """Gate is the half that goes through the activation; a swap of w1 and w3 would not change any shape."""
    experts = make_mixtral().model.layers[1].get_submodule(mixtral.experts_module)
    assert experts.gate_up_proj.shape == (4, 96, 32)
    assert experts.down_proj.shape == (4, 32, 48)
    with safe_open(tiny_mixtral / "model.safetensors", "pt") as file:
        assert file.get_tensor(mixtral.weight_name(1, 3, "gate")).equal(experts.gate_up_proj[3, :48])
        assert file.get_tensor(mixtral.weight_name(1, 3, "up")).equal(experts.gate_up_proj[3, 48:])
        assert file.get_tensor(mixtral.weight_name(1, 3, "down")).equal(experts.down_proj[3])


def test_layer_prefixes_do_not_match_each_other(mixtral: Architecture) -> None:
    assert not mixtral.weight_name(10, 0, "gate").startswith(mixtral.layer_prefix(1))


def test_a_layer_is_told_by_the_names_of_its_tensors(mixtral: Architecture) -> None:
    inside = [prefix + "input_layernorm.weight" for prefix in mixtral.layer_prefixes]
    further = mixtral.layer_prefix(mixtral.layers) + "eh_proj.weight"  # of a layer that transformers does not have
    assert [mixtral.layer_of(name) for name in (*inside, further, "lm_head.weight")] == [*range(mixtral.layers), -1, -1]


@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "4"])
def test_a_number_must_be_positive_and_whole(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"num_local_experts|experts"):
        find_architecture({**CONFIG, "num_local_experts": value})


def test_more_routed_than_there_are() -> None:
    with pytest.raises(InvalidInputError, match="routes every token to 5 of 4 experts"):
        find_architecture({**CONFIG, "num_experts_per_tok": 5})


def test_defaults_of_transformers_count() -> None:
    few = {key: value for key, value in CONFIG.items() if key != "num_local_experts"}
    assert find_architecture(few).shape.experts == 8


def test_a_dense_model_is_called_dense() -> None:
    with pytest.raises(InvalidInputError, match=r"'llama' is not an MoE model.*moetool upcycle.*list arch"):
        find_architecture({"model_type": "llama", "hidden_size": 32})


def test_one_expert_is_dense_too() -> None:
    with pytest.raises(InvalidInputError, match="not an MoE model"):
        find_architecture({"model_type": "llama", "num_experts": 1})


def test_an_unknown_family_gets_a_hint() -> None:
    with pytest.raises(InvalidInputError, match=r"Unknown model family 'mixtrel'.*Did you mean mixtral"):
        find_architecture({"model_type": "mixtrel", "num_local_experts": 8})
    with pytest.raises(InvalidInputError, match=r"Unknown model family 'zzz'") as caught:
        find_architecture({"model_type": "zzz", "num_local_experts": 8})
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "told", "refused"),
    [
        (
            {"model_type": "ernie4_5_vl_moe", "text_config": {"num_experts": 8, "num_hidden_layers": 3}},
            "text_config.num_experts is 8",
            "several kinds",
        ),
    ],
)
def test_experts_are_found_in_inner_configs(config: dict[str, Any], told: str, refused: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_architecture(config)
    assert refused in str(caught.value)
    with pytest.raises(InvalidInputError) as caught:
        find_dense_architecture(config)
    assert f"is an MoE model already: {told}." in str(caught.value)


@pytest.mark.parametrize("model_type", [None, 7, ["mixtral"]])
def test_a_config_without_a_usable_type(model_type: Any) -> None:
    with pytest.raises(InvalidInputError, match="Unknown model family"):
        find_architecture({**CONFIG, "model_type": model_type})


def test_a_number_may_be_said_of_every_layer() -> None:
    config = {
        "model_type": "hunyuan_v1_moe",
        **families.COMMON,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": [3, 3, 3],
    }
    assert find_architecture(config).shape.top_k == 3


def test_layers_must_be_alike() -> None:
    config = {
        "model_type": "hunyuan_v1_moe",
        **families.COMMON,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": [3, 2, 3],
    }
    with pytest.raises(InvalidInputError, match="different numbers or sizes"):
        find_architecture(config)


def test_an_architecture_is_data(mixtral: Architecture) -> None:
    with pytest.raises(TypeError):
        mixtral.weights["gate"] = "x"  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixtral.layer = "x"  # type: ignore[misc]


def test_families_with_experts_are_listed() -> None:
    found = families_with_experts()
    assert {"mixtral", "gpt_oss"} <= found.keys()
    assert "llama" not in found
    assert found["qwen3_vl_moe"] == ["qwen3_vl_moe"]  # and not its tower
    listed = {name for names in found.values() for name in names}
    assert KNOWN.keys() - listed == {"deepseek"}  # of which transformers has no class, and moetool one
    assert REFUSED.keys() <= {*listed, *(f"{name}_text" for name in found)}
