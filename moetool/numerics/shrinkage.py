"""Shrinkage of the second moments of experts that saw few tokens towards the layer's average.

With T tokens below the input dimension n an expert's own Gram matrix says nothing about most directions, and a
factorization in its norm overfits. The mean over the experts of the layer costs no extra pass and repairs it.
"""

from torch import Tensor


def shrink(gram: Tensor, count: int, mean_gram: Tensor, pseudo_count: float | None = None) -> Tensor:
    """T ((1 - rho) G / T + rho Gbar) with rho = T0 / (T + T0): shrinkage towards the layer (Ledoit & Wolf, 2004).

    The amount depends on the token count alone. Estimating it from the matrices (Ledoit and Wolf's rho) is ruined by
    outlier channels, and a ridge relative to the mean diagonal is as well.

    Args:
        gram: [n, n], sum over this expert's tokens of x x^T, or of (delta x)(delta x)^T in the output form.
        count: T, the tokens behind `gram`.
        mean_gram: [n, n], the average *per token* over the layer: sum of Grams / sum of counts. In the output form
            delta @ (mean input Gram) @ delta^T.
        pseudo_count: T0 in tokens; a quarter of the *input* dimension by default, taken to be n, so give it in the
            output form.

    Returns:
        [n, n], still a sum over T tokens. An expert without tokens has no scale of its own: for T = 0 the result is
        `mean_gram`, as if one token had been seen.

    Raises:
        ValueError: a negative count or pseudo count.
    """
    prior = 0.25 * len(gram) if pseudo_count is None else pseudo_count
    if count < 0 or prior < 0:
        raise ValueError(f"counts cannot be negative: count={count}, pseudo_count={prior}")
    if count == 0:
        return mean_gram.clone()
    rho = prior / (count + prior)
    return (mean_gram * (rho * count)).add_(gram, alpha=1 - rho)
