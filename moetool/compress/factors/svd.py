"""The norms in which deltas are approximated: that of D²-MoE §3.3, and the two of Table 6."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moetool.architectures import ROLES, Role
from moetool.calibration.collectors import GramCollector
from moetool.numerics.congruence import congruence, inner_products
from moetool.numerics.factorize import Factorization, factorize, spectrum
from moetool.numerics.output_norm import OutputNorm
from moetool.numerics.precision import bf16_products, has_fast_bf16
from moetool.numerics.root import square_root
from moetool.numerics.shrinkage import shrink

Svd = Literal["truncation-aware", "vanilla", "activation-aware"]
SharedFactor = Literal["none", "v", "u"]

# ASVD (arXiv:2312.05821) scales input channel j by (mean |x_j|)^α.
_ASVD_ALPHA = 0.5


@dataclass(frozen=True, eq=False)
class Whitened:
    """A matrix to be factorized, with the norm in which that is done.

    Attributes:
        delta: `[out, in]`, in the norm of its outputs.
        gram: the Gram matrix of the inputs `[in, in]`, if they count.
        output_gram: the Gram matrix of the delta's outputs `[out, out]`, instead of that of the inputs.
        root: a square root of `gram`, if one is known.
    """

    delta: Tensor
    gram: Tensor | None = None
    output_gram: Tensor | None = None
    root: Tensor | None = None

    def factorize(self, rank: int | None = None, *, coarse: bool = False) -> Factorization:
        """The factors of the best approximation of this `rank`; see `numerics.factorize.factorize`."""
        return factorize(
            self.delta, gram=self.gram, output_gram=self.output_gram, rank=rank, root=self.root, coarse=coarse
        )

    def spectrum(self) -> tuple[Tensor, float]:
        """The squared singular values and their sum; see `numerics.factorize.spectrum`."""
        return spectrum(self.delta, gram=self.gram, output_gram=self.output_gram, root=self.root)


class LayerSvd:
    """The factorizations of one layer's deltas, each in the norm of its own calibration inputs.

    The Gram matrix of a rarely used expert says little about the tokens it will meet; it is shrunk towards the mean of
    the layer. An expert that no token reached has none at all; it gets the layer's mean, as if it had been given one
    average token. Spectra are squared output, summed over the tokens of an expert, so that they can be compared; only
    those of `vanilla`, which does not look at inputs, are not.
    """

    def __init__(self, method: Svd, grams: GramCollector | None) -> None:
        """Take the Gram matrices that were collected on this layer; `vanilla` needs none."""
        if method != "vanilla" and grams is None:
            raise ValueError(f"{method} SVD needs calibration statistics")
        self._method, self._grams = method, grams
        self._mean_input = self._mean_down = self._sample = None
        self._last: tuple[tuple[int, bool], Tensor, Tensor | None] | None = None  # Gram matrix and root of these inputs
        if method == "truncation-aware" and grams is not None:
            self._mean_input = grams.inputs.mean()
            self._mean_down = None if grams.wide_down else grams.down.mean()
            self._sample = grams.sample() if grams.wide_down else None

    @property
    def is_whitened(self) -> bool:
        """Whether spectra are squared outputs on the calibration inputs."""
        return self._method != "vanilla" and self._grams is not None

    def whitened(self, role: Role, expert: int, delta: Tensor, outputs: OutputNorm | None = None) -> Whitened:
        """One expert's delta `[out, in]` fp32, with the norm in which it is to be factorized.

        With a norm of its `outputs`, the matrix is `outputs.times(delta)`.
        """
        grams = self._grams
        scaled = delta if outputs is None else outputs.times(delta)
        if grams is None or self._method == "vanilla":
            return Whitened(scaled)
        if self._method == "activation-aware":
            return Whitened(scaled, torch.diag(self._channel_energy(role, expert)).to(delta.device))
        if self._sample is None or role != "down":
            gram, root = self._inputs(role, expert, wide=delta.shape[0] > delta.shape[1])
            return Whitened(scaled, gram, root=root)
        gram = self._outputs(expert, delta)
        if outputs is not None:
            gram = outputs.times(outputs.times(gram).T)
        return Whitened(scaled, output_gram=gram)

    def _inputs(self, role: Role, expert: int, *, wide: bool) -> tuple[Tensor, Tensor | None]:
        """The Gram matrix of an expert's inputs `[in, in]` fp64, and its square root if the matrix is `wide`, with more
        outputs than inputs. The last pair is kept, since gate and up have the same inputs."""
        key = expert, role == "down"
        if self._last is None or self._last[0] != key:
            assert self._grams is not None
            own = (self._grams.down if role == "down" else self._grams.inputs)[expert]
            mean = self._mean_down if role == "down" else self._mean_input
            assert mean is not None
            gram = shrink(own.matrix(), own.count, mean)
            self._last = key, gram, square_root(gram) if wide else None
        return self._last[1:]

    def _outputs(self, expert: int, delta: Tensor) -> Tensor:
        """The Gram matrix of the outputs of down's delta, `[out, out]` fp64, shrunk towards that on a sample of all
        experts' activations.

        The sample makes up for what few tokens do not say; what its rounding to bf16 does to that is less than what
        other samples would.
        """
        assert self._grams is not None
        assert self._sample is not None
        own = self._grams.down[expert]
        with bf16_products() if delta.device.type == "cpu" and has_fast_bf16() else nullcontext():
            lost = self._sample @ delta.T
            mean = inner_products(lost.T, lost.T).double() / len(lost)
        return shrink(own.matrix(), own.count, mean, 0.25 * delta.shape[1])

    def _channel_energy(self, role: Role, expert: int) -> Tensor:
        """The energy of an expert's inputs, shared out among the channels by ASVD's scales: `[in]` fp64."""
        assert self._grams is not None
        magnitudes, tokens = self._grams.magnitude["activation" if role == "down" else "input"], self._grams.tokens()
        energies = self._grams.energy[ROLES.index(role)]
        if tokens[expert]:
            magnitude, energy = magnitudes[expert], energies[expert]
        else:
            magnitude, energy = magnitudes.sum(0), energies.sum() / tokens.sum()
        squares = magnitude ** (2 * _ASVD_ALPHA)
        return energy * squares / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)

    def whitened_jointly(
        self, role: Role, deltas: list[Tensor], share: SharedFactor, norms: list[OutputNorm | None]
    ) -> Whitened:
        """The deltas of a role in one matrix, whose leading directions they have in common (Appendix A.6).

        `v`: of the deltas one below the other `[experts · out, in]`, on the summed Gram of the inputs (for a wide
        down, on the sample of all activations). `u`: of the deltas side by side `[out, experts · in]`, on the sum
        of what each would lose on its own inputs.
        With `norms` of outputs the factorisation is that of the deltas in these.
        """
        pairs = list(zip(norms, deltas, strict=True))
        scaled = [delta if norm is None else norm.times(delta) for norm, delta in pairs]
        grams = self._grams
        if share == "v":
            stacked = torch.cat(scaled)
            if grams is None or self._method == "vanilla":
                return Whitened(stacked)
            if role == "down" and self._sample is not None:
                sample = self._sample.double()
                each = int(grams.inputs.counts.sum()) / len(sample)  # of the tokens that it stands for
                return Whitened(stacked, sample.T @ sample * each)
            own = grams.down if role == "down" else grams.inputs
            return Whitened(stacked, own.total())
        if grams is None or self._method == "vanilla":
            return Whitened(torch.cat(scaled, dim=1))
        rows = len(deltas[0])
        lost = torch.zeros(rows, rows, dtype=torch.float64, device=deltas[0].device)
        for expert, (delta, norm) in enumerate(zip(scaled, norms, strict=True)):
            gram = (grams.down if role == "down" else grams.inputs)[expert].matrix()
            if role != "down" or self._sample is None:
                lost += congruence(delta.double(), gram)
            else:
                lost += gram if norm is None else norm.times(norm.times(gram).T)
        return Whitened(torch.cat(scaled, dim=1), output_gram=lost)
