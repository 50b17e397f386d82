"""Constraint on the number of open gates under which SIMoE trains its masks (Chen et al., 2025, Eq. 3 and 11 to 13)."""

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from moetool.numerics.hard_concrete import EDGE, median_gate
from moetool.runtime.modules.simoe import closed_share, open_share, overlap_penalty, sites
from moetool.runtime.modules.simoe_mixing import interpolation_of

# From where log φ starts to where the median gate is zero: the way that a mask element has to go to close.
WAY = 2.9444


class MaskConstraint(TrainerCallback):
    """`λ (τ − expected share of zeros) + weight · overlap`, with λ raised after every step in which the masks' medians
    have fewer zeros than τ, and set back to 0 as soon as they have enough. Then masks also lose their momentum, which
    would close most of the others, and what a step closes beyond τ is put back onto the edge, where it weighs next to
    nothing but learns: a closed gate has no gradient of the task and would never open again."""

    def __init__(self, model: nn.Module, target: float, rate: float, overlap: float) -> None:
        """`rate` is λ's, per step and missing share of zeros; `overlap` weighs what experts have in common."""
        self._model, self.target, self._rate, self._overlap = model, target, rate, overlap
        interpolation = interpolation_of(model)
        assert interpolation is not None
        self._interpolation = interpolation

    def loss(self) -> Tensor:
        """Penalty to add to a step's loss: Lagrangian term for too many open gates, and a term for masks that
        overlap."""
        missing = self.target - 1 + open_share(self._model)
        return self._interpolation.multiplier[0] * missing + self._overlap * overlap_penalty(self._model)

    def on_step_end(
        self, args: object, state: object, control: object, optimizer: Optimizer | None = None, **_: object
    ) -> None:
        multiplier, missing = self._interpolation.multiplier, project(self._model, self.target)
        if missing == 0:
            if multiplier > 0 and optimizer is not None:
                self._stop_masks(optimizer)
            multiplier.zero_()
        else:
            multiplier += self._rate * missing

    def _stop_masks(self, optimizer: Optimizer) -> None:
        for site in sites(self._model).values():
            if "exp_avg" in (moments := optimizer.state[site.log_phi]):
                moments["exp_avg"].zero_()

    def logs(self) -> dict[str, float]:
        """The entries for the log: the share of closed masks and the multiplier λ."""
        return {"mask_sparsity": closed_share(self._model), "multiplier": self._interpolation.multiplier.item()}


@torch.no_grad()
def project(model: nn.Module, target: float) -> float:
    """Leave no more than `⌈target · N⌉` of all N gates closed, by the shortest way: those nearest to the edge are put
    onto it. Returns the share of N that is still to close."""
    masks = [site.log_phi for site in sites(model).values()]
    every = torch.cat([mask.flatten() for mask in masks])
    closed = (median_gate(every) == 0).nonzero().flatten()
    missing = math.ceil(target * len(every)) - len(closed)
    if missing < 0:
        every[closed[every[closed].topk(-missing).indices]] = EDGE
        for mask, part in zip(masks, every.split([mask.numel() for mask in masks]), strict=True):
            mask.copy_(part.view_as(mask))
    return max(0, missing) / len(every)


@torch.no_grad()
def all_closed(model: nn.Module) -> bool:
    """Whether training has closed every gate of every mask, so that all experts are the dense model."""
    return all(bool((site.log_phi <= EDGE).all()) for site in sites(model).values())


def parameter_groups(model: nn.Module, mask_rate: float, weight_decay: float) -> list[dict[str, object]]:
    """Trained parameters for an optimizer: masks at a rate of their own, since they have a way to go."""
    masks = {id(site.log_phi) for site in sites(model).values()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in masks], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in masks], "lr": mask_rate, "weight_decay": 0.0},
    ]
