"""Next tokens drawn from a model's own predictions.

What a small change of weights does to the KL divergence from the model as it was is told by the Fisher information, an
expectation over labels that the model itself would give (Kunstner et al., arXiv:1905.12558). With the true next tokens
a text counts for more the less of it the model foresees, whatever the model's predictions do there.
"""

import torch
from torch import Tensor

_AT_ONCE = 1 << 22  # chances that are added up together


def drawn_labels(logarithms: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each prediction, by the `logarithms` of all tokens' chances `[tokens, vocabulary]` fp32: int64
    `[tokens]`.

    A number from 0 to 1 for each prediction is drawn on the CPU, so that any device gives the same tokens but where a
    number falls between two of them to the last digits.
    """
    numbers = torch.rand(len(logarithms), 1, generator=generator).to(logarithms.device)
    rows = max(1, _AT_ONCE // logarithms.shape[1])
    found = torch.empty(len(logarithms), dtype=torch.int64, device=logarithms.device)
    for own, part, number in zip(found.split(rows), logarithms.split(rows), numbers.split(rows), strict=True):
        chances = part.exp().cumsum(-1)
        total = chances[:, -1:].clone()
        # Rounding may bring a number up to the total, which no token lies beyond.
        below = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
        own.copy_(torch.searchsorted(chances, below, right=True)[:, 0])
    return found
