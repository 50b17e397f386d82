"""The tensors of a moefied model: its own weights, neurons reordered so that every expert is a run of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.checkpoint.writer import TensorSpec
from moetool.convert.parts import Customized, Made
from moetool.errors import UsageError
from moetool.format.kinds.base import PLACEHOLDER
from moetool.format.kinds.moefied import CENTRE, FIRST, ORDER, PRICE, SECOND, Lead, MoefiedSpec, SelectorKind
from moetool.moefy.statistics import SampledNetwork
from moetool.numerics.balanced_kmeans import balanced_kmeans
from moetool.numerics.seeding import generator
from moetool.runtime.dense import DenseModel

# Tensors that a layer gains: what of its plan each is, and its dtype, `None` for that of the FFNs.
_FOUND: Mapping[str, tuple[str, torch.dtype | None]] = {
    CENTRE: ("centre", torch.float32),
    PRICE: ("price", torch.float32),
    FIRST: ("first", None),
    SECOND: ("second", None),
    ORDER: ("ranking", torch.int64),
}

# Neurons are told apart by what they contribute to so many tokens at most, in a projection to so many numbers.
CLUSTERED_TOKENS, DIRECTIONS = 8192, 512


@dataclass(frozen=True)
class LayerPlan:
    """Clusters of one FFN's neurons, and the selector that chooses among them.

    Attributes:
        order: `[intermediate]` int64, neurons expert by expert.
        centre: `[intermediate]` fp32, representative values in that order; zeros for the original MoEfication.
        first, second: of the selector, `[experts, hidden]` and `[experts, experts]`; `None` if it is no network.
        ranking: `[experts]` int64, experts as a fixed selector takes them.
        gate_price, up_price: `[intermediate]` fp32, what squares of the projection that chooses are worth; `None` of
            the other one.
    """

    order: Tensor
    centre: Tensor
    first: Tensor | None = None
    second: Tensor | None = None
    ranking: Tensor | None = None
    gate_price: Tensor | None = None
    up_price: Tensor | None = None

    @property
    def lead(self) -> Lead:
        """The projection that chooses, of a layer that has one."""
        return "up" if self.gate_price is None else "gate"

    @property
    def price(self) -> Tensor | None:
        return self.up_price if self.gate_price is None else self.gate_price


def chosen_experts(keep: float, experts: int, called: str = "experts") -> int:
    """Number of experts that the share `keep` of all is, rounded; `called` so in the error.

    Raises:
        UsageError: it is less than one.
    """
    chosen = round(keep * experts)
    if chosen < 1:
        raise UsageError(f"--keep {keep:g} of {experts} {called} is less than one. The smallest is {1 / experts:.4g}.")
    return chosen


def check_experts(experts: int, intermediate: int) -> None:
    """Raise `UsageError` unless the experts divide the neurons, with the numbers near that do."""
    if intermediate % experts:
        divisors = [d for d in range(2, intermediate + 1) if intermediate % d == 0]
        near = sorted(sorted(divisors, key=lambda d: (abs(d - experts), d))[:4])
        raise UsageError(
            f"--experts {experts} does not divide the FFN's {intermediate} neurons. Near it: "
            f"{', '.join(map(str, near))}."
        )


def order_by_weights(dense: DenseModel, layer: int, experts: int, seed: int) -> Tensor:
    """Neurons `[intermediate]`, expert by expert, by balanced k-means on their normalised input weights, gate and up
    side by side (MoEfication, §3.2)."""
    roles: list[Role] = [role for role in dense.architecture.roles if role != "down"]
    rows = torch.cat([dense.matrix(layer, role).float() for role in roles], dim=1)
    rows /= rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return balanced_kmeans(rows, experts, seed=seed + layer).argsort(stable=True)


def order_by_activations(network: SampledNetwork, centre: Tensor, layer: int, experts: int, seed: int) -> Tensor:
    """Neurons `[intermediate]`, expert by expert, by balanced k-means on what they contribute to tokens.

    A neuron is the vector of `√(|a − r| ‖w‖)` over the sampled tokens, w what it writes into the output: neurons that
    are close are left out of the same tokens at the same loss, so that little is computed for the sake of others. The
    root keeps a few tokens with huge activations from deciding alone. Distances are those of a random projection.

    Args:
        network: the layer's, with a sample of the text.
        centre: `[intermediate]`, r.
        layer: its number, part of the seed.
        experts: how many.
        seed: of the projection and of the first centres.
    """
    stream, device = generator(seed, "clusters", layer), network.device
    centre, norms = centre.to(device), network.output_norms()
    rows = torch.zeros(len(centre), DIRECTIONS, device=device)
    every = -(-len(network.inputs) // CLUSTERED_TOKENS)
    for activations in network.activations(every):
        contributed = ((activations.float() - centre).abs() * norms).sqrt()
        rows += contributed.T @ torch.randn(len(activations), DIRECTIONS, generator=stream).to(device)
    return balanced_kmeans(rows, experts, seed=seed + layer).argsort(stable=True)


@dataclass(frozen=True, kw_only=True)
class Moefied(Customized[MoefiedSpec]):
    """A dense model whose feed-forward networks compute the experts that a selector chooses.

    Attributes:
        layer_plan: gives what was found for a layer.
    """

    layer_plan: Callable[[int], LayerPlan]

    def unit(self, layer: int, names: list[str]) -> Iterator[Made]:
        if layer not in self.spec.layers:
            yield from self.kept(names)
            return
        inside = self.dense.ffn_names(layer)
        yield from self.kept([name for name in names if name not in inside])
        yield from self._network(layer)
        prefix = self.dense.architecture.ffn_prefix(layer)
        for name, shape in self.spec.tensors(self.dense.hidden, self.dense.intermediate).items():
            what, dtype = _FOUND[name]
            stored = dtype or self.stored(self.dense.dtype)
            yield Made(TensorSpec(prefix + name, stored, shape), partial(self._found, layer, what, stored))
        yield self.zeros(self.dense.architecture.weight_name(layer, "up"), PLACEHOLDER)

    def _found(self, layer: int, what: str, dtype: torch.dtype) -> Tensor:
        found: Tensor = getattr(self.layer_plan(layer), what)
        return found.to(dtype)

    def _network(self, layer: int) -> Iterator[Made]:
        """The network's tensors under the name of the module that wraps it, neurons in their new order."""
        dense, architecture = self.dense, self.dense.architecture
        width, joined = dense.intermediate, architecture.is_joined
        for role, path in architecture.linear_paths.items():
            if joined and role == "gate":
                continue  # with `up`, in one tensor
            halves: list[Role] = ["gate", "up"] if joined and role == "up" else [role]
            name = f"{architecture.ffn_prefix(layer)}ffn.{path}"
            rows, columns = dense.shape(role)
            shape = (len(halves) * rows, columns)
            yield self.joined(f"{name}.weight", shape, [partial(self._matrix, layer, half) for half in halves])
            if role in dense.biases:
                length = dense.hidden if role == "down" else width * len(halves)
                yield self.joined(f"{name}.bias", (length,), [partial(self._bias, layer, role)])

    def _matrix(self, layer: int, role: Role) -> Tensor:
        order = self.layer_plan(layer).order
        return self.dense.matrix(layer, role).index_select(1 if role == "down" else 0, order)

    def _bias(self, layer: int, role: Role) -> Tensor:
        bias, width = self.dense.bias(layer, role), self.dense.intermediate
        if role == "down":
            return bias
        order = self.layer_plan(layer).order
        return torch.cat([part[order] for part in bias.split(width)])


def flops(dense: DenseModel, layers: int, keep: float, experts: int, length: int, selector: SelectorKind) -> float:
    """Ratio of a model's FLOPs, if it keeps a share of the neurons in the FFNs of `layers`, to those of the dense
    model.

    Counted as the paper does: multiplications of decoder or encoder layers with their weights, of attention with a text
    of `length` tokens, and of the selectors (an oracle computes all activations first, a projection is computed for all
    neurons). Table 1 of G-MoEfication
    follows at a length of 128.
    """
    config, hidden = dense.config, dense.hidden
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    if getattr(config, "new_decoder_architecture", False):
        groups = int(config.num_kv_heads)
    elif getattr(config, "multi_query", False):
        groups = 1
    width = dense.head_dim
    attention = 2 * hidden * heads * width + 2 * hidden * groups * width + 2 * length * heads * width
    matrix, roles = hidden * dense.intermediate, len(dense.architecture.roles)
    whole = dense.layers * (attention + roles * matrix)
    chosen = chosen_experts(keep, experts) / experts
    selecting = {
        "projection": (1 - chosen) * matrix,
        "mlp": experts * (hidden + experts),
        "oracle": (roles - 1) * matrix,
        "fixed": 0,
    }[selector]
    return (whole - layers * ((1 - chosen) * roles * matrix - selecting)) / whole
