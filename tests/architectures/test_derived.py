"""Families that are derived from transformers' own classes, against those that are written down."""

import dataclasses
from pathlib import Path
from typing import Any

import families
import pytest
import transformers
from around_families import AROUND
from derived_families import DERIVED

from moetool.architectures import Architecture, find_architecture
from moetool.architectures.derived import derive
from moetool.checkpoint.settings import settings_of
from moetool.errors import InvalidInputError

WRITTEN = [name for name in families.FAMILIES if name != "deepseek"]  # transformers has no class of that
# Fields that people say in words, that stand for numbers by other keys, or whose order does not matter.
APART = {"name", "reference", "router_rule", "router_options", "moe_layers_rule", "aliases", "given", "attention"}


def config_of(family: str) -> dict[str, Any]:
    if family in AROUND:
        return {"model_type": family, **AROUND[family]}
    own = families.FAMILIES.get(family) or DERIVED[family]
    return {"model_type": family, **families.COMMON, **own}


@pytest.mark.parametrize("family", WRITTEN)
def test_derived_is_what_was_written(family: str) -> None:
    config = config_of(family)
    written, derived = find_architecture(config), derive(config)
    settings = settings_of(config, Path())
    for numbers in ("layers", "moe_layers", "shape", "expert_groups"):
        assert getattr(derived, numbers)(settings) == getattr(written, numbers)(settings)
    assert set(derived.attention) <= set(written.attention)  # those that this model has
    assert derived.attention
    assert set(written.experts_keys) & set(derived.experts_keys)
    assert in_block(derived) == in_block(written)
    apart = {*APART, "experts_key", "others", "router_others"}
    for field in dataclasses.fields(Architecture):
        if field.name not in apart:
            assert getattr(derived, field.name) == getattr(written, field.name), field.name


def in_block(family: Architecture) -> set[str]:
    """What else is in the block, corrections of scores among it: a family may say these in one field or another."""
    corrections = {name.removeprefix(f"{family.block}.") for name in family.router_others}
    return {*family.others, *corrections}


@pytest.mark.parametrize("family", [*WRITTEN, *DERIVED, *AROUND])
def test_settings_say_what_the_config_says(family: str) -> None:
    config = config_of(family)
    assert derive(settings_of(config, Path())) == derive(config)


def test_a_config_of_the_size_of_deepseek_v3() -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3").to_dict()
    found = derive(config)
    assert found.given is not None
    assert found.given.moe_layers == tuple(range(3, 61))
    assert found.shape(settings_of(config, Path())).experts == 256


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "nemotron_h", "moe_latent_size": 64}, "inputs have 64 channels"),
        ({"model_type": "llama4_text", "num_experts_per_tok": 2}, "weighs the inputs"),
        ({"model_type": "longcat_flash"}, "LongcatFlashExperts"),
        ({"model_type": "zaya"}, "router is not one matrix"),
        ({"model_type": "inkling2_text"}, "lie in another order"),
        ({"model_type": "qwen3_vl_moe"}, "has no text_config"),
        ({**config_of("qwen3_vl_moe"), "text_config": {}}, "has no text_config"),
        (
            {"model_type": "ernie4_5_vl_moe", "text_config": {"num_hidden_layers": 3}},
            r"several kinds.*vision_moe\.experts",
        ),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {}}, "no language model: transformers has no class"),
        ({"model_type": "mistral_large4", "text_config": {"hidden_size": 64}}, "does not leave other names alone"),
        ({"model_type": "diffusion_gemma", "text_config": {"num_experts": 8}}, "does not predict the next token"),
        ({"model_type": "muse_spark", "text_config": {"num_hidden_layers": 2}}, "end in a norm"),
        ({"model_type": "mixtral", "num_attention_heads": 0}, "transformers cannot build the mixtral model"),
        ({"model_type": "llama"}, "none of its layers has experts"),
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
