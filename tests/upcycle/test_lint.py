"""Warnings about other engines: each comes when it should, and only then."""

from types import SimpleNamespace
from typing import Any

import pytest

from moetool.architectures import ROLES
from moetool.format.kinds.moe import MoESpec
from moetool.upcycle.lint import lint
from moetool.upcycle.targets import targets

PLAIN: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
GELU = {"hidden_act": "gelu_pytorch_tanh"}


def notes(
    target: str,
    *features: str,
    config: dict[str, Any] | None = None,
    layers: tuple[int, ...] = (0, 1),
    shared: Any = "none",
    width: int = 512,
    hidden: int = 256,
    head: bool = False,
) -> list[str]:
    tensors = {"lm_head.weight": None} if head else {}
    dense: Any = SimpleNamespace(features=features, checkpoint=SimpleNamespace(tensors=tensors))
    spec = MoESpec(
        experts=4,
        top_k=2,
        intermediate=width,
        layers=layers,
        shared=shared,
        of=2,
        hidden=hidden,
        roles=ROLES,
        biases=(),
    )
    return lint(targets()[target], dense, spec, {**PLAIN, **(config or {})})


# What fires, what does not, and a word of the warning.
RULES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"of": ("mixtral",), "config": {"quantization_config": {"quant_method": "moetool"}}},
        {"of": ("mixtral",), "config": {"quantization_config": None}},
        "runs deltas",
    ),
    ({"of": ("mixtral",), "width": 172}, {"of": ("mixtral",), "width": 344}, "experts_implementation='eager'"),
    ({"of": ("mixtral",), "hidden": 36}, {"of": ("mixtral",), "hidden": 40}, "experts_implementation='eager'"),
    ({"of": ("mixtral",), "width": 172}, {"of": ("mixtral",), "width": 130}, "in 16 bits without"),
    ({"of": ("mixtral",), "width": 130}, {"of": ("mixtral",), "width": 172}, "in 32 bits or less without"),
    ({"of": ("mixtral",), "hidden": 90}, {"of": ("mixtral",), "hidden": 100}, "in 32 bits or less without"),
    ({"of": ("flex_olmo",)}, {"of": ("mixtral",)}, "does not know flex_olmo"),
    ({"of": ("qwen2_moe",)}, {"of": ("qwen2_moe",), "shared": "med"}, "never renormalizes"),
    ({"of": ("qwen2_moe",), "shared": "half"}, {"of": ("qwen3_moe",)}, "never renormalizes"),
    ({"of": ("qwen2_moe",)}, {"of": ("qwen2_moe",), "shared": "half"}, "tune --train experts"),
    ({"of": ("qwen2_moe",)}, {"of": ("qwen3_moe",)}, "tune --train experts"),
    ({"of": ("qwen3_moe",), "layers": (1,)}, {"of": ("qwen3_moe",)}, "cannot convert qwen3_moe with dense layers"),
    ({"of": ("qwen2_moe",), "layers": (1,)}, {"of": ("qwen2_moe",)}, "cannot convert qwen2_moe with dense layers"),
    ({"of": ("qwen2_moe",), "config": TIED}, {"of": ("qwen2_moe",)}, "tied embeddings"),
    (
        {"of": ("qwen2_moe",), "config": TIED},
        {"of": ("qwen2_moe",), "config": TIED, "head": True},
        "tied embeddings",
    ),
    ({"of": ("qwen2_moe",), "config": TIED}, {"of": ("mixtral",), "config": TIED}, "tied embeddings"),
    ({"of": ("granitemoe", "head_dim")}, {"of": ("granitemoe",)}, "ignore head_dim in granitemoe"),
    ({"of": ("granitemoeshared", "head_dim")}, {"of": ("mixtral", "head_dim")}, "ignore head_dim in granitemoeshared"),
    ({"of": ("qwen2_moe", "head_dim")}, {"of": ("qwen3_moe", "head_dim")}, "ignore head_dim in qwen2_moe"),
    ({"of": ("granitemoe", "qkv_bias")}, {"of": ("granitemoe",)}, "drops the attention's biases"),
    ({"of": ("granitemoeshared", "attention_bias")}, {"of": ("qwen2_moe", "qkv_bias")}, "drops the attention's biases"),
    ({"of": ("qwen3_moe", "attention_bias")}, {"of": ("qwen3_moe",)}, "drops the bias of the attention's output"),
    (
        {"of": ("qwen3_moe", "attention_bias")},
        {"of": ("flex_olmo", "attention_bias")},
        "drops the bias of the attention's output",
    ),
    ({"of": ("mixtral",), "config": GELU}, {"of": ("mixtral",)}, "instead of gelu_pytorch_tanh"),
    ({"of": ("granitemoe",), "config": GELU}, {"of": ("granitemoe",), "config": {"hidden_act": "swish"}}, "built into"),
    (
        {"of": ("mixtral", "sliding_window"), "config": {"sliding_window": 77}},
        {"of": ("mixtral",)},
        "sliding window of mixtral: beyond 77 tokens",
    ),
    ({"of": ("qwen2_moe", "mixed_attention")}, {"of": ("qwen2_moe",)}, "llama.cpp ignores the sliding window"),
    (
        {"of": ("qwen2_moe", "mixed_attention")},
        {"of": ("qwen2_moe", "sliding_window")},
        "vLLM ignores windows in some layers",
    ),
    ({"of": ("mixtral",), "width": 192}, {"of": ("mixtral",)}, "experts are 192 wide, no multiple of 256"),
    ({"of": ("mixtral",), "hidden": 576}, {"of": ("mixtral",)}, "hidden states are 576 wide, no multiple of 256"),
    ({"of": ("mixtral",), "width": 257}, {"of": ("mixtral",), "width": 1024}, "experts are 257 wide"),
]


@pytest.mark.parametrize(("firing", "silent", "told"), RULES)
def test_rules(firing: dict[str, Any], silent: dict[str, Any], told: str) -> None:
    def found(of: tuple[str, ...], **options: Any) -> list[str]:
        return [note for note in notes(*of, **options) if told in note]

    assert len(found(**firing)) == 1
    assert found(**silent) == []


@pytest.mark.parametrize("target", ["mixtral", "granitemoe", "granitemoeshared", "qwen3_moe"])
def test_nothing_to_say_of_a_plain_model(target: str) -> None:
    assert notes(target) == []


def test_of_our_own_module_there_is_one_thing_to_say() -> None:
    (note,) = notes("moetool", "mixed_attention", "attention_bias", "head_dim", config=GELU, width=3, layers=(1,))
    assert "only transformers runs moetool's custom MoE layers" in note
