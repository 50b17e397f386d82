"""Cut a stream of token ids into consecutive windows of equal length, in order or shuffled."""

import torch
from torch import Tensor

DRAWING = 3  # raised when equal options draw other windows than before, so that no run is resumed with both


def shuffled_windows(tokens: Tensor, due: int, length: int, generator: torch.Generator) -> Tensor:
    """A stream `[tokens]` cut into consecutive windows `[windows, length]` from a random phase on, in random order;
    `due` of them are wanted."""
    count = len(tokens) // length
    # With windows to spare the phase may cost one; without, it only moves what the last one leaves over.
    room = length if count > due else len(tokens) - count * length + 1
    phase = int(torch.randint(room, (), generator=generator))
    windows = consecutive_windows(tokens[phase:], length)
    return windows[torch.randperm(len(windows), generator=generator)]


def consecutive_windows(tokens: Tensor, length: int) -> Tensor:
    """A stream `[tokens]` cut into windows `[windows, length]`, the rest dropped."""
    count = len(tokens) // length
    return tokens[: count * length].view(count, length)
