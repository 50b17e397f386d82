"""Neurons of a dense feed-forward network, each an expert of its own, that one of the network's projections chooses."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.format.kinds.moefied import Lead
from moetool.kernels import neurons
from moetool.runtime.modules.networks import wide
from moetool.runtime.modules.neuron_experts import NeuronExperts

# Chosen neurons of all tokens, in whole networks, up to which it is faster that kernels read each token's own than to
# compute all neurons at once; as measured with scripts/benchmarks/moefied.py.
_FEW, _FEW_IN_16_BITS = {torch.float32: 3.0}, 1.5


class LedNeurons(NeuronExperts):
    """A feed-forward network of which every neuron is an expert, and one of its own projections chooses: the lead.

    The lead is computed for all neurons, and says beforehand what `‖(a − r) W2[:, j]‖²` will be about: its value,
    squared, times `price`. Without a gate, up alone makes the activation, so that the choice is exact.

    Attributes:
        lead: `gate` (activated) or `up`.
        other: what it is multiplied by; `None` without a gate.
        price: `[intermediate]`, the mean square of what the lead is multiplied by, times ‖W2[:, j]‖².
    """

    lead: Lead
    price: Tensor
    kept_wide: ClassVar[tuple[str, ...]] = ("centre", "price")

    @property
    def other(self) -> Lead | None:
        if "gate" not in self.names:
            return None
        return "up" if self.lead == "gate" else "gate"

    @torch.no_grad()
    def scores(self, rows: Tensor) -> Tensor:
        return self._scores(self._led(rows))

    def _led(self, rows: Tensor) -> Tensor:
        """The lead of all neurons, `[tokens, intermediate]`."""
        value = self._projected(rows, self.lead)
        return value if self.other == "gate" else self.act_fn(value)

    def _scores(self, led: Tensor) -> Tensor:
        return led.detach().to(self.price.dtype).square() * self.price

    def _projected(self, rows: Tensor, role: Lead) -> Tensor:
        if self.is_joined:
            return F.linear(rows, *self._neurons(role))
        projected: Tensor = self.linear(role)(rows)
        return projected

    def _activations(self, led: Tensor, other: Tensor | None) -> Tensor:
        """`a`, from the lead and what it is multiplied by, before its activation."""
        if other is None:
            return led
        return led * other if self.lead == "gate" else self.act_fn(other) * led

    def _part(self, rows: Tensor, fetched: bool) -> Tensor:
        led = self._led(rows)
        chosen = self._scores(led).topk(self.kept, dim=-1, sorted=self.on_selection is not None).indices
        if self.on_selection is not None:
            self.on_selection(chosen)
        is_few = len(rows) * self.kept <= _FEW.get(rows.dtype, _FEW_IN_16_BITS) * self.num_experts
        if is_few and not fetched and not torch.is_grad_enabled() and self._has_kernels():
            return self._where_they_lie(rows, led, chosen)
        other = None if self.other is None else self._projected(rows, self.other)
        residual = (self._activations(led, other) - self.subtracted).masked_fill(~self._used(chosen), 0)
        return F.linear(residual, self.linear("down").weight).to(wide(rows))

    def _has_kernels(self) -> bool:
        if not self._can_lie_by_neuron():
            return False
        return neurons.takes(self._by_neuron()) and (self.other is None or neurons.takes(self._neurons(self.other)[0]))

    def _where_they_lie(self, rows: Tensor, led: Tensor, chosen: Tensor) -> Tensor:
        """The neurons of each token, `[tokens, k]`, read where they lie in memory, in that order."""
        chosen, other = self._used(chosen).nonzero()[:, 1].view_as(chosen), None
        if self.other is not None:
            weight, bias = self._neurons(self.other)
            other = neurons.chosen_dots(weight, chosen, rows)
            other = other if bias is None else other + bias[chosen]
        activations = self._activations(led.gather(1, chosen).float(), other)
        return neurons.chosen_sum(self._by_neuron(), chosen, activations - self.centre.float()[chosen])
