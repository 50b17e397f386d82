"""Which family a dense model can be written as, and why not another."""

from pathlib import Path
from typing import Any

import pytest
from dense_families import DENSE_FAMILIES
from upcycled import open_dense, save_dense, upcycled

from moetool.architectures.dense import FEATURES
from moetool.errors import InvalidInputError, UsageError
from moetool.upcycle.targets import choose_target, targets

# By family: what it can be written as, the one that `auto` takes first; then what `auto` takes for a shared expert that
# gives half, for one as in Med-MoE, and for MoE layers in some places only.
CHOICES: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "llama": (("mixtral", "granitemoe", "qwen2_moe"), "granitemoeshared", "qwen2_moe", "qwen2_moe"),
    "mistral": (("mixtral", "qwen2_moe"), "qwen2_moe", "qwen2_moe", "qwen2_moe"),
    "llama-attention-bias": (("granitemoe",), "granitemoeshared", "moetool", "moetool"),
    "qwen2": (("qwen2_moe", "granitemoe"), "qwen2_moe", "qwen2_moe", "qwen2_moe"),
    "qwen2-windows": (("qwen2_moe",), "qwen2_moe", "qwen2_moe", "qwen2_moe"),
    "qwen3": (("qwen3_moe",), "moetool", "moetool", "qwen3_moe"),
    "olmo2": (("flex_olmo",), "moetool", "moetool", "moetool"),
    "gemma": (("granitemoe",), "granitemoeshared", "moetool", "moetool"),
}
CHOICES |= dict.fromkeys(("llama-rope-scaled", "llama-wide-heads", "phi3", "phi3-longrope"), CHOICES["llama"])
CHOICES |= {"granite": CHOICES["gemma"], "seed_oss": CHOICES["qwen2"]}
ONLY_OWN = ((), "moetool", "moetool", "moetool")


def test_every_target_is_chosen_for_some_family() -> None:
    found = {name for able, *chosen in CHOICES.values() for name in (*able, *chosen)}
    assert found == set(targets())


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_every_family_has_its_targets(family: str, tmp_path: Path) -> None:
    features = open_dense(save_dense(tmp_path / "dense", family)).features
    able, half, med, partial = CHOICES.get(family, ONLY_OWN)
    assert {name for name, target in targets().items() if not target.missing(features)} == {*able, "moetool"}
    assert choose_target("auto", features).name == (*able, "moetool")[0]
    assert choose_target("auto", (*features, "shared_half")).name == half
    assert choose_target("auto", (*features, "shared_med")).name == med
    assert choose_target("auto", (*features, "shared_xft")).name == "moetool"
    assert choose_target("auto", (*features, "dense_layers")).name == partial
    for name in (*able, "moetool"):
        assert choose_target(name, features).name == name


def test_our_own_module_can_express_every_module_and_comes_last() -> None:
    assert list(targets())[-1] == "moetool"
    assert targets()["moetool"].missing(tuple(FEATURES)) == []
    for name, target in targets().items():
        assert target.name == name
        assert target.needs <= target.expresses <= set(FEATURES)
        assert target.last_resort_for <= target.expresses


@pytest.mark.parametrize(
    ("name", "features", "told"),
    [
        (
            "mixtral",
            ("qkv_bias",),
            r"cannot express biases on queries, keys and values\. Possible here: granitemoe, qwen2_",
        ),
        (
            "mixtral",
            ("dense_layers",),
            r"it cannot express dense layers among those with experts\. Possible here: qwen2_moe, moetool",
        ),
        (
            "mixtral",
            ("query_norm",),
            r"cannot express norms on whole queries .*Possible here: flex_olmo, moetool\.$",
        ),
        ("flex_olmo", (), r"it always has norms on whole queries and keys, and after each block instead of before it"),
        ("qwen3_moe", (), r"it always has norms on every head's queries and keys\. Possible here: mixtral, granitemoe"),
        (
            "granitemoeshared",
            (),
            r"it always has a shared expert that gives half of the output\. Possible",
        ),
        (
            "qwen3_moe",
            ("ungated", "own_block"),
            r"cannot express a feed-forward network without a gate, a decoder .*; it always has norms on every head's",
        ),
        ("qwen2_moe", ("shared_xft",), r"Possible here: moetool\.$"),
    ],
)
def test_refusals_give_the_reason_and_what_is_possible(name: str, features: tuple[str, ...], told: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^This model cannot be expressed as {name}: .*{told}"):
        choose_target(name, features)


def test_a_target_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r": there is auto, mixtral, .*, moetool\. Did you mean mixtral\?$"):
        choose_target("mixtrel", ())


def config(path: Path, family: str, target: str = "auto", options: dict[str, Any] | None = None) -> dict[str, Any]:
    return upcycled(open_dense(save_dense(path / "dense", family, **(options or {}))), target).config()


def test_entries_of_mixtral(tmp_path: Path) -> None:
    found = config(tmp_path, "llama")
    assert found["model_type"] == "mixtral"
    assert found["architectures"] == ["MixtralForCausalLM"]
    assert (found["num_local_experts"], found["num_experts_per_tok"], found["intermediate_size"]) == (4, 2, 48)
    assert found["rms_norm_eps"] == 1e-4
    assert found["rope_parameters"]["rope_theta"] == found["rope_theta"] == 50000.0
    assert found["sliding_window"] is None
    assert "mlp_bias" not in found
    assert "attention_bias" not in found


def test_old_readers_find_the_positions_too(tmp_path: Path) -> None:
    found = config(tmp_path, "llama-rope-scaled")
    assert found["rope_scaling"]["rope_type"] == "llama3"
    assert found["rope_scaling"]["factor"] == 8.0
    assert "rope_theta" not in found["rope_scaling"]
    assert "rope_scaling" not in config(tmp_path / "plain", "llama")


def test_windows_are_written_only_where_there_are_some(tmp_path: Path) -> None:
    assert config(tmp_path / "a", "mistral")["sliding_window"] == 8
    assert config(tmp_path / "b", "mistral", options={"sliding_window": None})["sliding_window"] is None
    mixed = config(tmp_path / "c", "qwen2-windows")
    assert mixed["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    assert (mixed["use_sliding_window"], mixed["sliding_window"]) == (True, 8)


def test_renormalisation_is_written_out(tmp_path: Path) -> None:
    """The library's own default for the Qwen families is not to."""
    for family in ("qwen2", "qwen3", "olmo2"):
        assert config(tmp_path / family, family)["norm_topk_prob"] is True
    dense = open_dense(tmp_path / "qwen2" / "dense")
    assert upcycled(dense, shared="med").config()["norm_topk_prob"] is False


def test_multipliers_of_a_family_that_has_none(tmp_path: Path) -> None:
    gemma = config(tmp_path / "gemma", "gemma")
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    assert [gemma[name] for name in names] == [32**0.5, 8**-0.5, 1.0, 1.0]
    assert gemma["hidden_act"].startswith("gelu")
    assert [config(tmp_path / "granite", "granite")[name] for name in names] == [3.0, 0.2, 0.5, 2.0]


def test_our_own_module_keeps_the_config(tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", "phi"))
    found = upcycled(dense, shared="xft", layers=(0, 2)).config()
    entry = found.pop("quantization_config")
    assert found == dense.checkpoint.config
    assert entry["quant_method"] == "moetool"
    assert entry["mixture"] == {
        "experts": 4,
        "top_k": 2,
        "intermediate": 64,
        "layers": [0, 2],
        "shared": "xft",
        "of": 3,
        "hidden": 32,
        "roles": ["up", "down"],
        "biases": ["up", "down"],
    }
