"""The loss that errors in an expert's outputs cause, from the Fisher information of its weights.

With gradients δ at the outputs, the Fisher information of row j of a matrix sums to `E[δ_j² ‖x‖²]`. Divided by the
energy of the inputs, `E‖x‖²`, that is the mean squared gradient of output channel j: an error e_j in that channel costs
about `E[δ_j²] · e_j²`. Its mean over the rows is the sensitivity of the whole matrix, one number: what the same error
costs where it is spread over all channels alike.

Used by channel, it is a second whitening, from the left: the delta is approximated in the norm
`‖D (Δ − UV) X‖_F` with `D² = diag(sensitivities)`, and its squared singular values are losses that can be compared
across matrices. Used by matrix, it only weighs matrices against each other. The published method does neither.

Whatever the norm, `weight` times a squared singular value is the loss on all tokens that an expert was given:

| inputs behind the spectrum | squared output per unit of the spectrum | times, by channel / by matrix / not at all |
|---|---|---|
| the expert's own (`whitened`) | 1 | D² in the spectrum / mean of D² / 1 |
| none: every input counts the same | energy of the inputs / number of inputs | the same |
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moetool.architectures import ROLES, Role
from moetool.calibration.collectors import LayerStatistics
from moetool.compress.factors.svd import SharedFactor

Sensitivity = Literal["channel", "matrix", "none"]

# An expert's own sensitivities count like this many tokens of the layer's average, so that a handful of tokens
# cannot declare most channels unimportant.
_PRIOR_TOKENS = 32
# No channel counts less than this share of the mean: a channel that was silent on calibration may speak later.
_FLOOR = 1e-3


@dataclass(frozen=True)
class MatrixSensitivity:
    """Weights that turn errors of one matrix into loss.

    Attributes:
        row_scale: `[out]` fp32 square roots of the channels' sensitivities, `None` for a plain norm.
        weight: factor from squared singular values to loss.
    """

    row_scale: Tensor | None
    weight: float


class LayerSensitivity:
    """Sensitivities of one layer's matrices. An expert that no token reached counts as if one average token had."""

    def __init__(self, choice: Sensitivity, statistics: LayerStatistics | None, energy: Tensor, tokens: Tensor) -> None:
        """Take what was measured on the layer.

        Args:
            choice: which errors are told apart; without gradients none are.
            statistics: with the Fisher information, `None` if nothing was measured.
            energy: `[3, experts]`, Σ over an expert's tokens of the squared norm of each role's input; zeros if not
                measured.
            tokens: `[experts]`, how many there were behind `energy`.
        """
        self._fisher = statistics.fisher if statistics is not None and statistics.has_fisher else None
        self._choice: Sensitivity = choice if self._fisher is not None else "none"
        self._energy, self._tokens = energy.double(), int(tokens.sum())

    def of(self, role: Role, expert: int, inputs: int, *, whitened: bool) -> MatrixSensitivity:
        """The sensitivity of one matrix with `inputs` columns, whose spectrum is that on its own inputs (`whitened`) or
        that of the plain matrix."""
        given = self._given(role)
        if given is None:
            return MatrixSensitivity(None, 1.0)
        weight = 1.0 if whitened else given[expert].item() / inputs
        if self._choice == "none":
            return MatrixSensitivity(None, weight)
        channels = self._channels(role)[expert]
        if self._choice == "matrix" or not bool(channels.any()):
            return MatrixSensitivity(None, weight * channels.mean().item())
        return MatrixSensitivity(_scale(channels), weight)

    def jointly(self, role: Role, inputs: int, share: SharedFactor, *, whitened: bool) -> MatrixSensitivity:
        """The sensitivity of the matrices of all experts of a role, put together: below each other (`v`) each keeps its
        own channels, side by side (`u`) all have the layer's."""
        given = self._given(role)
        if given is None:
            return MatrixSensitivity(None, 1.0)
        weight = 1.0 if whitened else given.mean().item() / inputs
        if self._choice == "none":
            return MatrixSensitivity(None, weight)
        channels = self._channels(role)
        together = (given / given.sum()) @ channels
        if self._choice == "matrix" or not bool(together.any()):
            return MatrixSensitivity(None, weight * together.mean().item())
        if share == "v":
            return MatrixSensitivity(torch.cat([_scale(own) for own in channels]), weight)
        return MatrixSensitivity(_scale(together), weight)

    def _given(self, role: Role) -> Tensor | None:
        """The energy of each expert's inputs, `[experts]` fp64, that of an average token where no token came; `None` if
        it was not measured."""
        own = self._energy[ROLES.index(role)]
        total = own.sum()
        return torch.where(own > 0, own, total / self._tokens) if bool(total > 0) else None

    def _channels(self, role: Role) -> Tensor:
        """The mean squared gradient of every output, with a prior of 32 average tokens, `[experts, out]` fp64."""
        assert self._fisher is not None
        own, rows = self._energy[ROLES.index(role)], self._fisher[role].double()
        prior = _PRIOR_TOKENS * own.sum() / self._tokens
        return (rows + prior * rows.sum(0) / own.sum()) / (own + prior)[:, None]


def _scale(channels: Tensor) -> Tensor:
    """The square roots of channels' sensitivities, with a floor of a thousandth of their mean, fp32."""
    return channels.clamp(min=_FLOOR * channels.mean().item()).sqrt().float()
