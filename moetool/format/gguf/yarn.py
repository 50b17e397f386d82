"""How strong YaRN makes rotary embeddings and scores of attention: in transformers' words, and in llama.cpp's.

llama.cpp is told of `attn_factor` a and, in latent attention and in Ministral 3, of a multiplier m
(`yarn_log_multiplier`; 0: none). With f the factor by which texts are longer and g = 1 + ln(f) / 10, it multiplies

- rotary embeddings by a · g, or, where there is a multiplier, by a · g / (1 + m ln(f)), in Ministral 3 with m / 10 in
  the place of m;
- scores of latent attention by (a · g)²;
- where there is a multiplier in `deepseek2`, embeddings by a and scores by (a · (1 + m ln(f)))².

Sources: llama.cpp, `src/llama-context.cpp`, `src/models/deepseek2.cpp`; https://arxiv.org/abs/2309.00071 (YaRN);
transformers, `modeling_rope_utils.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from moetool.format.gguf.family import GgufFamily

_DEEPSEEK2, _TOLERANCE = "deepseek2", 1e-6


def yarn_strengths(family: GgufFamily, rope: Mapping[str, Any], factor: float) -> tuple[float, float]:
    """`attn_factor` and `yarn_log_multiplier` with which llama.cpp multiplies as YaRN does in transformers."""
    rise, own = _rise(factor)
    share, all_of = rope.get("mscale"), rope.get("mscale_all_dim")
    if (turned := rope.get("attention_factor")) is None:
        turned = (1 + 0.1 * share * rise) / (1 + 0.1 * all_of * rise) if share and all_of else own
    if not family.is_latent:
        return turned / own, 0.0
    scores = 1 + 0.1 * (all_of or 0.0) * rise
    if not rise or math.isclose(scores, turned):
        return turned / own, 0.0
    return (turned if family.architecture == _DEEPSEEK2 else scores / own), (scores / turned - 1) / rise


def yarn_words(family: GgufFamily, attn_factor: float, log_multiplier: float, factor: float) -> dict[str, float]:
    """Undo `yarn_strengths`: transformers' entries, without those that say what transformers assumes."""
    rise, own = _rise(factor)
    turned = scores = attn_factor * own
    if log_multiplier and family.is_latent and family.architecture == _DEEPSEEK2:
        turned, scores = attn_factor, attn_factor * (1 + log_multiplier * rise)
    elif log_multiplier:
        turned /= 1 + (1.0 if family.is_latent else 0.1) * log_multiplier * rise
    is_own, is_plain = (math.isclose(turned, strength, rel_tol=_TOLERANCE) for strength in (own, 1.0))
    if not family.is_latent or not rise or math.isclose(scores, 1.0, rel_tol=_TOLERANCE):
        return {} if is_own else {"attention_factor": turned}
    all_of = 10 * (scores - 1) / rise
    found = {"mscale": all_of} if is_plain else {} if is_own else {"attention_factor": turned}
    return {**found, "mscale_all_dim": all_of}


def _rise(factor: float) -> tuple[float, float]:
    """The logarithm of a factor, and YaRN's own strength of rotary embeddings."""
    rise = math.log(factor) if factor > 1 else 0.0
    return rise, 1 + 0.1 * rise
