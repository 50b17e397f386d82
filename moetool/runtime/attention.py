"""transformers' attention function `moetool`: torch's, but kernels for the tokens of `generate` on a processor.

Of one token of a sequence torch's attention takes ten times as long in bf16 as its keys and values take to be read: it
arranges the keys of every head anew, as if many tokens were to meet them.
"""

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moetool.kernels.attention import attend, attends

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOETOOL_ATTENTION = "moetool"
_OTHERWISE = ("softcap", "position_bias", "cache", "output_attentions")  # what only torch's takes, or refuses


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`: `[batch, heads, tokens, width]` each → `[batch, tokens, heads, width]`."""
    is_plain = not dropout and not any(options.get(name) is not None for name in _OTHERWISE)
    if torch.compiler.is_compiling() or not is_plain or not attends(query, key, value, attention_mask):
        output: Tensor
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, attention_mask, scale).unsqueeze(1), None


def attend_by_kernels(model: "PreTrainedModel") -> None:
    """Have a model that would take torch's attention take this one. Not where its code asks for torch's by name."""
    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return
    if '"sdpa"' not in inspect.getsource(sys.modules[type(model).__module__]):
        model.set_attn_implementation(MOETOOL_ATTENTION)


ALL_ATTENTION_FUNCTIONS.register(MOETOOL_ATTENTION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(MOETOOL_ATTENTION, sdpa_mask)
