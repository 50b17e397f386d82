"""Rotary embeddings for long texts (YaRN) in the metadata of a GGUF file.

Source: https://arxiv.org/abs/2309.00071; transformers, `modeling_rope_utils.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.family import GgufFamily


def stretch(source: GgufSource) -> float:
    """By how much rotary embeddings are slowed down for long texts, as transformers computes it."""
    rope = source.rope
    if (factor := rope.get("factor")) is not None:
        return float(factor)
    return float(source.config.max_position_embeddings) / float(rope["original_max_position_embeddings"])


def yarn_strengths(family: GgufFamily, rope: Mapping[str, Any], factor: float) -> tuple[float, float]:
    """The metadata `attn_factor` and `yarn_log_multiplier` (0: none) with which llama.cpp multiplies as YaRN does in
    transformers: rotary embeddings by one number, and scores of latent attention by the square of another.

    With g = 1 + ln(factor) / 10, llama.cpp multiplies embeddings by attn_factor · g. Where there is a multiplier m,
    scores are multiplied by (attn_factor · g)², and embeddings by attn_factor · g / (1 + m ln(factor)); but in
    `deepseek2` both have no g. Sources: llama.cpp, `src/llama-context.cpp`, `src/models/deepseek2.cpp`.
    """
    rise = math.log(factor) if factor > 1 else 0.0
    own, share, all_of = 1 + 0.1 * rise, rope.get("mscale"), rope.get("mscale_all_dim")
    if (turned := rope.get("attention_factor")) is None:
        turned = (1 + 0.1 * share * rise) / (1 + 0.1 * all_of * rise) if share and all_of else own
    if not family.is_latent:
        return turned / own, 0.0
    scores = 1 + 0.1 * (all_of or 0.0) * rise
    if not rise or math.isclose(scores, turned):
        return turned / own, 0.0
    return (turned if family.architecture == "deepseek2" else scores / own), (scores / turned - 1) / rise
