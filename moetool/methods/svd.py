"""Which norm a difference is approximated in (D²-MoE §3.3, and the two it is compared with in Table 6)."""

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.calibration.collectors import GramCollector
from moetool.methods.choices import Svd
from moetool.numerics.factorize import Factorization, factorize
from moetool.numerics.shrinkage import shrink

# ASVD (arXiv:2312.05821) scales input channel j by (mean |x_j|)^α.
_ASVD_ALPHA = 0.5


class LayerSvd:
    """Factorises every difference of one layer in the norm of its own calibration inputs.

    The Gram matrix of a rarely used expert says little about the tokens it will meet; it is shrunk towards the mean of
    the layer. An expert that no token reached has none at all and gets the plain SVD.
    """

    def __init__(self, method: Svd, grams: GramCollector | None) -> None:
        """`grams` as collected on this layer; not needed by `vanilla`."""
        if method != "vanilla" and grams is None:
            raise ValueError(f"{method} SVD needs calibration statistics")
        self._method, self._grams = method, grams
        self._mean_input = self._mean_down = self._sample = None
        if method == "truncation-aware" and grams is not None:
            self._mean_input = _mean_gram(grams.inputs)
            self._mean_down = None if grams.wide_down else _mean_gram(grams.down)
            self._sample = grams.sample() if grams.wide_down else None

    def is_whitened(self, expert: int) -> bool:
        """Whether an expert's spectra account for its inputs."""
        return self._method != "vanilla" and self._grams is not None and self._grams.inputs[expert].count > 0

    def factorize(
        self, role: Role, expert: int, delta: Tensor, row_scale: Tensor | None = None, rank: int | None = None
    ) -> Factorization:
        """The leading `rank` (default: all) directions of Δ `[out, in]` fp32, by what losing them would cost.

        With `row_scale` `[out]` the factorisation is that of `row_scale[:, None] * delta`.
        """
        grams = self._grams
        scale = torch.ones(len(delta), device=delta.device) if row_scale is None else row_scale.to(delta.device)
        scaled = scale[:, None] * delta
        if grams is None or not self.is_whitened(expert):
            return factorize(scaled, rank=rank)
        if self._method == "activation-aware":
            magnitude = grams.magnitude["activation" if role == "down" else "input"][expert]
            channels = (magnitude / grams.inputs[expert].count) ** _ASVD_ALPHA
            return factorize(scaled, gram=torch.diag(channels.square()).to(delta.device), rank=rank)
        own = grams.down[expert] if role == "down" else grams.inputs[expert]
        if self._sample is None or role != "down":
            mean = self._mean_down if role == "down" else self._mean_input
            assert mean is not None
            return factorize(scaled, gram=_shrunk(own.matrix(), own.count, mean, delta.shape[1]), rank=rank)
        lost = (self._sample @ delta.T).double()
        gram = _shrunk(own.matrix(), own.count, lost.T @ lost / len(lost), delta.shape[1])
        both = scale.double()
        return factorize(scaled, output_gram=both[:, None] * gram * both, rank=rank)


def _mean_gram(grams: list) -> Tensor:  # type: ignore[type-arg]
    total = sum(gram.count for gram in grams)
    mean = torch.zeros_like(grams[0].matrix())
    for gram in grams:
        mean += gram.matrix()
    return mean / total


def _shrunk(gram: Tensor, count: int, mean: Tensor, inputs: int) -> Tensor:
    return shrink(gram, count, mean, 0.25 * inputs)
