"""Neurons that one of their network's own projections chooses: which one, and what its values are worth.

An activation is a product, of the activated gate and of up. Either is known for all neurons at a third of the cost, and
tells much of how large the product will be; which of the two tells more differs by layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from moetool.format.kinds.moefied import Lead
from moetool.moefy.statistics import SampledNetwork

_OTHERS: Mapping[Lead, Lead] = MappingProxyType({"gate": "up", "up": "gate"})


@dataclass(frozen=True)
class Leading:
    """How one projection chooses, and how well, on a sample of the text.

    Attributes:
        lead: the projection.
        price: `[intermediate]` fp32; its value squared, times this, is a neuron's score.
        centre: `[intermediate]` fp64, mean activations over the tokens that leave a neuron out; where none does, zero.
        captured: share of the energy `Σ a² ‖w‖²` that the choice holds, mean over tokens.
        best: the share that the best choice of as many neurons holds.
        accuracy: the share of the choice that is in the best one.
    """

    lead: Lead
    price: Tensor
    centre: Tensor
    captured: float
    best: float
    accuracy: float


def leading_projection(network: SampledNetwork, chosen: int) -> Leading:
    """The projection by whose choice of so many neurons a network keeps most of what it writes into the output."""
    norms = network.output_norms().double().square()
    squares = dict[Lead, Tensor]()
    for factors in network.factors():
        for lead, value in factors.items():
            squares[lead] = squares.get(lead, 0) + value.double().square().sum(0)
    prices = dict.fromkeys(squares, norms)  # without a gate, of the activation itself
    if len(squares) == 2:
        prices = {lead: norms * squares[other] / len(network.inputs) for lead, other in _OTHERS.items()}
    choices = [_Choice(lead, price, chosen) for lead, price in prices.items()]
    for factors in network.factors():
        activations = torch.stack([*factors.values()]).double().prod(0)
        energy = activations.square() * norms
        best = energy.topk(chosen, dim=-1, sorted=False).indices
        for choice in choices:
            choice.see(factors[choice.lead], activations, energy, best)
    return max((choice.found(len(network.inputs)) for choice in choices), key=lambda found: found.captured)


class _Choice:
    """What the choice by one projection holds, token after token."""

    def __init__(self, lead: Lead, price: Tensor, chosen: int) -> None:
        self.lead, self._price, self._chosen = lead, price.float(), chosen
        self._left = torch.zeros_like(price)
        self._times = torch.zeros_like(price)
        self._captured = self._best = self._common = 0.0

    def see(self, value: Tensor, activations: Tensor, energy: Tensor, best: Tensor) -> None:
        """The projection's values `[tokens, intermediate]`, the activations and their energies, and the neurons
        `[tokens, chosen]` whose energies are largest."""
        whole = energy.sum(1).clamp_min(torch.finfo(energy.dtype).tiny)
        index = (value.float().square() * self._price).topk(self._chosen, dim=-1, sorted=False).indices
        self._captured += (energy.gather(1, index).sum(1) / whole).sum().item()
        self._best += (energy.gather(1, best).sum(1) / whole).sum().item()
        is_left_out = torch.ones_like(energy, dtype=torch.bool).scatter_(1, index, False)
        self._common += (~is_left_out.gather(1, best)).sum().item() / self._chosen
        self._left += activations.masked_fill(~is_left_out, 0).sum(0)
        self._times += is_left_out.sum(0)

    def found(self, tokens: int) -> Leading:
        centre = self._left / self._times.clamp_min(1)
        shares = (round(total / tokens, 6) for total in (self._captured, self._best, self._common))
        return Leading(self.lead, self._price, centre, *shares)
