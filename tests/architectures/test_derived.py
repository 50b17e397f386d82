"""What is derived of families from transformers' own classes."""

from pathlib import Path
from typing import Any

import families
import pytest
import transformers
from around_families import AROUND
from derived_families import DERIVED

from moetool.architectures import find_architecture
from moetool.architectures.derived import derive
from moetool.checkpoint.settings import settings_of
from moetool.errors import InvalidInputError

SHARED = "mlp.shared_experts"
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
# Of a family of each structure: layers with experts, experts, those per token, width, groups, what of which experts lie
# in on disk, the router, what else has a row per expert, what else is in the block, and the shared expert.
FROZEN: dict[str, tuple[object, ...]] = {
    "mixtral": ((0, 1, 2), 4, 2, 48, (1, 1), "block_sparse_moe", "w1", "gate.weight", (), (), ""),
    "phimoe": ((0, 1, 2), 4, 2, 48, (1, 1), "block_sparse_moe", "w1", "gate.weight", (), (), ""),
    "qwen2_moe": (
        *((0, 2), 6, 2, 24, (1, 1), "mlp", "gate_proj", "gate.weight", ()),
        *(("shared_expert.", "shared_expert_gate."), "mlp.shared_expert"),
    ),
    "qwen3_moe": ((1, 3), 6, 2, 24, (1, 1), "mlp", "gate_proj", "gate.weight", (), (), ""),
    "deepseek": ((1, 2), 6, 2, 24, (1, 1), "mlp", "gate_proj", "gate.weight", (), ("shared_experts.",), SHARED),
    "deepseek_v3": (
        *((1, 2), 8, 2, 24, (4, 2), "mlp", "gate_proj", "gate.weight", ("mlp.gate.e_score_correction_bias",)),
        *(("shared_experts.",), SHARED),
    ),
    "granitemoeshared": (
        *((0, 1, 2), 4, 2, 48, (1, 1), "block_sparse_moe", "input_linear", "router.layer.weight", (), ()),
        "shared_mlp",
    ),
    "ernie4_5_moe": (
        *((1, 2), 6, 2, 24, (1, 1), "mlp", "gate_proj", "gate.weight", ("mlp.moe_statics.e_score_correction_bias",)),
        *(("shared_experts.",), SHARED),
    ),
    "lfm2_moe": ((1, 2), 6, 2, 24, (1, 1), "feed_forward", "w1", "gate.weight", ("feed_forward.expert_bias",), (), ""),
    "longcat_flash": (
        *((0, 1, 2), 6, 3, 24, (1, 1), "mlp", "gate_proj", "router.classifier.weight"),
        *(("mlp.router.e_score_correction_bias",), (), ""),
    ),
    "afmoe": (
        *((1, 2), 6, 2, 24, (1, 1), "mlp", "gate_proj", "router.gate.weight", ("mlp.expert_bias",)),
        *(("shared_experts.",), SHARED),
    ),
}
ATTENTION = {
    "mixtral": {f"self_attn.{letter}_proj" for letter in "qkvo"},
    "deepseek_v3": {f"self_attn.{name}" for name in LATENT},
    "longcat_flash": {f"self_attn.{index}.{name}" for index in (0, 1) for name in LATENT},
    "lfm2_moe": {"conv.in_proj", "conv.out_proj", *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out"))},
}


def config_of(family: str) -> dict[str, Any]:
    if family in AROUND:
        return {"model_type": family, **AROUND[family]}
    own = families.FAMILIES.get(family) or DERIVED[family]
    return {"model_type": family, **families.COMMON, **own}


def test_experts_per_token_are_those_that_transformers_reads() -> None:
    """Another key that says something else is kept in its config, and no module reads it."""
    config = {**config_of("gemma4_text"), "num_experts_per_tok": 4}
    assert find_architecture(settings_of(config, Path())).shape.top_k == 2


@pytest.mark.parametrize("family", FROZEN)
def test_what_is_derived(family: str) -> None:
    found = derive(config_of(family))
    shape, gate = found.shape, found.weights["gate"].split(".")[-2]
    numbers = (found.moe_layers, shape.experts, shape.top_k, shape.intermediate, found.groups)
    names = (found.block, gate, found.router, found.router_others, found.others, found.shared_expert_module)
    assert (*numbers, *names) == FROZEN[family]
    assert (found.layer, found.embeddings) == ("model.layers.{layer}", ("model.embed_tokens", "lm_head"))
    if family in ATTENTION:
        assert {*found.attention} == ATTENTION[family]


@pytest.mark.parametrize("family", [*families.FAMILIES, *DERIVED, *AROUND])
def test_settings_say_what_the_config_says(family: str) -> None:
    config = config_of(family)
    assert derive(settings_of(config, Path())) == derive(config)


def test_a_config_of_the_size_of_deepseek_v3() -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3").to_dict()
    found = derive(config)
    assert found.moe_layers == tuple(range(3, 61))
    assert found.shape.experts == 256


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama4_text", "num_experts_per_tok": 2}, "weighs the inputs"),
        ({"model_type": "qwen3_vl_moe"}, "has no text_config"),
        ({**config_of("qwen3_vl_moe"), "text_config": {}}, "has no text_config"),
        (
            {"model_type": "ernie4_5_vl_moe", "text_config": {"num_hidden_layers": 3}},
            r"several kinds.*vision_moe\.experts",
        ),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {}}, "no language model: transformers has no class"),
        ({"model_type": "diffusion_gemma", "text_config": {"num_experts": 8}}, "does not predict the next token"),
        ({"model_type": "mixtral", "num_attention_heads": 0}, "transformers cannot build the mixtral model"),
        ({"model_type": "llama"}, "handles: none of its layers has experts; `moetool upcycle`"),
        ({"model_type": "llama", "num_experts": 8}, "has experts, though num_experts is 8; `moetool upcycle`"),
        (
            {**config_of("qwen2_moe"), "mlp_only_layers": [0, 1, 2]},
            r"has experts, though num_experts is 6 \(.*mlp_only_layers is \[0, 1, 2\]",
        ),
        (config_of("gemma4_text") | {"enable_moe_block": False}, "though num_experts is 6 .enable_moe_block is False"),
        ({**config_of("beam"), "n_group": 3}, "cannot be divided"),
    ],
)
def test_what_is_not_handled_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        derive(config)


def test_transformers_is_too_old() -> None:
    version = transformers.__version__
    with pytest.raises(InvalidInputError, match=f"'brand_new_moe': transformers {version}.*has no such"):
        find_architecture({"model_type": "brand_new_moe", "num_experts": 8})


def test_code_of_a_checkpoint_is_never_run() -> None:
    config = {"model_type": "brand_new_moe", "num_experts": 8, "auto_map": {"AutoConfig": "modeling.Config"}}
    with pytest.raises(InvalidInputError, match=r"\(auto_map\) is never run"):
        find_architecture(config)


def test_layers_told_by_a_pattern_are_those_of_a_list() -> None:
    """As the hub's files of Nemotron-H say which layers have experts; transformers makes a list of it."""
    listed = {**DERIVED["nemotron_h"], "model_type": "nemotron_h"}
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    told = {key: value for key, value in listed.items() if key != "layers_block_type"}
    told["hybrid_override_pattern"] = "".join(letters[kind] for kind in listed["layers_block_type"])
    assert find_architecture(told) == find_architecture(listed)
