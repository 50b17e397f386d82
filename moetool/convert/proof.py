"""Evidence that a conversion computes what it should: both models on the same tokens, a layer in memory at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from moetool.calibration.disk_experts import DiskExperts
from moetool.calibration.streaming import StreamedModel
from moetool.convert.results import Losses, Proof, Shares
from moetool.runtime.modules.insertion import Routed
from moetool.runtime.modules.routers import is_router, routed

# What conversions that preserve the model may differ by, in fp32: ‖Δ logits‖ / ‖logits‖.
TOLERANCE = 1e-5


@dataclass
class Routing:
    """Routing of a text by one layer.

    Attributes:
        shares: `[experts]` fp64, the part of all assignments that each expert gets; they sum to 1.
        entropy: mean over tokens of the entropy of the routing probabilities over all experts, in nats.
    """

    shares: Tensor
    entropy: float


@dataclass
class Run:
    """Logits, loss and routing of one model on some tokens.

    Attributes:
        logits: `[windows, length, vocabulary]` fp32, on the CPU.
        routing: by MoE layer.
    """

    logits: Tensor
    routing: dict[int, Routing] = field(default_factory=dict)


@torch.no_grad()
def run(model: StreamedModel, tokens: Tensor, tick: Callable[[], None]) -> Run:
    """Token ids `[windows, length]` through a streamed model; `tick` is called once per layer."""
    hidden = model.embed(tokens)
    routing = {}
    for index in range(model.layer_count):
        with model.layer(index) as layer:
            with _Watched(layer) as watched:
                hidden = model.run_layer(index, layer, hidden, tokens)
            if watched.probabilities is not None:
                routing[index] = watched.summary()
        tick()
    return Run(model.head(tokens, hidden).float().cpu(), routing)


class _Watched:
    """Sees a layer's routing for the time of a `with` block, whatever the family's router returns."""

    def __init__(self, layer: nn.Module) -> None:
        self.probabilities: Tensor | None = None
        self.counts: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        for module in layer.modules():
            if isinstance(module, Routed):
                self._handles.append(module.gate.register_forward_hook(self._own(module)))
        forwards = (module.__dict__.get("forward") for module in layer.modules())
        self._disk = [forward for forward in forwards if isinstance(forward, DiskExperts)]
        if self._disk:
            routers = filter(is_router, layer.modules())
            self._handles += [router.register_forward_hook(self._native) for router in routers]

    def _own(self, module: Routed) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: object, logits: Tensor) -> None:
            self.probabilities = logits.float().softmax(-1)
            chosen = self.probabilities.topk(module.top_k, dim=-1).indices
            self.counts = torch.bincount(chosen.flatten(), minlength=module.num_experts)

        return hook

    def _native(self, _: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        self.probabilities = routed(output)[0].float().softmax(-1)

    def __enter__(self) -> "_Watched":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._disk:
            self.counts = self._disk[0].tokens

    def summary(self) -> Routing:
        assert self.probabilities is not None
        assert self.counts is not None
        entropy = torch.special.entr(self.probabilities.double()).sum(-1).mean().item()
        return Routing(self.counts.double() / self.counts.sum(), entropy)


def mean_loss(logits: Tensor, tokens: Tensor) -> float:
    """Mean next-token loss of `[windows, length, vocabulary]` logits, in nats."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


def compare(dense: Run, moe: Run, tokens: Tensor, *, preserves: bool = True, predicts: bool = True) -> Proof:
    """Compare runs of the dense and the converted model on the same tokens: logits, losses if they predict, routing."""
    difference = (moe.logits - dense.logits).double().norm() / dense.logits.double().norm()
    losses, routing = None, None
    if predicts:
        losses = Losses(*(round(mean_loss(model.logits, tokens), 6) for model in (dense, moe)))
    if moe.routing:
        shares = torch.stack([layer.shares for layer in moe.routing.values()])
        entropies = [layer.entropy for layer in moe.routing.values()]
        entropy = sum(entropies) / len(entropies)
        routing = Shares(round(shares.min().item(), 4), round(shares.max().item(), 4), round(entropy, 4))
    return Proof(
        tokens=tokens.numel(),
        relative_logit_error=float(f"{difference.item():.3g}"),
        losses=losses,
        routing=routing,
        preserves=preserves,
    )
