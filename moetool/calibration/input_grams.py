"""Second moments of what each expert's matrices are given, for quantizing them."""

from functools import partial

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.calibration.peers import Owned, Peers, reduce_grams, summed_grams
from moetool.numerics.gram import Gram
from moetool.numerics.shrinkage import shrink

# Above this the Gram matrices of down, [intermediate, intermediate] per expert, are kept for the layer only.
_EACH_DOWN_BYTES = 2_000_000_000


class InputGramCollector:
    """`Σ x xᵀ` of the inputs of gate and up, and of down, by expert.

    Where the experts are wide, one matrix stands for down in all of them, scaled by how much energy each channel
    carries in each expert.
    """

    def __init__(self, shape: MoEShape, device: torch.device, owned: Owned | None = None) -> None:
        """What an expert was given is gathered for the process that has it."""
        self._owned = owned or Owned(shape, Peers())
        self._inputs = [Gram(shape.hidden, device) for _ in range(shape.experts)]
        self.each_down = shape.experts * 8 * shape.intermediate**2 <= _EACH_DOWN_BYTES
        self._down = [Gram(shape.intermediate, device) for _ in range(shape.experts if self.each_down else 1)]
        self._channels = torch.zeros(shape.experts, shape.intermediate, dtype=torch.float64, device=device)
        self._given: Tensor | None = None  # energy, where matrices are with several processes
        self._totals: dict[str, Tensor] = {}
        self._mean: dict[str, Tensor] = {}

    def observe(
        self, expert: int, windows: Tensor, inputs: Tensor, gate_up: Tensor, activation: Tensor, output: Tensor
    ) -> None:
        self._inputs[expert].add(inputs)
        self._down[expert if self.each_down else 0].add(activation)
        self._channels[expert] += activation.double().square().sum(0)

    def observe_sum(self, activations: Tensor) -> None:
        pass

    def reduce(self, peers: Peers) -> None:
        if peers.size == 1:
            return
        self._given = self._energies()
        peers.all_reduce(self._given)
        peers.all_reduce(self._channels)
        self._totals["up"] = reduce_grams(self._inputs, partial(self._owned.owner, "up"), peers)
        if self.each_down:
            self._totals["down"] = reduce_grams(self._down, partial(self._owned.owner, "down"), peers)
        else:
            peers.all_reduce(self._down[0].matrix())

    def _energies(self) -> Tensor:
        return torch.stack([gram.matrix().diagonal().sum() for gram in self._inputs])

    def energy(self) -> Tensor:
        """`[3, experts]` fp64: Σ over an expert's tokens of the squared norm of each role's input."""
        given = (self._energies() if self._given is None else self._given).cpu()
        return torch.stack([given, given, self._channels.sum(1).cpu()])

    def tokens(self) -> Tensor:
        """`[experts]` int64: how many tokens each expert was given."""
        return torch.tensor([gram.count for gram in self._inputs])

    def gram(self, expert: int, role: Role) -> Tensor:
        """`[in, in]` fp64 for one matrix, shrunk towards the layer's mean where an expert saw few tokens.

        An expert that no token reached gets the layer's mean, as if one token had reached it.
        """
        if role == "down" and not self.each_down:
            return self._scaled_down(expert)
        grams = self._down if role == "down" else self._inputs
        kind = "down" if role == "down" else "up"
        if kind not in self._mean:
            total = self._totals[kind] if self._totals else summed_grams(grams)
            self._mean[kind] = total / max(1, sum(gram.count for gram in grams))
        mean = self._mean[kind]
        own = grams[expert]
        return shrink(own.matrix(), own.count, mean, 0.25 * len(mean))

    def _scaled_down(self, expert: int) -> Tensor:
        whole = self._down[0].matrix()
        total = self._channels.sum(0)
        prior = 0.25 * len(whole)
        count, tokens = self._inputs[expert].count, sum(gram.count for gram in self._inputs)
        mean = total / max(1, tokens)
        own = (self._channels[expert] + prior * mean) / (count + prior)
        scale = (own / mean.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        return whole * (scale[:, None] * scale) * (max(count, 1) / max(1, tokens))
