"""`config.json` from the metadata of a GGUF file: what each says, and what is refused."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moetool.checkpoint.gguf_config import GgufConfig
from moetool.errors import InvalidInputError
from moetool.format.gguf.families import GGUF_FAMILIES, family_in_file
from moetool.format.gguf.words import ROPE_FACTORS

SIZES = {
    "block_count": 3,
    "context_length": 131072,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": 96,
}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24}


def config(
    model_type: str, entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    known = [family for family in GGUF_FAMILIES if family.model_type == model_type]
    family = next(family for family in known if family.is_moe == ("expert_count" in entries))
    held = {"token_embd.weight": torch.empty(320, 64), **(tensors or {})}
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    given = {**SIZES, **entries}
    return GgufConfig(Path("x.gguf"), family, given, shapes, held.__getitem__, torch.bfloat16, {"eos": 2}).build()


def test_sizes_and_tokens() -> None:
    found = config("llama", {"attention.head_count_kv": 2})
    assert (found["num_hidden_layers"], found["hidden_size"], found["vocab_size"]) == (3, 64, 320)
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (4, 2, 16)
    assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (None, 2, None)
    assert found["tie_word_embeddings"] is True
    assert config("llama", {})["num_key_value_heads"] == 4


def factors(width: int, base: float, slowed: Mapping[str, Any]) -> torch.Tensor:
    """What llama.cpp's converter stores of Llama 3's rotary embeddings."""
    rope = {"rope_type": "llama3", "rope_theta": base, **slowed}
    made = LlamaConfig(head_dim=width, rope_parameters=rope, max_position_embeddings=131072)
    turned, _ = ROPE_INIT_FUNCTIONS["llama3"](made, torch.device("cpu"))
    plain = 1 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return plain / turned


@pytest.mark.parametrize("width", [128, 64, 8, 4])
@pytest.mark.parametrize(
    "slowed",
    [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 16.0, "low_freq_factor": 2.0, "high_freq_factor": 6.0, "original_max_position_embeddings": 1024},
    ],
    ids=["3.1", "3.2", "other"],
)
def test_rotary_embeddings_of_llama_3(slowed: Mapping[str, Any], width: int) -> None:
    """Whatever the three lengths are called, every pair turns as slowly; Llama's own numbers are found as they are."""
    given = factors(width, 5e5, slowed)
    entries = {"rope.freq_base": 5e5, "attention.key_length": width}
    found = config("llama", entries, {ROPE_FACTORS: given})["rope_parameters"]
    again = factors(width, 5e5, {key: value for key, value in found.items() if key not in ("rope_type", "rope_theta")})
    torch.testing.assert_close(again, given, rtol=1e-4, atol=0)
    if width == 128 and slowed["low_freq_factor"] == 1:
        assert found == {"rope_type": "llama3", "rope_theta": 5e5, **slowed}


def test_factors_that_are_not_llama_3s_are_refused() -> None:
    odd = factors(128, 5e5, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192})  # fmt: skip
    odd[3] = 2.0
    with pytest.raises(InvalidInputError, match="not slowed down as Llama 3's"):
        config("llama", {"rope.freq_base": 5e5, "attention.key_length": 128}, {ROPE_FACTORS: odd})


def test_yarn_by_both_names_of_its_strength() -> None:
    """llama.cpp multiplies by attn_factor and by 1 + ln(factor) / 10; its converter notes transformers' own number."""
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    entries = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    plain = config("qwen3", entries)["rope_parameters"]
    assert plain == {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32768,
    }  # fmt: skip
    by_llama = config("qwen3", {**entries, "rope.scaling.attn_factor": 0.5})["rope_parameters"]
    assert by_llama["attention_factor"] == pytest.approx(0.5 * 1.1386294, rel=1e-6)
    by_converter = config("qwen3", {**entries, "rope.scaling.yarn_attn_factor": 1.25})["rope_parameters"]
    assert by_converter["attention_factor"] == 1.25


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([True, False, True], ["sliding_attention", "full_attention", "sliding_attention"]),
        (3, ["sliding_attention", "sliding_attention", "full_attention"]),
        (None, ["sliding_attention"] * 3),  # Gemma 3's own rule: every sixth
    ],
)
def test_windows(said: object, expected: list[str]) -> None:
    entries = {"attention.sliding_window": 512, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    pattern = {} if said is None else {"attention.sliding_window_pattern": said}
    found = config("gemma3_text", {**entries, **pattern})
    assert (found["sliding_window"], found["layer_types"]) == (512, expected)
    assert found["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert found["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    assert found["query_pre_attn_scalar"] == 16
    whole = config("gemma3_text", {})
    assert whole["layer_types"] == ["full_attention"] * 3


def test_layers_without_experts_are_counted_by_routers() -> None:
    """Not every converter writes how many there are; layers that predict further tokens are no decoder layers."""
    routers = {f"blk.{layer}.ffn_gate_inp.weight": torch.empty(8, 64) for layer in (1, 2, 3)}
    found = config("glm4_moe", {**EXPERTS, "block_count": 4, "nextn_predict_layers": 1, "expert_weights_norm": True,
                                "expert_shared_feed_forward_length": 48}, routers)  # fmt: skip
    assert (found["num_hidden_layers"], found["first_k_dense_replace"]) == (3, 1)
    assert found["n_shared_experts"] == 2
    assert found["moe_intermediate_size"] == 24
    assert found["use_qk_norm"] is False


LATENT = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 512,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": 0.1,
}


def test_latent_attention() -> None:
    """As llama.cpp's converter writes DeepSeek-V3, but for its sizes, and without a small vector for queries."""
    found = config("deepseek_v3", {**EXPERTS, **LATENT, "expert_group_count": 8, "expert_group_used_count": 4})
    widths = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
    assert {key: found[key] for key in widths} == widths
    assert (found["num_key_value_heads"], found["q_lora_rank"], found["norm_topk_prob"]) == (4, None, False)
    assert (found["n_group"], found["topk_group"]) == (8, 4)
    assert found["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    assert "head_dim" not in found


def test_layers_with_delta_rules_have_no_heads_of_keys() -> None:
    """As llama.cpp's converter writes Kimi Linear, but for its sizes."""
    own = {"attention.head_count_kv": [0, 1, 0], "kda.head_dim": 16, "ssm.conv_kernel": 4}
    plain = {key: value for key, value in LATENT.items() if not key.startswith("rope.scaling")}
    found = config("kimi_linear", {**EXPERTS, **plain, **own})
    assert found["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]
    assert (found["linear_num_heads"], found["linear_head_dim"], found["num_key_value_heads"]) == (4, 16, 4)
    assert "rope_parameters" not in found


@pytest.mark.parametrize(("groups", "choice"), [({}, "greedy"), ({"expert_group_count": 8}, "group_limited_greedy")])
def test_how_deepseek_v2_chooses_follows_from_its_groups(groups: Mapping[str, int], choice: str) -> None:
    used = {"expert_group_used_count": 3} if groups else {}
    assert config("deepseek_v2", {**EXPERTS, **LATENT, **groups, **used})["topk_method"] == choice


def test_kinds_of_layers_follow_from_their_heads_of_keys() -> None:
    found = config("lfm2", {"attention.head_count_kv": [0, 2, 0]})
    assert found["layer_types"] == ["conv", "full_attention", "conv"]
    assert found["num_key_value_heads"] == 2
    assert found["block_auto_adjust_ff_dim"] is False


WIDE = {
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": [True, True, False],
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
}
QUARTER = {ROPE_FACTORS: torch.tensor([1.0] * 4 + [1e30] * 12)}


def test_heads_of_two_widths() -> None:
    """Gemma 4's, which takes keys for values in layers that have no matrix of these; its rotary embeddings turn the
    first pairs of a head's channels."""
    heads = {"attention.head_count_kv": [2, 2, 1], "feed_forward_length": [96, 96, 96]}
    found = config("gemma4_text", {**WIDE, **EXPERTS, **heads}, QUARTER)
    assert (found["head_dim"], found["global_head_dim"], found["attention_k_eq_v"]) == (16, 32, True)
    assert (found["num_key_value_heads"], found["num_global_key_value_heads"]) == (2, 1)
    assert (found["num_experts"], found["top_k_experts"], found["enable_moe_block"]) == (8, 2, True)
    assert (found["intermediate_size"], found["use_double_wide_mlp"]) == (96, False)
    assert found["final_logit_softcapping"] == 30  # llama.cpp's, if a file says nothing
    assert found["rope_parameters"]["full_attention"]["rope_type"] == "proportional"
    assert found["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25


def test_layers_that_share_keys_and_values_may_be_twice_as_wide() -> None:
    """In small models of Gemma 4, whose layers are given a vector of each token, too."""
    widths = {"feed_forward_length": [96, 96, 192], "attention.shared_kv_layers": 1, "final_logit_softcapping": 0.0}
    tensors = {"blk.2.attn_v.weight": torch.empty(32, 64), "per_layer_token_embd.weight": torch.empty(320, 24)}
    given = {**WIDE, **widths, "attention.head_count_kv": 1, "embedding_length_per_layer_input": 8}
    found = config("gemma4_text", given, {**QUARTER, **tensors})
    assert (found["intermediate_size"], found["use_double_wide_mlp"]) == (96, True)
    assert (found["num_kv_shared_layers"], found["attention_k_eq_v"]) == (1, False)
    assert (found["hidden_size_per_layer_input"], found["vocab_size_per_layer_input"]) == (8, 320)
    assert found["final_logit_softcapping"] is None


@pytest.mark.parametrize(("heads", "norms", "is_new"), [(1, 1, False), (1, 2, True), (2, 1, True), (2, 2, True)])
def test_which_falcon_it_is_follows_from_heads_and_norms(heads: int, norms: int, is_new: bool) -> None:
    """The first, 7B, has one head of keys and one norm before attention and the network beside it."""
    second = {"blk.0.attn_norm_2.weight": torch.empty(64)} if norms == 2 else {}
    entries = {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": heads}
    found = config("falcon", entries, second)
    assert (found["new_decoder_architecture"], found["num_kv_heads"]) == (is_new, heads)
    assert (found["multi_query"], found["num_ln_in_parallel_attn"]) == (not is_new, norms)
    assert (found["ffn_hidden_size"], found["alibi"], found["activation"]) == (96, False, "gelu")


def test_alibi() -> None:
    entries = {"attention.layer_norm_epsilon": 1e-5, "attention.max_alibi_bias": 16.0, "attention.clamp_kqv": 6.0}
    found = config("mpt", entries)
    assert found["attn_config"] == {"alibi": True, "alibi_bias_max": 16, "clip_qkv": 6.0}
    assert (found["d_model"], found["max_seq_len"]) == (64, 131072)


@pytest.mark.parametrize(
    ("model_type", "entries", "said"),
    [
        ("gpt_oss", {**EXPERTS, "expert_gating_func": 2}, "gpt-oss.expert_gating_func = 2 where others have 3"),
        ("llama", {"attention.head_count_kv": [2, 2, 4]}, "layers that differ in attention.head_count_kv"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 4]}, "layers that differ in attention.head_count_kv"),
        ("deepseek_v2", {**EXPERTS, **LATENT, "expert_weights_norm": True}, "expert_weights_norm = True"),
        ("llama", {"rope.scaling.type": "odd"}, "rotary embeddings of a kind (odd)"),
        ("gemma2", {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]}, "other layers than"),
        ("gpt_oss", {**EXPERTS, "attention.sliding_window": 8, "rope.freq_base_swa": 5.0}, "in layers with windows"),
        ("gemma4_text", {**WIDE, "attention.head_count_kv": [2, 1, 1]}, "one kind that differ in attention.head"),
        ("gemma4_text", {**WIDE, "rope.dimension_count_swa": 8}, "rope.dimension_count_swa = 8 beside heads of 16"),
        ("gemma4_text", {**WIDE, "feed_forward_length": [96, 96, 128]}, "layers that differ in feed_forward_length"),
    ],
)
def test_what_is_refused(model_type: str, entries: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        config(model_type, entries, QUARTER if model_type == "gemma4_text" else None)
    assert said in str(error.value)
    assert str(error.value).endswith("Take the model's own checkpoint.")


def test_biases() -> None:
    """transformers has them in all matrices of a Llama's attention or in none."""
    biases = {f"blk.0.{module}.bias": torch.empty(64) for module in ("attn_q", "attn_output", "ffn_down")}
    found = config("llama", {}, biases)
    assert (found["attention_bias"], found["mlp_bias"]) == (True, True)
    assert config("llama", {})["attention_bias"] is config("llama", {})["mlp_bias"] is False
    del biases["blk.0.attn_output.bias"]
    with pytest.raises(InvalidInputError, match="biases of some matrices of attention only"):
        config("llama", {}, biases)


def test_what_is_lacking_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"lacks gemma2\.attention.layer_norm_rms_epsilon in its metadata"):
        config("gemma2", {"attention.layer_norm_rms_epsilon": None})


def test_what_moetool_does_not_know_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config("llama", {"vocab_size": 320, "attention.value_length": 16})
        assert not caplog.records
        config("llama", {"attention.magic": 3})
    (record,) = caplog.records
    assert record.getMessage() == "x.gguf says more of its model than moetool reads: attention.magic."


def test_families_of_one_architecture_are_told_apart_by_their_metadata() -> None:
    experts = {"expert_count": 8}
    assert family_in_file("granitemoe", experts).model_type == "granitemoe"
    shared = {**experts, "expert_shared_feed_forward_length": 48}
    assert family_in_file("granitemoe", shared).model_type == "granitemoeshared"
    assert family_in_file("olmo2", {}).model_type == "olmo2"
    assert family_in_file("olmo2", {"attention.sliding_window": 8}).model_type == "olmo3"
    assert family_in_file("llama", {}).model_type == "llama"
    assert family_in_file("exaone", {}).model_type == "llama"
    assert family_in_file("llama", experts).model_type == "mixtral"
    assert family_in_file("jamba", experts).is_moe
    assert not family_in_file("jamba", {"expert_count": 1}).is_moe  # as llama.cpp's converter writes Jamba 3B
    assert family_in_file("olmoe", {"expert_count": 1}).is_moe
    with pytest.raises(InvalidInputError, match=r"llama\.cpp's 'minimax-01' with experts\. moetool reads afmoe, "):
        family_in_file("minimax-01", experts)


@pytest.mark.parametrize(
    ("entries", "model_type"),
    [
        ({"expert_gating_func": 2, "expert_weights_norm": True}, "deepseek_v3"),
        ({"expert_gating_func": 2}, "deepseek_v3"),
        ({"expert_gating_func": 1}, "deepseek_v2"),
        ({}, "deepseek_v2"),  # early files, of which llama.cpp takes a softmax
        ({"expert_weights_norm": True}, "deepseek_v3"),  # early ones of GLM-4.7-Flash
    ],
)
def test_models_of_deepseek_are_told_apart_by_their_routers(entries: Mapping[str, Any], model_type: str) -> None:
    assert family_in_file("deepseek2", {"expert_count": 8, **entries}).model_type == model_type
