"""Every family whose architecture is derived, through the whole command line on a tiny random model."""

import re
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from around_families import AROUND, with_image
from checkpoints import WEIGHTS, assert_close, config_of, copy_of, load, load_whole, logits, tensors_of, weight_bytes
from derived_families import DERIVED
from safetensors.torch import load_file, save_file
from sampling import sampled

from moetool.job.job import Source

FAMILIES = {**DERIVED, **AROUND}

# Gemma 4's small models share keys and values between layers, and give each layer embeddings of the tokens.
SHARING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 288,
}


# Latent attention, clamped activations, layers of embeddings, interleaved experts with biases, a state space, two kinds
# of linear attention, weighed inputs, experts without gates, a model around another, a vector
# per token that layers hand on, a norm after experts, experts in attention, too, and experts below each other.
STRUCTURES = ("axk1", "deepseek_v4", "gemma4_text", "gpt_oss", "jamba", "kimi_linear", "qwen3_5_moe_text")
STRUCTURES += ("llama4_text", "nemotron_h", "qwen3_vl_moe", "zaya", "muse_spark", "jetmoe", "dbrx")
# What does not depend on a family's own names and layers is tried on a half of them.
one_half, other_half = (
    pytest.mark.parametrize("model", sampled(FAMILIES, half), indirect=True, scope="module")
    for half in (STRUCTURES[1::2], (*STRUCTURES[::2], "deepseek_v4"))
)


@pytest.fixture(scope="module", params=sampled(FAMILIES, STRUCTURES))
def model(request: pytest.FixtureRequest, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = families.build(request.param, **FAMILIES[request.param])
    return save_model(built, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def calibration(tiny_text: Path) -> tuple[object, ...]:
    return "--calibration", tiny_text, "--samples", 4, "--sequence-length", 16, "--mix", 0


def test_all_is_kept_if_nothing_is_asked_for(
    run_cli: Any, model: Path, calibration: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    made = run_cli("compress", model, "--method", "d2moe", tmp_path / "full", "--rank", 10_000, *calibration)
    assert made.code == 0, made.stderr
    assert_close(logits(tmp_path / "full", tokens), logits(model, tokens))
    if (given := with_image(config_of(model)["model_type"], tokens)) is not None:
        with torch.inference_mode():
            assert_close(load(tmp_path / "full")(**given).logits, load(model)(**given).logits)


@one_half
def test_it_gets_smaller_learns_and_becomes_dense_again(
    run_cli: Any, model: Path, calibration: Any, tiny_text: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    made = run_cli("compress", model, small, "--method", "hybrid", "--ratio", 0.05, *calibration)
    assert made.code == 0, made.stderr
    assert -0.05 <= weight_bytes(small) / weight_bytes(model) - 0.95 <= 0
    assert run_cli("verify", small, "--against", model).code == 0
    assert_around_is_kept(small, model)
    told = run_cli(
        "eval", small, "--against", model, "--data", tiny_text, "--windows", 2, "--sequence-length", 32, "--json"
    )
    assert told.code == 0, told.stderr
    options = ("--data", tiny_text, "--steps", 1, "--sequence-length", 32, "--batch-size", 2)
    assert run_cli("tune", small, tmp_path / "tuned", *options).code == 0
    assert torch.isfinite(logits(tmp_path / "tuned", tokens)).all()
    assert run_cli("export", small, tmp_path / "dense").code == 0
    assert load_file(tmp_path / "dense" / WEIGHTS).keys() == load_file(model / WEIGHTS).keys()
    assert_close(logits(tmp_path / "dense", tokens), logits(small, tokens), 2e-5)


def assert_around_is_kept(small: Path, model: Path) -> None:
    """Every tensor outside the decoder layers is the same, and so is the config but for moetool's entry."""
    found, given = load_file(small / WEIGHTS), load_file(model / WEIGHTS)
    layer = Source.open(model).architecture.layer.format(layer="")
    outside = {name for name in given if not name.startswith(layer)}
    assert outside
    assert all(found[name].equal(given[name]) for name in outside)
    told = config_of(small)
    del told["quantization_config"]
    assert told == config_of(model)


@other_half
def test_it_is_quantized(run_cli: Any, model: Path, calibration: Any, tokens: torch.Tensor, tmp_path: Path) -> None:
    made = run_cli("compress", model, tmp_path / "codes", "--method", "quantize", "--bits", 4, *calibration)
    assert made.code == 0, made.stderr
    assert run_cli("verify", tmp_path / "codes", "--against", model).code == 0
    assert run_cli("export", tmp_path / "codes", tmp_path / "dense").code == 0
    assert_close(logits(tmp_path / "dense", tokens), logits(tmp_path / "codes", tokens), 2e-5)


@pytest.mark.parametrize("model", STRUCTURES, indirect=True, scope="module")
def test_in_sixteen_bits_it_is_saved_again_and_generates_with_padding(
    run_cli: Any, save_model: Any, model: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    family, small, again = config_of(model)["model_type"], tmp_path / "small", tmp_path / "again"
    source = save_model(families.build(family, dtype=torch.bfloat16, **FAMILIES[family]), tmp_path / "model")
    made = run_cli("compress", source, small, "--method", "ders-quantize", "--bits", 4)
    assert made.code == 0, made.stderr
    loaded = load_whole(small, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = loaded(input_ids=tokens).logits
        assert torch.isfinite(expected).all()
        loaded.save_pretrained(again)
        saved = load_whole(again, dtype=torch.bfloat16)
        assert saved(input_ids=tokens).logits.equal(expected)
        prompts, mask = tokens[:, :8].clone(), torch.ones(2, 8, dtype=torch.long)
        prompts[0, :3], mask[0, :3] = 0, 0
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        together = saved.generate(input_ids=prompts, attention_mask=mask, **options)
        alone = saved.generate(input_ids=prompts[:1, 3:], **options)
        assert together[0, 8:].equal(alone[0, 5:])


@other_half
def test_a_third_of_its_experts_goes(
    run_cli: Any, model: Path, calibration: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    made = run_cli("compress", model, tmp_path / "fewer", "--method", "reap", "--experts", 4, *calibration)
    if config_of(model)["model_type"] == "deepseek_v4":
        assert made.code == 3
        assert "a row for each of 8 experts" in made.stderr  # some of its layers choose by the token alone
        return
    if config_of(model)["model_type"] == "jetmoe":
        assert made.code == 3
        assert "self_attention.experts.input_linear.weight has 6 experts, too" in made.stderr
        return
    assert made.code == 0, made.stderr
    assert Source.open(tmp_path / "fewer").experts.shape.experts == 4
    assert torch.isfinite(logits(tmp_path / "fewer", tokens)).all()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("hy_v4", {"indexer_types": ["full", "full", "shared"]}),
        ("gemma4_text", SHARING),
    ],
)
def test_layers_that_hand_on_more_than_hidden_states_are_refused(
    run_cli: Any, save_model: Any, calibration: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """One layer after the other on all of the text, they would be given what belongs to another batch, or nothing."""
    model = save_model(families.build(family, **{**DERIVED[family], **changes}), tmp_path / "model")
    made = run_cli("compress", model, "--method", "d2moe", tmp_path / "out", "--rank", 4, *calibration)
    assert made.code == 3
    assert "hand more than hidden states to each other" in made.stderr


def test_deepseek_v4_as_the_hub_names_its_tensors(run_cli: Any, save_model: Any, tmp_path: Path) -> None:
    """Published without the root that transformers writes, and with a layer that predicts further tokens."""
    family = "deepseek_v4"
    saved = save_model(families.build(family, **DERIVED[family]), tmp_path / "saved")
    published = copy_of(saved, tmp_path / "published")
    tensors = tensors_of(saved)
    for own, hub in (("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", "")):
        tensors = {re.sub(f"^{re.escape(own)}", hub, name): tensor for name, tensor in tensors.items()}
    assert "layers.0.attn_norm.weight" in tensors
    further = {"mtp.0.norm.weight": torch.ones(4)}
    save_file({**tensors, **further}, published / WEIGHTS, {"format": "pt"})
    options = ("--method", "quantize", "--bits", 4, "--rounding", "nearest")
    for source in (saved, published):
        made = run_cli("compress", source, tmp_path / f"{source.name}-4bit", *options)
        assert made.code == 0, made.stderr
    expected, found = (load_file(tmp_path / f"{name}-4bit" / WEIGHTS) for name in ("saved", "published"))
    assert found.pop("model.mtp.0.norm.weight").equal(torch.ones(4))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert torch.isfinite(logits(tmp_path / "published-4bit", torch.arange(3, 35)[None])).all()


def test_experts_that_are_given_fewer_channels(
    run_cli: Any, save_model: Any, calibration: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """Nemotron 3 Super's: hidden states are projected for them, and the router sees them before that."""
    family = "nemotron_h"
    model = save_model(families.build(family, **DERIVED[family], moe_latent_size=16), tmp_path / "model")
    source = Source.open(model)
    assert (source.experts.shape.hidden, source.architecture.hidden) == (16, 32)
    made = run_cli("compress", model, "--method", "d2moe", tmp_path / "full", "--rank", 10_000, *calibration)
    assert made.code == 0, made.stderr
    assert_close(logits(tmp_path / "full", tokens), logits(model, tokens))
    made = run_cli(
        "compress", model, "--method", "hybrid", tmp_path / "small", "--ratio", 0.1, "--refine", 2, *calibration
    )
    assert made.code == 0, made.stderr
    assert run_cli("verify", tmp_path / "small", "--against", model).code == 0
    for method in ("naee", "m-smoe"):
        refused = run_cli("compress", model, "--method", method, tmp_path / method, "--experts", 4, *calibration)
        assert refused.code == 3
        assert f"as {method} needs it" in refused.stderr
    assert (
        run_cli("compress", model, "--method", "hc-smoe", tmp_path / "merged", "--experts", 4, *calibration).code == 0
    )


@pytest.mark.parametrize(
    ("family", "router", "beside"),
    [("inkling_text", "mlp.gate.weight", 2), ("longcat_flash", "mlp.router.classifier.weight", 3)],
)
def test_a_router_with_rows_for_no_expert(
    run_cli: Any, save_model: Any, calibration: Any, tmp_path: Path, family: str, router: str, beside: int
) -> None:
    model = save_model(families.build(family, **DERIVED.get(family, {})), tmp_path / "model")
    for method in ("naee", "m-smoe", "reap"):
        made = run_cli("compress", model, "--method", method, tmp_path / method, "--experts", 4, *calibration)
        assert made.code == 0, made.stderr
        found, given = (load_file(path / WEIGHTS)[f"model.layers.1.{router}"] for path in (tmp_path / method, model))
        assert found.shape == (4 + beside, 32)
        assert found[4:].equal(given[6:])
        assert all((row == given[:6]).all(1).any() for row in found[:4])


def test_routers_of_models_in_others_are_asked(run_cli: Any, save_model: Any, calibration: Any, tmp_path: Path) -> None:
    family = "qwen3_vl_moe"
    model = save_model(families.build(family, **AROUND[family]), tmp_path / "model")
    made = run_cli("compress", model, "--method", "naee", tmp_path / "out", "--experts", 4, *calibration)
    assert made.code == 0, made.stderr
