"""The original's predictions, noted once: each token's likeliest successors, the probability left for all others, and
what its routers say."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor

from moetool.checkpoint.files import save_tensors
from moetool.job.progress import Progress
from moetool.numerics.divergence import divergence
from moetool.repair.routing import RoutingTarget, routing_logs
from moetool.runtime.modules.routers import Routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Bytes that one of a token's predictions takes, and the rest of them; and what a router says of an expert.
ENTRY_BYTES, TOKEN_BYTES, ROUTED_BYTES = 8, 4, 4
_LITTLE = 1e-6  # share of all tokens together below which they count as nothing


class NotedPredictions(NamedTuple):
    """Predictions of a model at some positions.

    Attributes:
        logs: natural logarithms of the probabilities of its likeliest tokens, fp32 `[..., k]`.
        tokens: which these are, `[..., k]` int32.
        rest: probability of all others together, fp32 `[...]`.
        routing: natural logarithms of the routers' probabilities, fp32 `[..., layers, experts]`; `None` where they are
            no target.
    """

    logs: Tensor
    tokens: Tensor
    rest: Tensor
    routing: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, k: int, routing: Tensor | None = None) -> Self:
        """Keep of logits `[..., vocabulary]` the k largest log-probabilities, their tokens, and the probability of all
        others; and the routing as it is given."""
        whole = logits.float().log_softmax(-1)
        logs, tokens = whole.topk(min(k, whole.shape[-1]), dim=-1)
        return cls(logs, tokens.int(), 1 - logs.exp().sum(-1), routing)

    def divergence(self, logits: Tensor) -> Tensor:
        """KL divergence in nats `[...]` of predictions by logits `[..., vocabulary]` from these, with all tokens beyond
        the likeliest taken as one: never more than that over the whole vocabulary."""
        own = logits.float().log_softmax(-1).gather(-1, self.tokens.long())
        found = divergence(self.logs, own)
        if self.logs.shape[-1] == logits.shape[-1]:
            return found
        rest, left = self.rest.clamp_min(_LITTLE), (1 - own.exp().sum(-1)).clamp_min(_LITTLE)
        return found + torch.where(self.rest > _LITTLE, rest * (rest / left).log(), 0)

    def to(self, device: torch.device) -> Self:
        """Copy all tensors to a device."""
        routing = None if self.routing is None else self.routing.to(device)
        return type(self)(self.logs.to(device), self.tokens.to(device), self.rest.to(device), routing)


@torch.no_grad()
def noted_batches(
    model: "PreTrainedModel",
    windows: Tensor,
    batch_size: int,
    k: int,
    progress: Progress,
    target: RoutingTarget | None = None,
) -> Iterator[NotedPredictions]:
    """Iterate over a model's predictions of windows `[windows, length]`, batch by batch, on the CPU; and over its
    routing, if that is a target."""
    routers = Routers(model)
    for batch in windows.split(batch_size):
        with routers.watched():
            logits = model(input_ids=batch.to(model.device), use_cache=False).logits
        if target is not None and not target.is_of(routers.logits):
            progress.log("This family's routers do not tell what they decide: predictions alone are learnt from.")
            target = None
        routing = None if target is None else routing_logs(routers.logits, target.experts, len(batch))
        yield NotedPredictions.of(logits, k, routing).to(torch.device("cpu"))
        progress.advance()


def note(file: Path, found: Iterator[NotedPredictions]) -> None:
    """Write the teacher's predictions of all windows, given batch by batch, to a safetensors file."""
    parts: dict[str, list[Tensor]] = {name: [] for name in NotedPredictions._fields}
    for batch in found:
        for name, tensor in batch._asdict().items():
            parts[name] += [] if tensor is None else [tensor]
    save_tensors(file, {name: torch.cat(tensors) for name, tensors in parts.items() if tensors})


class NotedFile:
    """The file of a teacher's predictions that `note` has written, read window by window."""

    def __init__(self, file: Path) -> None:
        self._file = safe_open(file, "pt")
        self._parts = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118

    def windows(self, first: int, last: int) -> NotedPredictions:
        """Read the predictions of the windows from `first` up to, but without, `last`."""
        return NotedPredictions(**{name: part[first:last] for name, part in self._parts.items()})

    def of(self, numbers: list[int]) -> NotedPredictions:
        """Read the predictions of the windows with these numbers, in their order."""
        found = [self.windows(number, number + 1) for number in numbers]
        return NotedPredictions(**{name: torch.cat([getattr(own, name) for own in found]) for name in self._parts})
