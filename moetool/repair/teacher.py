"""The original's predictions, noted once: each token's likeliest successors, the probability left for all others, and
what its routers say."""

from pathlib import Path
from typing import NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor

from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import save_tensors
from moetool.errors import VerificationError
from moetool.job.interrupt import Interrupt
from moetool.job.progress import Progress
from moetool.numerics.divergence import divergence
from moetool.repair.routing import RoutingTarget
from moetool.runtime.modules.routers import Routers

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


def predictions(
    sweep: Sweep, k: int, target: RoutingTarget | None, progress: Progress, interrupt: Interrupt
) -> NotedPredictions:
    """Predictions of all windows by a model of which one layer is in memory at a time, on the CPU; and its routing, if
    that is a target.

    Args:
        sweep: the windows `[windows, length]` and the model.
        k: likeliest tokens of each position that are kept.
        target: the routing.
        progress: told where the family's routers do not tell what they decide.
        interrupt: obeyed between layers.

    Raises:
        InvalidInputError: a layer gives NaN or infinity.
        VerificationError: the model predicts what is no number.
    """
    routing = _routing(sweep, target, interrupt)
    if target is not None and routing is None:
        progress.log("This family's routers do not tell what they decide: predictions alone are learnt from.")
    whole: list[Tensor] = []
    for window, logits in enumerate(sweep.logits()):
        logs, tokens, rest, _ = NotedPredictions.of(logits, k)
        if not logs.isfinite().all():
            path = sweep.model.checkpoint.path
            raise VerificationError(f"{path} predicts what is no number: its weights are damaged.")
        whole = whole or [torch.empty(sweep.count, *one.shape, dtype=one.dtype) for one in (logs, tokens, rest)]
        for all_windows, one in zip(whole, (logs, tokens, rest), strict=True):
            all_windows[window] = one
    logs, tokens, rest = whole
    return NotedPredictions(logs, tokens, rest, routing)


def _routing(sweep: Sweep, target: RoutingTarget | None, interrupt: Interrupt) -> Tensor | None:
    """Take the windows through all layers, and return what the routers say `[windows, length, layers, experts]`."""
    routers, found = Routers(sweep.model.model), None
    with routers.watched():
        for layer in sweep.through_layers():
            interrupt.check()
            if target is not None and layer in target.experts:
                logs = target.logs(layer, routers.logits[-sweep.batch_count :])  # some layers run twice
                if logs is None:
                    target = found = None
                    continue
                if found is None:
                    found = torch.empty(*sweep.windows.shape, len(target.experts), logs.shape[-1])
                found[:, :, [*target.experts].index(layer)] = logs.unflatten(0, found.shape[:2])
            routers.clear()
    return found


def note(file: Path, found: NotedPredictions) -> None:
    """Write the teacher's predictions of all windows to a safetensors file."""
    save_tensors(file, {name: tensor for name, tensor in found._asdict().items() if tensor is not None})


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
