"""Choice of the experts of a layer that stay, and of those that are merged into each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fewer:
    """Number of experts that a layer had and keeps, by router group.

    Attributes:
        experts: that there are.
        kept: that are left.
        groups: that the router chooses among first; each keeps as many experts as the others.
    """

    experts: int
    kept: int
    groups: int = 1

    @property
    def each(self) -> int:
        """Number of experts that each router group keeps; groups all have the same number."""
        return self.kept // self.groups

    @property
    def ranges(self) -> list[range]:
        """The expert numbers of each router group; one range if the router has no groups."""
        size = self.experts // self.groups
        return [range(group * size, (group + 1) * size) for group in range(self.groups)]


@dataclass(frozen=True)
class Merged:
    """An expert that is left, and the experts that were merged into it with their weights.

    Attributes:
        members: the experts that it is made of, first the one whose row of the router and order of neurons it has.
        shares: of each, with sum 1.
    """

    members: tuple[int, ...]
    shares: tuple[float, ...] = (1.0,)

    @classmethod
    def by_tokens(cls, members: Sequence[int], tokens: Tensor) -> "Merged":
        """Experts that count by the `tokens` `[experts]` each was given, the most used first; alike, if none was."""
        ordered = sorted(members, key=lambda expert: (-int(tokens[expert]), expert))
        given = [float(tokens[expert]) for expert in ordered]
        total = sum(given)
        return cls(tuple(ordered), tuple(own / total if total else 1 / len(given) for own in given))


def pruned(kept: Sequence[int]) -> list[Merged]:
    """Describe a layer that keeps these experts unchanged, and merges none."""
    return [Merged((expert,)) for expert in sorted(kept)]


def highest(scores: Tensor, fewer: Fewer) -> list[int]:
    """The experts of highest score `[experts]` in each group; of equals the first."""
    return [
        expert
        for group in fewer.ranges
        for expert in sorted(group, key=lambda expert: (-float(scores[expert]), expert))[: fewer.each]
    ]


def clustered(outputs: Tensor, tokens: Tensor, fewer: Fewer) -> list[Merged]:
    """Clusters of experts whose mean outputs `[experts, hidden]` are near, in each group: agglomerative, by the average
    of Euclidean distances between members (HC-SMoE, §3.2)."""
    from scipy.cluster.hierarchy import cut_tree, linkage

    found = []
    for group in fewer.ranges:
        tree = linkage(outputs[group.start : group.stop].double().numpy(), method="average", metric="euclidean")
        labels = cut_tree(tree, n_clusters=[fewer.each])[:, 0].tolist()
        for label in sorted(set(labels)):
            members = [expert for expert, own in zip(group, labels, strict=True) if own == label]
            found.append(Merged.by_tokens(members, tokens))
    return found


def around_dominant(logit_gram: Tensor, tokens: Tensor, fewer: Fewer) -> list[Merged]:
    """The experts of each group that were given most tokens, and the others, each with that one of these whose router
    logits are most like its own, by the cosine over all tokens (M-SMoE, §3.2).

    Args:
        logit_gram: `[experts, experts]`, Σ over tokens of the products of two experts' logits.
        tokens: `[experts]`.
        fewer: how many are left.
    """
    norms = logit_gram.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    cosines = logit_gram / norms / norms[:, None]
    dominant = highest(tokens, fewer)
    members = {expert: [expert] for expert in dominant}
    for group in fewer.ranges:
        near = [expert for expert in dominant if expert in group]
        for expert in group:
            if expert not in members:
                members[max(near, key=lambda other: (float(cosines[expert, other]), -other))].append(expert)
    return [Merged.by_tokens(members[expert], tokens) for expert in sorted(dominant)]
