"""Calibration and evaluation windows of an encoder, in which some tokens are hidden for it to predict."""

import torch
from torch import Tensor

from moetool.calibration.opening import Tokenizer
from moetool.errors import InvalidInputError
from moetool.numerics.seeding import generator

SHARE = 0.15  # of the tokens, as BERT was trained


def mask_token(tokenizer: Tokenizer) -> int:
    """The id that stands for a hidden token. Raises `InvalidInputError` if the tokenizer has none."""
    if tokenizer.mask_token_id is None:
        raise InvalidInputError("The tokenizer has no mask token, which an encoder needs to be tried on a text.")
    return int(tokenizer.mask_token_id)


def masked_windows(windows: Tensor, tokenizer: Tokenizer, seed: int) -> Tensor:
    """Hide 15 % of the tokens of windows `[windows, length]` behind the mask token, at least one in each window."""
    chances = torch.rand(windows.shape, generator=generator(seed, "mask"))
    hidden = chances < SHARE
    hidden |= chances == chances.amin(1, keepdim=True)
    return windows.masked_fill(hidden, mask_token(tokenizer))
