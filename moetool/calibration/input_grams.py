"""Second moments of what each expert's matrices are given, for quantizing them."""

from functools import partial

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.calibration.expert_grams import GramsInSets, HalvedExpertGrams
from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.peers import Owned, Peers
from moetool.calibration.slopes import SlopeSamples
from moetool.numerics.gram import Gram
from moetool.numerics.halved_gram import in_second_half
from moetool.numerics.shrinkage import shrink

# Error feedback damps by a hundredth of an input's energy, and low-rank factors of deltas are quantized.
GRAM_DTYPE = torch.float32
# Above this the Gram matrices of down, [intermediate, intermediate] per expert, are kept for the layer only.
_EACH_DOWN_BYTES = 2_000_000_000


def keeps_each_down(shape: MoEShape) -> bool:
    """Whether down has a Gram matrix for each expert, and not one that stands for all of them."""
    return shape.experts * GRAM_DTYPE.itemsize * shape.intermediate**2 <= _EACH_DOWN_BYTES


class InputGramCollector(GramsInSets):
    """`Σ x xᵀ` of the inputs of gate and up, and of down, by expert, in fp32, each shrunk as far as two halves of the
    text disagree on it (`numerics.halved_gram`).

    Where the experts are wide, one matrix stands for down in all of them, scaled by how much energy each channel
    carries in each expert.
    """

    def __init__(
        self,
        shape: MoEShape,
        device: torch.device,
        owned: Owned | None = None,
        at_once: int | None = None,
        *,
        slopes: SlopeSamples | None = None,
        first: int = 0,
    ) -> None:
        """`first` is the number of windows that other processes run before those of this one."""
        self.inputs: HalvedExpertGrams
        inputs = HalvedExpertGrams(shape.experts, shape.hidden, device, at_once)
        super().__init__(shape, inputs, owned, at_once, slopes)
        width, self.each_down, self._first = shape.intermediate, keeps_each_down(shape), first
        self._down = HalvedExpertGrams(shape.experts, width, device, at_once) if self.each_down else None
        self._whole_down = None if self.each_down else Gram(width, device, GRAM_DTYPE)
        self._energy = torch.zeros(shape.experts, dtype=torch.float64, device=device)
        self._channels = torch.zeros(shape.experts, shape.intermediate, dtype=torch.float64, device=device)
        self._mean: dict[str, Tensor] = {}

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        super().observe(expert, windows, inputs, work)
        inputs, activation = inputs.detach(), work.activation.detach()
        is_second = in_second_half(self._first + windows).to(inputs.device)
        self.inputs.add(expert, inputs, is_second)
        if self._down is not None:
            self._down.add(expert, activation, is_second)
        if not self.is_first:
            return
        self._energy[expert] += inputs.double().square().sum()
        self._channels[expert] += activation.double().square().sum(0)
        if self._down is not None:
            self._down.add_to_all(activation)
        elif self._whole_down is not None:
            self._whole_down.add(activation)

    def hold(self, experts: range) -> None:
        super().hold(experts)
        if self._down is not None:
            self._down.hold(experts)

    def reduce(self, peers: Peers) -> None:
        super().reduce(peers)
        if peers.size == 1:
            return
        for sums in (self._energy, self._channels):
            peers.all_reduce(sums)
        if self._down is not None:
            self._down.reduce(partial(self._owned.owner, "down"), peers)
        if self._whole_down is not None:
            peers.all_reduce(self._whole_down.matrix())

    def energy(self) -> Tensor:
        """`[3, experts]` fp64: Σ over an expert's tokens of the squared norm of each role's input."""
        given = self._energy.cpu()
        return torch.stack([given, given, self._channels.sum(1).cpu()])

    def gram(self, expert: int, role: Role) -> Tensor:
        """`[in, in]` fp32 for one matrix of an expert of the set in hand, shrunk towards the layer's mean where it saw
        few tokens.

        An expert that no token reached gets the layer's mean, as if one token had reached it.
        """
        grams = self._down if role == "down" else self.inputs
        if grams is None:
            return self._scaled_down(expert)
        kind = "down" if role == "down" else "input"
        if kind not in self._mean:
            self._mean[kind] = grams.mean()
        mean = self._mean[kind]
        return shrink(grams.matrix(expert), int(grams.counts[expert]), mean, 0.25 * len(mean))

    def _scaled_down(self, expert: int) -> Tensor:
        assert self._whole_down is not None
        whole = self._whole_down.matrix()
        total = self._channels.sum(0)
        prior = 0.25 * len(whole)
        count, tokens = int(self.inputs.counts[expert]), int(self.inputs.counts.sum())
        mean = total / max(1, tokens)
        own = (self._channels[expert] + prior * mean) / (count + prior)
        scale = (own / mean.clamp_min(torch.finfo(torch.float64).tiny)).sqrt().to(whole)
        return whole * (scale[:, None] * scale) * (max(count, 1) / max(1, tokens))
