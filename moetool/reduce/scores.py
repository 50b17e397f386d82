"""Measurements of a layer's experts by which those that stay are chosen."""

import torch
from torch import Tensor

from moetool.calibration.held_experts import ExpertRun, HeldExperts, RoutedBatch
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Peers

TOKENS, SALIENCY, LOGIT_GRAM, OUTPUTS = "tokens", "saliency", "logit_gram", "outputs"


class Scores(Collector):
    """Measures the experts of one layer: how many tokens reach each, and what a subclass adds to that.

    Attributes:
        tokens: `[experts]` int64, routed tokens.
    """

    def __init__(self, experts: int) -> None:
        self.tokens = torch.zeros(experts, dtype=torch.int64)

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        self.tokens[expert] += len(inputs)

    def sums(self) -> dict[str, Tensor]:
        """Sums over tokens that a method measures beside token counts, by name."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return all scores of a layer as named tensors on the CPU, for a safetensors file."""
        return {TOKENS: self.tokens, **{name: tensor.cpu() for name, tensor in self.sums().items()}}

    def reduce(self, peers: Peers) -> None:
        for tensor in (self.tokens, *self.sums().values()):
            peers.all_reduce(tensor)


class Saliency(Scores):
    """Sizes of what experts add to the layer's output: Σ over tokens of g_j ‖f_j(x)‖₂ (REAP, Eq. 9).

    g_j is the router's weight as the layer uses it.

    Attributes:
        total: `[experts]` fp64.
    """

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.total = torch.zeros(experts, dtype=torch.float64)

    def observe_output(self, expert: int, output: Tensor, weights: Tensor) -> None:
        self.total[expert] += (output.double().norm(dim=1) * weights[:, 0].double()).sum().cpu()

    def sums(self) -> dict[str, Tensor]:
        return {SALIENCY: self.total}


class LogitGram(Scores):
    """Similarity of the router's logits between experts.

    Attributes:
        gram: `[experts, experts]` fp64, Σ over all tokens of the products of their logits.
    """

    def __init__(self, router: Tensor) -> None:
        """`router` `[experts, hidden]` is the weight."""
        super().__init__(len(router))
        self._router = router
        self.gram = torch.zeros(len(router), len(router), dtype=torch.float64, device=router.device)

    def observe_inputs(self, inputs: Tensor, routing: RoutedBatch) -> None:
        logits = inputs.to(self._router).double() @ self._router.double().T
        self.gram += logits.T @ logits

    def sums(self) -> dict[str, Tensor]:
        return {LOGIT_GRAM: self.gram}


class AllOutputs(Scores):
    """Mean output of every expert over all tokens, chosen or not (HC-SMoE, §3.2).

    Attributes:
        total: `[experts, hidden]` fp64, summed over the tokens.
    """

    def __init__(self, experts: HeldExperts, hidden: int) -> None:
        """`experts` are all of the layer's, in memory."""
        super().__init__(len(experts.experts))
        self._experts = experts
        self.total = torch.zeros(len(experts.experts), hidden, dtype=torch.float64, device=experts.device)

    def observe_inputs(self, inputs: Tensor, routing: RoutedBatch) -> None:
        for expert in self._experts.experts:
            self.total[expert] += self._experts.run(expert, inputs).output.double().sum(0)

    def sums(self) -> dict[str, Tensor]:
        return {OUTPUTS: self.total}
