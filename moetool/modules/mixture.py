"""Mixtures of a model's own feed-forward networks, for families that have no mixture-of-experts sibling.

Experts are modules of the family's own class, so that activation, biases and dropout are its own. On disk they are
`{ffn}.experts.{expert}.…`, the router `{ffn}.gate.weight`. Where the dense network had its first matrix there is a
guard of one number, so that a loader that does not know moetool fails instead of filling the network at random.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.checkpoint.format import FORMAT_VERSION, METHOD
from moetool.representations.mixture import Mixture

ROUTER = "gate.weight"
SHARED = "shared_expert."


def mixture_entry(mixture: Mixture) -> dict[str, Any]:
    """The `quantization_config` of such a checkpoint: what `insert_mixtures` needs."""
    return {"quant_method": METHOD, "format_version": FORMAT_VERSION, "mixture": mixture.to_config()}


class MixtureOfFFNs(nn.Module):
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
        piece = _narrowed(ffn, architecture, int(described["intermediate"]))
        self.experts = nn.ModuleList(copy.deepcopy(piece) for _ in range(self.num_experts))
        self.gate = nn.Linear(hidden, self.num_experts, bias=False, device=like.device, dtype=like.dtype)
        if self.shared != "none":
            self.shared_expert = copy.deepcopy(ffn)
        guard = nn.Module()
        guard.weight = nn.Parameter(torch.zeros(1, 1, device=like.device, dtype=like.dtype), requires_grad=False)
        self.add_module(architecture.weights["up"].removesuffix(".weight"), guard)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts `[tokens, k]`, their weights `[tokens, k]` and the largest probability `[tokens, 1]`, fp32."""
        probabilities = F.linear(rows, self.gate.weight).float().softmax(-1)
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
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            tokens, slot = torch.where(chosen == index)
            if len(tokens):
                weight = weights[tokens, slot, None].to(rows.dtype)
                result.index_add_(0, tokens, (expert(rows[tokens]) * weight).to(result.dtype))
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


def insert_mixtures(model: Any, config: Mapping[str, Any]) -> None:
    """Put mixtures where the `quantization_config` of `config` lists them. Raises `InvalidInputError`."""
    described = config["quantization_config"]["mixture"]
    architecture = find_dense_architecture({**config, "quantization_config": None})
    for layer in described["layers"]:
        path = architecture.ffn_prefix(int(layer)).removesuffix(".")
        if not path.startswith(model.base_model_prefix) or not hasattr(model, model.base_model_prefix):
            path = path.removeprefix(f"{model.base_model_prefix}.")  # the bare decoder, AutoModel
        mixture = MixtureOfFFNs(model.get_submodule(path), architecture, model.config.hidden_size, described)
        model.set_submodule(path, mixture)
