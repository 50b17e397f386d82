"""Mixtures of a model's own feed-forward networks, for families that have no mixture-of-experts sibling.

Gated networks without biases become fused experts as transformers has them, which makes everything that works on a
mixture-of-experts family work on these: on disk `{ffn}.experts.gate_up_proj` and `{ffn}.experts.down_proj`. Others stay
modules of the family's own class, `{ffn}.experts.{expert}.…`. The router is `{ffn}.gate.weight`.
"""

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.modules.insertion import Routed, add_guard, path_in


def weighted_sum(run: Callable[[int, Tensor], Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each expert on the tokens that chose it, weighted and summed: `[tokens, hidden]`."""
    result = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        tokens, slot = torch.where(chosen == expert)
        output = run(expert, hidden[tokens]) * weights[tokens, slot, None]
        result.index_add_(0, tokens, output.to(result.dtype))
    return result


class GatedExperts(nn.Module):
    """Experts of one layer in two tensors: `gate_up_proj [experts, 2·intermediate, hidden]` and `down_proj [experts,
    hidden, intermediate]`."""

    def __init__(self, config: SimpleNamespace) -> None:
        """`config` has `experts`, `hidden`, `intermediate` and `act_fn`; parameters are left as they come."""
        super().__init__()
        self.config = config
        self.act_fn: Any = config.act_fn
        self.num_experts, self.hidden_dim, self.intermediate_dim = config.experts, config.hidden, config.intermediate
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.intermediate))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`."""

        def run(expert: int, rows: Tensor) -> Tensor:
            activation = self._apply_gate(F.linear(rows, self.gate_up_proj[expert]))
            return F.linear(activation, self.down_proj[expert])

        return weighted_sum(run, hidden_states, top_k_index, top_k_weights)


class SeparateExperts(nn.ModuleList):
    """Experts of one layer as so many modules of the dense network's class."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`."""
        return weighted_sum(lambda expert, rows: self[expert](rows), hidden_states, top_k_index, top_k_weights)


class MixtureOfFFNs(Routed):
    """Softmax routing to the top-k of several feed-forward networks, renormalised, beside a shared one if there is one.

    The weight of the shared network, and what is left for the others, is ½ (`half`), 1 − the largest routing
    probability (`xft`; XFT, arXiv:2404.15247), or 1 on top of un-renormalised routing (`med`; Med-MoE,
    arXiv:2404.10237).
    """

    def __init__(
        self, ffn: nn.Module, architecture: DenseArchitecture, hidden: int, described: Mapping[str, Any]
    ) -> None:
        """Build empty on the device and in the dtype of `ffn`, the dense network of the layer."""
        super().__init__()
        self.num_experts, self.top_k = int(described["experts"]), int(described["top_k"])
        self.shared: str = described["shared"]
        like = next(ffn.parameters())
        width = int(described["intermediate"])
        self.experts: nn.Module
        if described.get("fused"):
            # What the family calls its activation function differs; it is the one module without parameters.
            act_fn = getattr(ffn, "act_fn", None) or ffn.activation_fn
            config = SimpleNamespace(experts=self.num_experts, hidden=hidden, intermediate=width, act_fn=act_fn)
            with torch.device(like.device):
                self.experts = GatedExperts(config).to(like.dtype)
        else:
            piece = _narrowed(ffn, architecture, width)
            self.experts = SeparateExperts(copy.deepcopy(piece) for _ in range(self.num_experts))
        self.gate = nn.Linear(hidden, self.num_experts, bias=False, device=like.device, dtype=like.dtype)
        if self.shared != "none":
            self.shared_expert = copy.deepcopy(ffn)
        add_guard(self, architecture.weights["up"].removesuffix(".weight"), like)

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

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen, weights, largest = self.route(rows)
        result = self.experts(rows, chosen, weights.to(rows.dtype))
        if self.shared != "none":
            share: Any = {"half": 0.5, "med": 1.0, "xft": (1 - largest).to(rows.dtype)}[self.shared]
            result = result + share * self.shared_expert(rows)
        return result.view_as(hidden_states)


def _narrowed(ffn: nn.Module, architecture: DenseArchitecture, intermediate: int) -> nn.Module:
    """A copy of a feed-forward network with that many intermediate channels."""
    narrow = copy.deepcopy(ffn)
    for role, name in architecture.weights.items():
        linear: Any = narrow.get_submodule(name.removesuffix(".weight"))
        rows, columns = linear.weight.shape
        if role == "down":
            columns = intermediate
        else:
            rows = 2 * intermediate if architecture.is_joined else intermediate
            if linear.bias is not None and len(linear.bias) != rows:
                linear.bias = nn.Parameter(linear.bias.new_empty(rows))
        if tuple(linear.weight.shape) != (rows, columns):
            linear.weight = nn.Parameter(linear.weight.new_empty(rows, columns))
    return narrow


def insert(model: Any, config: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Put mixtures in the layers that are listed."""
    architecture = find_dense_architecture({**config, "quantization_config": None})
    for layer in described["layers"]:
        path = path_in(model, architecture.ffn_prefix(int(layer)).removesuffix("."))
        mixture = MixtureOfFFNs(model.get_submodule(path), architecture, model.config.hidden_size, described)
        model.set_submodule(path, mixture)
