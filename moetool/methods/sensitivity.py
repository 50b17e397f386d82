"""What an error in an expert's output costs in loss, from the Fisher information of its weights.

With gradients δ at the outputs, the Fisher information of row j of a matrix sums to `E[δ_j² ‖x‖²]`. Divided by the
energy of the inputs, `E‖x‖²`, that is the mean squared gradient of output channel j: an error e_j in that channel costs
about `E[δ_j²] · e_j²`. Summed over the rows it is the sensitivity of the whole matrix, one number.

Used by channel, it is a second whitening, from the left: the difference is approximated in the norm
`‖D (Δ − UV) X‖_F` with `D² = diag(sensitivities)`, and its squared singular values are losses that can be compared
across matrices. Used by matrix, it only weighs matrices against each other. The published method does neither.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.architectures import ROLES, Role
from moetool.calibration.collectors import LayerStatistics
from moetool.methods.choices import Sensitivity, Share

# An expert's own sensitivities count like this many tokens of the layer's average, so that a handful of tokens
# cannot declare most channels unimportant.
_PRIOR_TOKENS = 32
# No channel counts less than this share of the mean: a channel that was silent on calibration may speak later.
_FLOOR = 1e-3


@dataclass(frozen=True)
class MatrixSensitivity:
    """How errors of one matrix count.

    Attributes:
        row_scale: `[out]` fp32 square roots of the channels' sensitivities, `None` for a plain norm.
        weight: factor from squared singular values to loss.
    """

    row_scale: Tensor | None
    weight: float


class LayerSensitivity:
    """Sensitivities of one layer's matrices."""

    def __init__(self, choice: Sensitivity, statistics: LayerStatistics | None, energy: Tensor) -> None:
        """`energy` is `[3, experts]`: Σ over tokens of the squared norm of each role's input, zeros if not measured."""
        self._choice = choice if statistics is not None and statistics.has_fisher else "none"
        self._statistics, self._energy = statistics, energy

    def of(self, role: Role, expert: int, inputs: int, *, whitened: bool) -> MatrixSensitivity:
        """For one matrix with `inputs` columns.

        A spectrum that is not `whitened` says nothing about the inputs; it is scaled by their mean energy per channel.
        An expert that no token reached counts as if one average token had reached it.
        """
        given = self._energy[ROLES.index(role)]
        own, total = given[expert].item(), given.sum().item()
        if not total:
            return MatrixSensitivity(None, 1.0)
        tokens = float(self._statistics.tokens.sum()) if self._statistics is not None else float((given > 0).sum())
        per_token = total / tokens
        scale = 1.0 if whitened and own else (own or per_token) / inputs
        if self._choice == "none" or self._statistics is None:
            return MatrixSensitivity(None, scale)
        rows = self._statistics.fisher[role].double()
        mean = rows.sum(0) / total
        if not own:
            return MatrixSensitivity(None, scale * mean.sum().item())
        prior = _PRIOR_TOKENS * per_token
        channels = (rows[expert] + prior * mean) / (own + prior)
        if self._choice == "matrix" or not whitened:
            return MatrixSensitivity(None, scale * channels.sum().item())
        channels = channels.clamp(min=_FLOOR * channels.mean().item())
        return MatrixSensitivity(channels.sqrt().float(), 1.0)

    def jointly(self, role: Role, inputs: int, share: Share, *, whitened: bool) -> MatrixSensitivity:
        """For the matrices of all experts at once: below each other (`v`) every one keeps its own channels, side by
        side (`u`) they have the layer's."""
        experts = self._energy.shape[1]
        own = [self.of(role, expert, inputs, whitened=whitened) for expert in range(experts)]
        if not all(entry.row_scale is not None for entry in own):
            given = self._energy[ROLES.index(role)]
            total = given.sum().item()
            if not total:
                return MatrixSensitivity(None, 1.0)
            mean = sum(entry.weight * part for entry, part in zip(own, (given / total).tolist(), strict=True))
            return MatrixSensitivity(None, mean)
        scales = [entry.row_scale for entry in own if entry.row_scale is not None]
        if share == "v":
            return MatrixSensitivity(torch.cat(scales), 1.0)
        return MatrixSensitivity(torch.stack(scales).square().mean(0).sqrt(), 1.0)
