"""Pseudo-perplexity of an encoder (Salazar et al., "Masked Language Model Scoring", arXiv:1910.14659)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.calibration.masking import mask_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def marks(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    before, after = ([] if mark is None else [mark] for mark in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return before, after


@torch.inference_mode()
def pseudo_losses(
    model: Any, windows: Tensor, tokenizer: "PreTrainedTokenizerBase", rows: int, tick: Callable[[], None]
) -> Tensor:
    """Mean over a window's tokens of `−log p(token | all the others)`: `[windows]` fp64.

    Every token is hidden once, alone, between the tokenizer's own marks of beginning and end: as many runs as tokens.

    Args:
        model: a masked language model.
        windows: `[windows, length]` token ids.
        tokenizer: has a mask token.
        rows: runs in one batch.
        tick: called once per window.
    """
    mask, found = mask_token(tokenizer), []
    before, after = marks(tokenizer)
    for window in windows:
        framed = torch.tensor([*before, *window.tolist(), *after], device=model.device)
        losses = []
        for places in torch.arange(len(window), device=model.device).split(rows):
            index = torch.arange(len(places), device=model.device)
            runs = framed.expand(len(places), -1).clone()
            runs[index, places + len(before)] = mask
            logits = model(input_ids=runs).logits[index, places + len(before)]
            losses.append(F.cross_entropy(logits.float(), framed[places + len(before)], reduction="none"))
        found.append(torch.cat(losses).double().mean().cpu())
        tick()
    return torch.stack(found)
