"""MoE layers of a model's own feed-forward networks, for families that have no MoE sibling.

Their experts are fused as transformers has them, which makes everything that works on an MoE family work on
these. Their names on disk are in `format/kinds/moe.py`.
"""

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.dense import DenseArchitecture
from moetool.architectures.dense.networks import network_in
from moetool.architectures.shape import MoEShape, fused_name
from moetool.format.kinds.moe import MoESpec
from moetool.runtime.modules.dense_networks import take, unowned
from moetool.runtime.modules.fused import (
    activated,
    activation,
    add_bias,
    entering,
    fused_matrix,
    gathered,
    gathered_sum,
    weighted_sum,
)
from moetool.runtime.modules.inference import KernelExperts
from moetool.runtime.modules.insertion import Routed, add_placeholder
from moetool.runtime.modules.networks import wide
from moetool.runtime.modules.routed import RoutedExperts, matrices_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Router(nn.Linear):
    """A linear layer whose products are at least fp32, whatever dtype its weights have.

    In 16 bits two experts' logits are often equal (of 8 experts, for one token in 300 in bfloat16), and which of them
    top-k takes is then nobody's choice. Where copies are cut in pieces it takes some pieces of each.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Router logits `[tokens, experts]` of hidden states `[tokens, hidden]`, in fp32 or wider, outside of
        autocast."""
        dtype = wide(input)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(dtype), self.weight.to(dtype))


class FusedExperts(RoutedExperts):
    """Experts named and laid out as transformers has them: `gate_up_proj` or `up_proj`, `down_proj [experts, hidden,
    intermediate]`, and `…_bias [experts, out]` beside those that have biases."""

    down_proj: nn.Parameter

    def __init__(self, config: SimpleNamespace) -> None:
        """`config` has the `shape` and `act_fn`; parameters are left as they come."""
        super().__init__()
        shape: MoEShape = config.shape
        self.config = config
        self.act_fn = config.act_fn
        self.has_gate, self.has_bias = "gate" in shape.roles, bool(shape.biases)  # as transformers says of its own
        self.num_experts, self.hidden_dim, self.intermediate_dim = shape.experts, shape.hidden, shape.intermediate
        for roles in shape.groups:
            name, (rows, columns) = fused_name(roles), shape.matrix(roles[0])
            rows *= len(roles)
            setattr(self, name, nn.Parameter(torch.empty(shape.experts, rows, columns)))
            if roles[0] in shape.biases:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(shape.experts, rows)))

    def _apply_gate(self, values: Tensor) -> Tensor:
        return activated(self.act_fn, values.chunk(len(self.config.shape.entering), dim=-1))

    def on_kernels(self) -> KernelExperts:
        """Describe the fused matrices and biases to kernels, as `RoutedExperts.on_kernels` asks for."""
        shape: MoEShape = self.config.shape
        roles = {}
        for role in shape.roles:
            group = shape.group(role)
            biases: Tensor | None = getattr(self, f"{fused_name(group)}_bias", None)
            bias = None if biases is None else biases.detach().chunk(len(group), dim=-1)[group.index(role)]
            own = [fused_matrix(shape, self, expert, role) for expert in range(shape.experts)]
            roles[role] = matrices_of(self, own, bias)
        return KernelExperts(roles, self.act_fn)

    def gathered(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run copies of the matrices that each token chose, as `RoutedExperts.gathered` asks for."""

        def run(pairs: Tensor, rows: Tensor) -> Tensor:
            given = activation(self, pairs, gathered(entering(self), pairs, rows))
            return add_bias(self, "down_proj", pairs, gathered(self.down_proj, pairs, given))

        return gathered_sum(run, hidden, chosen, weights)

    def eager(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run one expert after the other in plain torch, as `RoutedExperts.eager` asks for."""
        # Unbound once: the gradient of every index into a fused tensor is as large as the tensor.
        first, down = entering(self).unbind(), self.down_proj.unbind()

        def run(expert: int, rows: Tensor) -> Tensor:
            given = activation(self, expert, F.linear(rows, first[expert]))
            return add_bias(self, "down_proj", expert, F.linear(given, down[expert]))

        return weighted_sum(run, hidden, chosen, weights)


class CustomMoELayer(Routed):
    """Softmax routing to the top-k of several feed-forward networks, renormalised, beside a shared one if there is one.

    The weight of the shared network, and what is left for the others, is ½ (`half`), 1 − the largest routing
    probability (`xft`; XFT, arXiv:2404.15247), or 1 on top of un-renormalised routing (`med`; Med-MoE,
    arXiv:2404.10237).
    """

    def __init__(self, ffn: nn.Module, architecture: DenseArchitecture, spec: MoESpec) -> None:
        """Build empty on the device and in the dtype of `ffn`, the dense network of the layer."""
        super().__init__()
        shape = spec.shape
        self.num_experts, self.top_k = shape.experts, shape.top_k
        self.shared = spec.shared
        if self.shared != "none":
            self.shared_expert = ffn = copy.deepcopy(ffn)
        else:
            for part in dict.fromkeys(name.partition(".")[0] for name in architecture.kept):
                setattr(self, part, getattr(ffn, part))
        network = network_in(ffn)
        self.dropout, self.factor, self.adds = network.dropout, network.factor, network.adds
        like = ffn.get_submodule(network.linear["down"]).get_parameter("weight")
        with torch.device(like.device):
            config = SimpleNamespace(shape=shape, act_fn=unowned(network.activation))
            self.experts: nn.Module = FusedExperts(config).to(like.dtype)
        self.gate = Router(shape.hidden, shape.experts, bias=False, device=like.device, dtype=like.dtype)
        add_placeholder(self, architecture.placeholder, like)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts `[tokens, k]`, their weights `[tokens, k]` and the largest probability `[tokens, 1]`, fp32."""
        probabilities = self.gate(rows).float().softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        largest = weights[:, :1]
        if self.shared == "xft":
            weights = weights.softmax(-1) * largest
        elif self.shared != "med":
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights / 2 if self.shared == "half" else weights, largest

    def forward(self, hidden_states: Tensor, *residual: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`; in a family whose networks add the residual, that is an argument, too."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen, weights, largest = self.route(rows)
        result = F.dropout(self.experts(rows, chosen, weights.to(rows.dtype)), self.dropout, self.training)
        result = result if self.factor == 1.0 else result * self.factor
        if self.shared != "none":
            shares: dict[str, float | Tensor] = {"half": 0.5, "med": 1.0, "xft": (1 - largest).to(rows.dtype)}
            result = result + shares[self.shared] * self._of_shared(rows)
        result = result.view_as(hidden_states)
        return result + residual[0] if self.adds else result

    def _of_shared(self, rows: Tensor) -> Tensor:
        """What the shared network gives: the family's own, or its matrices alone on the base of the routed ones, which
        know of no factor and no residual."""
        if isinstance(self.shared_expert, RoutedExperts):
            return self.shared_expert(rows) * self.factor
        return self.shared_expert(rows, *((torch.zeros_like(rows),) if self.adds else ()))


def insert(model: "PreTrainedModel", dense: DenseArchitecture, spec: MoESpec) -> None:
    """Replace the feed-forward networks of the layers in `spec` by MoE layers with uninitialized experts."""
    for layer in spec.layers:
        taken = take(model, dense, layer)
        model.set_submodule(taken.path, CustomMoELayer(taken.module, dense, spec))
