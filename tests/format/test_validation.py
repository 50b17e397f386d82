"""What is refused of a `config.json` and moetool's entry in it, in which words, and what is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetool.checkpoint.reader import read_config
from moetool.errors import InvalidInputError

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}
LLAMA = {key: value for key, value in MIXTRAL.items() if "experts" not in key} | {"model_type": "llama"}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
FOUR = ["low-rank:2"] * 4


def own(**entries: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "moetool", "format_version": 1, **entries}}


def stored(**roles: Any) -> dict[str, Any]:
    return own(layers={"1": {"gate": FOUR, "up": FOUR, "down": FOUR, **roles}})


MIXTURE = {"experts": 4, "top_k": 2, "hidden": 32, "intermediate": 48, "layers": [0, 2], "of": 3, "shared": "none"}
MIXTURE |= {"roles": ["gate", "up", "down"], "biases": []}
ADAPTERS = {"experts": 4, "top_k": 2, "layers": [0, 1, 2], "width": 8, "scale": 1.0, "dropout": 0.0}
MASKS = {"experts": 4, "router_width": 8, "sparsity": 0.5, "channels": None}
NEURONS = {"experts": 4, "keep": 0.5, "selector": "mlp", "layers": [0, 1, 2]}


def check(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    read_config(directory)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (MIXTRAL, {"num_local_experts": -8}, ["num_local_experts", "-8"]),
    (MIXTRAL, {"num_local_experts": 10**9}, ["num_local_experts", "1000000000", "100000"]),
    (MIXTRAL, {"num_experts_per_tok": 0}, ["num_experts_per_tok", "0"]),
    (MIXTRAL, {"num_experts_per_tok": 5}, ["num_experts_per_tok", "5", "only 4"]),
    (MIXTRAL, {"vocab_size": "x"}, ["vocab_size is 'x'", "integer"]),
    (MIXTRAL, {"vocab_size": None}, ["vocab_size is None", "integer"]),
    (MIXTRAL, {"hidden_size": 10**18}, ["hidden_size is 1000000000000000000", "less than or equal to"]),
    (MIXTRAL, {"num_hidden_layers": 10**6}, ["num_hidden_layers is 1000000", "10000"]),
    (MIXTRAL, {"hidden_act": "nothing"}, ["hidden_act is 'nothing'", "silu"]),
    (MIXTRAL, {"rope_scaling": {"type": "nothing", "factor": 2.0}}, ["rope_scaling.type is 'nothing'", "yarn"]),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, ["rope_parameters.factor is -1.0"]),
    (DEEPSEEK, {"n_group": 3}, ["n_group is 3", "8 experts"]),
    (DEEPSEEK, {"topk_group": 5}, ["topk_group is 5", "n_group is 4"]),
    (LLAMA, {"rms_norm_eps": 1e308}, ["rms_norm_eps is 1e+308"]),
    (LLAMA, {"rope_scaling": 7}, ["rope_scaling is 7, but should be a valid dictionary."]),
    (LLAMA, {"head_dim": -4}, ["head_dim is -4", "greater than or equal to 1"]),
    (LLAMA, {"num_key_value_heads": 0}, ["num_key_value_heads is 0", "greater than or equal to 1"]),
    (LLAMA, {"num_key_value_heads": 3}, ["num_key_value_heads is 3", "does not divide", "4"]),
    (LLAMA, {"tie_word_embeddings": 7}, ["tie_word_embeddings is 7", "boolean"]),
    (LLAMA, {"quantization_config": "x"}, ["quantization_config is 'x'", "dictionary"]),
    (LLAMA, {"quantization_config": []}, ["quantization_config is []", "dictionary"]),
    (MIXTRAL, own(layers=[]), ["layers is []", "dictionary"]),
    (MIXTRAL, own(layers={"3": {}}), ["'3'", "0 to 2"]),
    (MIXTRAL, own(layers={"\u00b2": {}}), ["'\u00b2'", "0 to 2"]),
    (MIXTRAL, own(format_version=99), ["format version 99", "Upgrade"]),
    (MIXTRAL, stored(gate=["quantised:4:7"] * 4), ["layer 1", "gate", "'quantised:4:7'", "7 do not divide 32"]),
    (MIXTRAL, stored(down=["magic"] * 4), ["layer 1", "magic", "low-rank"]),
    (MIXTRAL, stored(up=FOUR[:3]), ["layer 1", "up", "3 representations"]),
    (MIXTRAL, stored(base_channels=49), ["layer 1", "49 base channels of 48"]),
    (LLAMA, own(mixture={}), ["mixture.experts is missing"]),
    (LLAMA, own(mixture={**MIXTURE, "top_k": 5}), ["mixture", "top_k is 5", "4 experts"]),
    (LLAMA, own(mixture={**MIXTURE, "roles": ["up", "down"]}), ["mixture.roles", "gate"]),
    (LLAMA, own(mixture={**MIXTURE, "biases": ["gate"]}), ["mixture.biases", "gate and up"]),
    (LLAMA, own(mixture={**MIXTURE, "layers": [0, 3]}), ["mixture.layers", "[3]", "3 layers"]),
    (LLAMA, own(mixture={**MIXTURE, "shared": "some"}), ["mixture.shared is 'some'", "half"]),
    (LLAMA, own(adapter_experts={**ADAPTERS, "width": 0}), ["adapter_experts.width is 0"]),
    (LLAMA, own(adapter_experts={**ADAPTERS, "layers": [1, 0]}), ["adapter_experts", "ascending"]),
    (LLAMA, own(interpolated={**MASKS, "channels": 7}), ["interpolated.channels is 7"]),
    (LLAMA, own(neuron_experts={**NEURONS, "keep": 0.01}), ["neuron_experts", "keep is 0.01", "4 experts"]),
    (LLAMA, own(neuron_experts={**NEURONS, "selector": "best"}), ["neuron_experts.selector is 'best'", "oracle"]),
    (LLAMA, own(neuron_experts=NEURONS, adapter_experts=ADAPTERS), ["adapter_experts and neuron_experts"]),
]


@pytest.mark.parametrize(("config", "changes", "words"), REFUSED)
def test_what_is_wrong_is_named(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check(tmp_path, {**config, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)


ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (MIXTRAL, {}),
    (DEEPSEEK, {}),
    (MIXTRAL, {"unheard_of": [1, {"a": None}], "sliding_window": None, "head_dim": None}),
    (LLAMA, {"hidden_act": "laplace"}),  # which only transformers knows
    (LLAMA, {"rope_scaling": {"rope_type": "proportional"}}),
    (LLAMA, {"rope_scaling": {"type": "su", "long_factor": [1.0]}}),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": None}}),
    (LLAMA, {"quantization_config": None}),
    (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ({"model_type": "of_tomorrow", "vocab_size": {"text": 7}, "hidden_act": "new"}, {}),
    ({key: value for key, value in MIXTRAL.items() if key != "num_local_experts"}, {}),
    (MIXTRAL, stored()),
    (MIXTRAL, own(layers={})),
    (MIXTRAL, own(layers={}, original_bytes=1_340_000_000_000)),
    (LLAMA, own(mixture=MIXTURE)),
    (LLAMA, own(adapter_experts=ADAPTERS)),
    (LLAMA, own(interpolated=MASKS)),
    (LLAMA, own(neuron_experts=NEURONS)),
]


@pytest.mark.parametrize(("config", "changes"), ACCEPTED)
def test_what_transformers_or_moetool_computes_is_not_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    check(tmp_path, {**config, **changes})


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "configs").iterdir()), ids=lambda file: file.stem)
def test_configs_of_the_hub_pass(tmp_path: Path, file: Path) -> None:
    check(tmp_path, json.loads(file.read_text()))


@pytest.mark.parametrize("depth", [70, 900, 30_000])
def test_json_that_nests_too_deep(tmp_path: Path, depth: int) -> None:
    (tmp_path / "config.json").write_text('{"a": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(InvalidInputError, match=r"in one another|not valid JSON"):
        read_config(tmp_path)
