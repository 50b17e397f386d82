"""The small network that tells beforehand which experts of a moefied FFN matter for a token (G-MoEfication, §3.2.3).

`score = W₂ tanh(W₁ x/‖x‖)`, trained to predict what each expert really contributes: `Σ (a − r)²` over its neurons, on
true activations. (The authors' code takes them from normalised inputs without the bias, which are others.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.numerics.seeding import generator

BATCH, RATE = 512, 1e-2


@dataclass(frozen=True)
class TrainedSelector:
    """A trained selector, and how well it does on tokens that it was not trained on.

    Attributes:
        first, second: `[experts, hidden]` and `[experts, experts]` fp32.
        captured: the share of all scores that its choice captures.
        best: the share that the best choice captures.
        accuracy: the share of its choice that is in the best choice.
    """

    first: Tensor
    second: Tensor
    captured: float
    best: float
    accuracy: float

    def left_out(self, inputs: Tensor, chosen: int) -> Tensor:
        """Mark the experts that tokens `[tokens, hidden]` do without: `[tokens, experts]` bool, false for the `chosen`
        highest scores."""
        predicted = (F.normalize(inputs.float(), dim=-1) @ self.first.T).tanh() @ self.second.T
        index = predicted.topk(chosen, dim=-1).indices
        return torch.ones_like(predicted, dtype=torch.bool).scatter_(1, index, False)


def needed_tokens(experts: int) -> int:
    """Least number of tokens to train a selector of so many experts on."""
    return 64 * experts


def expert_scores(activations: Tensor, centre: Tensor, experts: int) -> Tensor:
    """`Σ (a − r)²` over each expert's neurons: `[tokens, experts]` from `[tokens, intermediate]`, `[intermediate]`."""
    return (activations - centre).square().unflatten(-1, (experts, -1)).sum(-1)


def side_by_side(scores: Tensor, chosen: int) -> Tensor:
    """An order `[experts]` int64 in which experts that are chosen together are neighbours, by how much their choices
    correlate (average linkage): a token's experts are then fewer runs of weights.

    `scores` are `[tokens, experts]`, of which the `chosen` highest count.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    experts = scores.shape[1]
    is_chosen = torch.zeros(scores.shape, dtype=torch.float64).scatter_(1, scores.topk(chosen).indices.cpu(), 1)
    spread = is_chosen.std(0)
    if experts < 3 or bool((spread == 0).any()):
        return torch.arange(experts)
    distances = (1 - torch.corrcoef(is_chosen.T)).clamp_min(0).fill_diagonal_(0)
    tree = linkage(squareform(((distances + distances.T) / 2).numpy()), method="average", optimal_ordering=True)
    return torch.from_numpy(leaves_list(tree).astype("int64"))


def train_selector(
    inputs: Tensor,
    scores: Tensor,
    rows: Tensor,
    chosen: int,
    *,
    seed: int,
    layer: int,
    epochs: int,
    as_published: bool = False,
) -> TrainedSelector:
    """Fit a selector by binary cross-entropy to scores s / (s + m), m the least of those that are to be chosen (Adam,
    batches of 512), and keep the epoch that captures most on a held-out tenth.

    The choice is decided around m, which is far below the largest score; tokens that need no expert teach nothing.

    Args:
        inputs: `[tokens, hidden]`, what the FFN is given.
        scores: `[tokens, experts]`, what it should predict.
        rows: `[experts, hidden]`, where the first layer starts: the mean weights of each expert.
        chosen: experts per token, which a choice is judged by.
        seed: of the order of tokens.
        layer: of the model, part of the seed.
        epochs: over the training part.
        as_published: learn scores over their largest.
    """
    stream = generator(seed, "selector", layer)
    order = torch.randperm(len(inputs), generator=stream)
    held = max(1, len(inputs) // 10)
    directions = F.normalize(inputs.float(), dim=-1)
    test, train = order[:held], order[held:]
    first = rows.detach().float().clone().requires_grad_(True)
    second = torch.eye(len(rows), device=rows.device).requires_grad_(True)
    optimizer = torch.optim.Adam([first, second], lr=RATE)

    def predicted(index: Tensor) -> Tensor:
        return (directions[index] @ first.T).tanh() @ second.T

    def judged() -> tuple[float, float, float]:
        with torch.no_grad():
            return _judge(predicted(test), scores[test], chosen)

    largest = scores.amax(1, keepdim=True)
    whole = largest if as_published else scores + scores.topk(chosen).values[:, -1:]
    targets, teaches = scores / whole.clamp_min(1e-30), (largest > 0).float()
    kept, kept_result = (first.detach().clone(), second.detach().clone()), judged()
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train), generator=stream)].split(BATCH):
            loss = F.binary_cross_entropy_with_logits(predicted(batch), targets[batch], weight=teaches[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if (result := judged())[0] > kept_result[0]:
            kept, kept_result = (first.detach().clone(), second.detach().clone()), result
    return TrainedSelector(*kept, *kept_result)


def _judge(predicted: Tensor, scores: Tensor, chosen: int) -> tuple[float, float, float]:
    """Shares of the scores `[tokens, experts]` that are captured by the prediction and by the best choice, and how much
    the two choices have in common."""
    own, best = predicted.topk(chosen, dim=-1).indices, scores.topk(chosen, dim=-1).indices
    is_best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    return (
        captured_share(scores.gather(1, own), scores),
        captured_share(scores.gather(1, best), scores),
        is_best.gather(1, own).float().mean().item(),
    )


def captured_share(chosen: Tensor, scores: Tensor) -> float:
    """Share of all scores that the chosen experts hold; 1 if all scores are zero."""
    total = scores.double().sum().item()
    return chosen.double().sum().item() / total if total else 1.0
