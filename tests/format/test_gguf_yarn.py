"""YaRN in GGUF's metadata: what llama.cpp multiplies by, given what is written, is what transformers multiplies by."""

import math
from itertools import product
from typing import Any

import pytest
import torch

from moetool.format.gguf.families import GGUF_FAMILIES
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.yarn import yarn_strengths, yarn_words

FAMILIES = {family.model_type: family for family in GGUF_FAMILIES}
ENTRIES = {
    "mscale": (None, 0.7, 1.0),
    "mscale_all_dim": (None, 0.7, 1.0, 1.3),
    "attention_factor": (None, 1.0, 1.2),
    "factor": (1.0, 4.0, 40.0),
}


def scaled(factor: float, strength: float) -> float:
    """YaRN's number for a strength: 1 for models that are not stretched."""
    return 1 + 0.1 * strength * math.log(factor) if factor > 1 else 1.0


def in_llama_cpp(family: GgufFamily, factor: float, attn_factor: float, log_multiplier: float) -> tuple[float, float]:
    """By what llama.cpp multiplies rotary embeddings, and queries and keys of latent attention (`yarn_attn_factor` in
    llama-context.cpp, `mscale` in deepseek2.cpp)."""
    strength = 10 * log_multiplier
    own = scaled(factor, 1.0)
    if strength:
        first = strength if family.architecture == "deepseek2" and strength != 1 else 1.0
        own = scaled(factor, first) / scaled(factor, strength)
    turned = attn_factor * own
    return turned, turned * scaled(factor, strength)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "mistral4", "qwen3_moe"])
def test_llama_cpp_multiplies_as_transformers_does(model_type: str) -> None:
    for values in product(*ENTRIES.values()):
        check(FAMILIES[model_type], values)


def check(family: GgufFamily, values: tuple[float | None, ...]) -> None:
    rope: dict[str, Any] = {key: value for key, value in zip(ENTRIES, values, strict=True) if value is not None}
    factor, share, all_of = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    ratio = scaled(factor, share) / scaled(factor, all_of) if share and all_of else scaled(factor, 1.0)
    turned, scores = in_llama_cpp(family, factor, *yarn_strengths(family, rope, factor))
    expected = rope.get("attention_factor", ratio)
    assert turned == pytest.approx(expected, rel=1e-12)
    if family.is_latent and factor > 1:
        assert scores == pytest.approx(scaled(factor, all_of or 0.0), rel=1e-12)
    strengths = yarn_strengths(family, rope, factor)
    again = yarn_strengths(family, yarn_words(family, *strengths, factor), factor)
    assert again == pytest.approx(strengths, rel=1e-9, abs=1e-9)


def test_words_are_those_that_models_are_published_with() -> None:
    """DeepSeek-V2's and V3's, of metadata in fp32, as llama.cpp's converter writes them; Ministral 3's."""
    for model_type, strength in (("deepseek_v3", 1.0), ("deepseek_v2", 0.707)):
        multiplier = float(torch.tensor(0.1 * strength))
        words = yarn_words(FAMILIES[model_type], 1.0, multiplier, 40.0)
        assert words == pytest.approx({"mscale": strength, "mscale_all_dim": strength}, rel=1e-6)
    assert yarn_words(FAMILIES["ministral3"], 1.0, 1.0, 16.0) == {"attention_factor": 1.0}
    assert yarn_words(FAMILIES["qwen3_moe"], 1.0, 0.0, 4.0) == {}
