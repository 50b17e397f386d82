"""Rotary embeddings of a GGUF file: scalings that its metadata names, factors of pairs of channels, YaRN's strengths.

Source: https://arxiv.org/abs/2309.00071 (YaRN); transformers, `modeling_rope_utils.py`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moetool.export.gguf.facts import WHOLE, GgufFacts
from moetool.format.gguf.family import GgufFamily

ROPE_SCALINGS = ("linear", "yarn")  # kinds (`rope_type`) that metadata name
ROPES_BY_PAIR = ("llama3", "proportional")  # kinds that a tensor describes, one factor for each pair of channels
LONG_ROPE = "longrope"  # the kind that two tensors describe, of short texts and of long ones
_STILL = 1e30  # divides an angle until it is nothing


def stretch(facts: GgufFacts) -> float:
    """By how much rotary embeddings are slowed down for long texts, as transformers computes it."""
    rope = facts.rope
    if (factor := rope.get("factor")) is not None:
        return float(factor)
    return float(facts.config.max_position_embeddings) / float(rope["original_max_position_embeddings"])


def factors_by_pair(facts: GgufFacts) -> Iterator[Tensor]:
    """`[channels / 2]` fp32, by how much each pair of a head's channels turns slower, of one of `ROPES_BY_PAIR`; in one
    part."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if facts.rope["rope_type"] == "proportional":  # the first pairs turn, the others stand still
        turned = int(facts.whole_width * facts.rotary_share) // 2
        yield torch.cat([torch.ones(turned), torch.full((facts.whole_width // 2 - turned,), _STILL)])
        return
    kind = {} if facts.rope is facts.config.rope_parameters else {"layer_type": WHOLE}
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](facts.config, torch.device("cpu"), **kind)
    steps = torch.arange(0, 2 * len(slowed), 2, dtype=torch.float32) / (2 * len(slowed))
    others = torch.ones(facts.most_turned // 2 - len(slowed))  # in layers with a window
    yield torch.cat([facts.rope["rope_theta"] ** -steps / slowed, others])


def long_rope_strength(facts: GgufFacts) -> float:
    """By what LongRoPE multiplies rotary embeddings, as transformers computes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return float(ROPE_INIT_FUNCTIONS[LONG_ROPE](facts.config, torch.device("cpu"))[1])


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
