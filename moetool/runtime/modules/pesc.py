"""Adapters as experts on one shared feed-forward network (PESC, arXiv:2401.02731).

`h = FFN(x)`, once; `y = h + Σ_i p_i · scale · up_i(GELU(down_i(h)))` over the top-k experts, p the softmax over their
logits. Since the p sum to 1, this is Eq. 7 with the shared network taken out of the sum. Names on disk are in
`format/kinds/pesc.py`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.dense import DenseArchitecture
from moetool.architectures.dense.networks import network_in
from moetool.format.kinds.pesc import PescSpec
from moetool.runtime.modules.dense_networks import take
from moetool.runtime.modules.fused import gathered, gathered_sum, weighted_sum
from moetool.runtime.modules.inference import KernelExperts
from moetool.runtime.modules.insertion import Routed, add_placeholder
from moetool.runtime.modules.routed import RoutedExperts, matrices_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Adapters(RoutedExperts):
    """The adapters of one layer, `scale · up(GELU(down(h)))` each."""

    def __init__(self, hidden: int, spec: PescSpec) -> None:
        super().__init__()
        self.scale, self.dropout = spec.scale, spec.dropout
        self.down_proj = nn.Parameter(torch.empty(spec.experts, spec.width, hidden))
        self.up_proj = nn.Parameter(torch.empty(spec.experts, hidden, spec.width))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`."""
        return super().forward(F.dropout(hidden, self.dropout, self.training), chosen, weights * self.scale)

    def on_kernels(self) -> KernelExperts:
        """See `RoutedExperts`. Their down matrix comes before the activation, and the up matrix after it."""
        first, second = (matrices_of(self, fused.detach().unbind()) for fused in (self.down_proj, self.up_proj))
        return KernelExperts({"up": first, "down": second}, F.gelu)

    def gathered(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run copies of the adapters that each token chose, as `RoutedExperts.gathered` asks for."""

        def run(pairs: Tensor, rows: Tensor) -> Tensor:
            return gathered(self.up_proj, pairs, F.gelu(gathered(self.down_proj, pairs, rows)))

        return gathered_sum(run, hidden, chosen, weights)

    def eager(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run one adapter after the other in plain torch, as `RoutedExperts.eager` asks for."""

        def run(expert: int, rows: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(rows, self.down_proj[expert])), self.up_proj[expert])

        return weighted_sum(run, hidden, chosen, weights)


class AdapterExperts(Routed):
    """A feed-forward network, and adapters on its output that a router chooses from by its input."""

    is_efficient: ClassVar[bool] = True

    def __init__(self, ffn: nn.Module, hidden: int, spec: PescSpec, expected: str) -> None:
        """Build around `ffn`, on its device and in its dtype; `expected` is the name of a weight that others expect."""
        super().__init__()
        like = next(ffn.parameters())
        self.num_experts, self.top_k = spec.experts, spec.top_k
        self.ffn, self.adds = ffn, network_in(ffn).adds
        self.gate = nn.Linear(hidden, self.num_experts, bias=False, device=like.device, dtype=like.dtype)
        with torch.device(like.device):
            self.adapters = Adapters(hidden, spec).to(like.dtype)
        add_placeholder(self, expected, like)

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        yield from (*self.gate.parameters(), *self.adapters.parameters())

    def forward(self, hidden_states: Tensor, *residual: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`; in a family whose networks add the residual, that is an argument, too."""
        nothing = (torch.zeros_like(hidden_states),) if self.adds else ()
        shared = self.ffn(hidden_states, *nothing)
        logits = self.gate(hidden_states.reshape(-1, hidden_states.shape[-1])).float()
        largest, chosen = logits.topk(self.top_k, dim=-1)
        rows = shared.reshape(-1, shared.shape[-1])
        added = self.adapters(rows, chosen, largest.softmax(-1).to(rows.dtype))
        result = (rows + added).view_as(shared)
        return result + residual[0] if self.adds else result


def insert(model: "PreTrainedModel", dense: DenseArchitecture, spec: PescSpec) -> None:
    """Put adapters and a router around the feed-forward networks of the layers in `spec`."""
    for layer in spec.layers:
        taken = take(model, dense, layer)
        experts = AdapterExperts(taken.module, model.config.hidden_size, spec, dense.placeholder)
        model.set_submodule(taken.path, experts)
