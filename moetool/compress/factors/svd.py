"""Which norm a delta is approximated in (D²-MoE §3.3, and the two it is compared with in Table 6)."""

import torch
from torch import Tensor

from moetool.architectures import ROLES, Role
from moetool.calibration.collectors import GramCollector
from moetool.compress.choices import SharedFactor, Svd
from moetool.numerics.congruence import congruence
from moetool.numerics.factorize import Factorization, as_left, factorize
from moetool.numerics.shrinkage import shrink

# ASVD (arXiv:2312.05821) scales input channel j by (mean |x_j|)^α.
_ASVD_ALPHA = 0.5


class LayerSvd:
    """Factorises every delta of one layer in the norm of its own calibration inputs.

    The Gram matrix of a rarely used expert says little about the tokens it will meet; it is shrunk towards the mean of
    the layer. An expert that no token reached has none at all; it gets the layer's mean, as if it had been given one
    average token. Spectra are squared output, summed over the tokens of an expert, so that they can be compared; only
    those of `vanilla`, which does not look at inputs, are not.
    """

    def __init__(self, method: Svd, grams: GramCollector | None) -> None:
        """`grams` as collected on this layer; not needed by `vanilla`."""
        if method != "vanilla" and grams is None:
            raise ValueError(f"{method} SVD needs calibration statistics")
        self._method, self._grams = method, grams
        self._mean_input = self._mean_down = self._sample = None
        if method == "truncation-aware" and grams is not None:
            tokens = grams.tokens().sum()
            self._mean_input = grams.total("up") / tokens
            self._mean_down = None if grams.wide_down else grams.total("down") / tokens
            self._sample = grams.sample() if grams.wide_down else None

    @property
    def is_whitened(self) -> bool:
        """Whether spectra account for inputs."""
        return self._method != "vanilla" and self._grams is not None

    def factorize(
        self, role: Role, expert: int, delta: Tensor, row_scale: Tensor | None = None, rank: int | None = None
    ) -> Factorization:
        """The leading `rank` (default: all) directions of Δ `[out, in]` fp32, by what losing them would cost.

        With `row_scale` `[out]` the factorisation is that of `row_scale[:, None] * delta`.
        """
        grams = self._grams
        scale = torch.ones(len(delta), device=delta.device) if row_scale is None else row_scale.to(delta.device)
        scaled = scale[:, None] * delta
        if grams is None or self._method == "vanilla":
            return factorize(scaled, rank=rank)
        if self._method == "activation-aware":
            return factorize(scaled, gram=torch.diag(self._channel_energy(role, expert)).to(delta.device), rank=rank)
        own = grams.down[expert] if role == "down" else grams.inputs[expert]
        if self._sample is None or role != "down":
            mean = self._mean_down if role == "down" else self._mean_input
            assert mean is not None
            return factorize(scaled, gram=_shrunk(own.matrix(), own.count, mean, delta.shape[1]), rank=rank)
        lost = (self._sample @ delta.T).double()
        gram = _shrunk(own.matrix(), own.count, lost.T @ lost / len(lost), delta.shape[1])
        both = scale.double()
        return factorize(scaled, output_gram=both[:, None] * gram * both, rank=rank)

    def _channel_energy(self, role: Role, expert: int) -> Tensor:
        """`[in]`: the energy of an expert's inputs, shared out among the channels by ASVD's scales."""
        assert self._grams is not None
        magnitudes, tokens = self._grams.magnitude["activation" if role == "down" else "input"], self._grams.tokens()
        energies = self._grams.energy[ROLES.index(role)]
        if tokens[expert]:
            magnitude, energy = magnitudes[expert], energies[expert]
        else:
            magnitude, energy = magnitudes.sum(0), energies.sum() / tokens.sum()
        squares = magnitude ** (2 * _ASVD_ALPHA)
        return energy * squares / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)

    def factorize_jointly(
        self,
        role: Role,
        deltas: list[Tensor],
        share: SharedFactor,
        row_scales: list[Tensor | None],
        rank: int | None = None,
    ) -> Factorization:
        """The leading directions that all deltas of a role have in common (Appendix A.6).

        `v`: of the deltas one below the other `[experts · out, in]`, on the summed Gram of the inputs (for a wide
        down, on the sample of all activations). `u`: of the deltas side by side `[out, experts · in]`, on the sum
        of what each would lose on its own inputs; from the left, whichever side is longer, as a sum over outputs is.
        With row scales the factorisation is that of the scaled deltas.
        """
        ones = torch.ones(len(deltas[0]), device=deltas[0].device)
        scales = [ones if scale is None else scale.to(ones.device) for scale in row_scales]
        scaled = [scale[:, None] * delta for scale, delta in zip(scales, deltas, strict=True)]
        grams = self._grams
        if share == "v":
            stacked = torch.cat(scaled)
            if grams is None or self._method == "vanilla":
                return factorize(stacked, rank=rank)
            if role == "down" and self._sample is not None:
                sample = self._sample.double()
                each = sum(gram.count for gram in grams.down) / len(sample)  # of the tokens that it stands for
                return factorize(stacked, gram=sample.T @ sample * each, rank=rank)
            return factorize(stacked, gram=grams.total(role), rank=rank)
        if grams is None or self._method == "vanilla":
            beside = torch.cat(scaled, dim=1)
            return as_left(beside, factorize(beside, rank=rank))
        lost = torch.zeros(len(ones), len(ones), dtype=torch.float64, device=ones.device)
        for expert, (delta, scale) in enumerate(zip(scaled, scales, strict=True)):
            if role == "down" and self._sample is not None:
                lost += scale.double()[:, None] * grams.down[expert].matrix() * scale.double()
            else:
                own_gram = (grams.down if role == "down" else grams.inputs)[expert].matrix()
                lost += congruence(delta.double(), own_gram)
        return factorize(torch.cat(scaled, dim=1), output_gram=lost, rank=rank)


def _shrunk(gram: Tensor, count: int, mean: Tensor, inputs: int) -> Tensor:
    return shrink(gram, count, mean, 0.25 * inputs)
