"""Routing as a target: where the original sends each token, said in the experts that the compressed model has.

Compression moves the hidden states that routers see, and a token that is sent to other experts than in the original
loses more than rounding does: with `hybrid` at 75 % a thirtieth of all tokens holds two thirds of the divergence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from moetool.checkpoint.manifest import manifest_of
from moetool.checkpoint.reader import Checkpoint
from moetool.job.job import Source
from moetool.numerics.divergence import divergence

# Of each expert of a model, those of the original that it is or was merged of; `None` where they are the same.
MadeOf: TypeAlias = Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class RoutingTarget:
    """Routing of an original that a model is to have, too.

    Attributes:
        experts: of each MoE layer, by its number.
        rows: of the original's routers, for its experts and what else a token may be given.
    """

    experts: Mapping[int, MadeOf]
    rows: int

    def logs(self, layer: int, logits: Sequence[Tensor]) -> Tensor | None:
        """Natural logarithms of a router's probabilities `[tokens, experts]`, as `in_experts_of`, from what it said
        batch by batch; `None` for a family whose routers do not tell."""
        if not logits or logits[0].shape[-1] != self.rows:
            return None
        return in_experts_of(torch.cat(list(logits)), self.experts[layer])


def routing_target(source: Source, original: Source) -> RoutingTarget | None:
    """The original's routing as a target of a model's: whole, or in the experts that are left.

    Fewer experts are told by the record that the model came with; without it, or in it of another original than this
    one, nothing tells which are left, and the answer is `None`. So it is for a model whose experts are no part of its
    original's.
    """
    layers, rows = source.experts.moe_layers, original.architecture.routed_to[0]
    if layers != original.experts.moe_layers:
        return None
    if source.architecture.routed_to[0] == rows:
        return RoutingTarget(dict.fromkeys(layers), rows)
    left, more = source.architecture.shape.experts, original.architecture.shape.experts
    # Rows of a router after those of experts are for what a token may be given beside them.
    beside = [[row] for row in range(more, rows)]
    found = dict[int, MadeOf]()
    for layer in layers:
        groups = _made_of(source.checkpoint, original.checkpoint, layer)
        if groups is None or len(groups) != left or not all(0 <= own < more for group in groups for own in group):
            return None
        found[layer] = [*groups, *beside]
    return RoutingTarget(found, rows) if left + len(beside) == source.architecture.routed_to[0] else None


def _made_of(source: Checkpoint, original: Checkpoint, layer: int) -> list[list[int]] | None:
    manifest = manifest_of(source.path)
    if manifest is None or manifest.source_fingerprint != original.fingerprint():
        return None
    groups = manifest.layers.get(str(layer), {}).get("made_of")
    is_whole = isinstance(groups, list) and all(isinstance(group, list) and group for group in groups)
    return cast(list[list[int]], groups) if is_whole else None


def in_experts_of(logits: Tensor, experts: MadeOf) -> Tensor:
    """Natural logarithms of a router's probabilities `[tokens, experts]`, from the original's logits
    `[tokens, experts of the original]`.

    A merged expert has the probabilities of all that it was made of; what went to experts that are gone is shared out
    among the others in proportion.
    """
    logs = logits.float().log_softmax(-1)
    if experts is not None:
        logs = torch.stack([logs[:, list(group)].logsumexp(-1) for group in experts], -1).log_softmax(-1)
    return logs


def routing_divergence(logits: Sequence[Tensor], original: Tensor) -> Tensor:
    """KL divergence in nats of a model's routing from the original's, mean over all tokens and layers.

    Args:
        logits: of each router, in the order of layers, `[tokens, experts]`.
        original: natural logarithms of its probabilities, `[windows, length, layers, experts]`.
    """
    ours = torch.stack([own.float().log_softmax(-1) for own in logits], 1)
    return divergence(original.flatten(0, 1), ours).mean()
