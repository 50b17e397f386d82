"""The original's predictions, noted once: each token's likeliest successors, and the probability left for all
others."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor

from moetool.checkpoint.files import save_tensors

# By name what a file holds, and how many bytes of it a token and one of its predictions take.
LOGS, TOKENS, REST = "logs", "tokens", "rest"
ENTRY_BYTES, TOKEN_BYTES = 8, 4
_LITTLE = 1e-6  # share of all tokens together below which they count as nothing


class NotedPredictions(NamedTuple):
    """Predictions of a model at some positions.

    Attributes:
        logs: natural logarithms of the probabilities of its likeliest tokens, fp32 `[..., k]`.
        tokens: which these are, `[..., k]` int32.
        rest: probability of all others together, fp32 `[...]`.
    """

    logs: Tensor
    tokens: Tensor
    rest: Tensor

    @classmethod
    def of(cls, logits: Tensor, k: int) -> Self:
        """Keep of logits `[..., vocabulary]` the k largest log-probabilities, their tokens, and the probability of all
        others."""
        whole = logits.float().log_softmax(-1)
        logs, tokens = whole.topk(min(k, whole.shape[-1]), dim=-1)
        return cls(logs, tokens.int(), 1 - logs.exp().sum(-1))

    def divergence(self, logits: Tensor) -> Tensor:
        """KL divergence in nats `[...]` of predictions by logits `[..., vocabulary]` from these, with all tokens beyond
        the likeliest taken as one: never more than that over the whole vocabulary."""
        own = logits.float().log_softmax(-1).gather(-1, self.tokens.long())
        found = (self.logs.exp() * (self.logs - own)).sum(-1)
        if self.logs.shape[-1] == logits.shape[-1]:
            return found
        rest, left = self.rest.clamp_min(_LITTLE), (1 - own.exp().sum(-1)).clamp_min(_LITTLE)
        return found + torch.where(self.rest > _LITTLE, rest * (rest / left).log(), 0)

    def to(self, device: torch.device) -> Self:
        """Copy all tensors to a device."""
        return type(self)(*(tensor.to(device) for tensor in self))


def note(file: Path, found: Iterator[NotedPredictions]) -> None:
    """Write the teacher's predictions of all windows, given batch by batch, to a safetensors file."""
    logs, tokens, rest = (torch.cat(parts) for parts in zip(*found, strict=True))
    save_tensors(file, {LOGS: logs, TOKENS: tokens, REST: rest})


class NotedFile:
    """The file of a teacher's predictions that `note` has written, read window by window."""

    def __init__(self, file: Path) -> None:
        self._file = safe_open(file, "pt")
        self._parts = [self._file.get_slice(name) for name in (LOGS, TOKENS, REST)]

    def windows(self, first: int, last: int) -> NotedPredictions:
        """Read the predictions of the windows from `first` up to, but without, `last`."""
        return NotedPredictions(*(part[first:last] for part in self._parts))

    def of(self, numbers: list[int]) -> NotedPredictions:
        """Read the predictions of the windows with these numbers, in their order."""
        found = [self.windows(number, number + 1) for number in numbers]
        return NotedPredictions(*(torch.cat(parts) for parts in zip(*found, strict=True)))
