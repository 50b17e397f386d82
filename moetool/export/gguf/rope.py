"""Rotary embeddings of a GGUF file: scalings that its metadata names, and factors of pairs of channels.

Source: transformers, `modeling_rope_utils.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moetool.export.gguf.facts import WHOLE, GgufFacts

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
