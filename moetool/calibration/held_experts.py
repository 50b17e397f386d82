"""Some of a layer's experts, in memory, and how one of them is run."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moetool.architectures import MoEShape, Role
from moetool.architectures.fused_layout import layout_of
from moetool.checkpoint.experts import ExpertReader
from moetool.runtime.modules import fused


class ExpertRun(NamedTuple):
    """Intermediate and final products of one expert on the tokens that are routed to it.

    Attributes:
        gate_up: `[routed, 2 · intermediate]`, without gates `[routed, intermediate]`: products, without biases.
        activation: `[routed, intermediate]`, the input of the down matrix.
        product: `[routed, hidden]`, of the down matrix.
        output: the same with its bias and through the experts' norm, if there are these.
        activate: computes `activation` from `gate_up`.
    """

    gate_up: Tensor
    activation: Tensor
    product: Tensor
    output: Tensor
    activate: Callable[[Tensor], Tensor]

    def slopes(self, gate_up: Tensor) -> Tensor:
        """The derivatives of the activations of some tokens by their `gate_up`, of which each activation depends on
        one or two numbers: of the shape and dtype of `gate_up`."""
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_(True)
            [found] = torch.autograd.grad(self.activate(leaf).sum(), leaf)
        return found


class HeldExperts:
    """Consecutive experts of a layer in memory, in fused tensors of their own or in those of the whole layer.

    Attributes:
        experts: their indices.
    """

    def __init__(self, native: nn.Module, experts: range, entering: Tensor, down: Tensor) -> None:
        """`native` are transformers' fused experts, of which biases and the activation function are used, and as whose
        tensors those of the held ones lie."""
        self.experts = experts
        self._native, self._entering, self._down = native, entering, down

    @classmethod
    def of_layer(cls, native: nn.Module) -> "HeldExperts":
        """Hold all experts of a loaded layer, sharing the memory of its fused experts module."""
        module: Any = native
        return cls(native, range(len(module.down_proj)), fused.entering(native), module.down_proj)

    @classmethod
    def read(
        cls,
        native: nn.Module,
        reader: ExpertReader,
        layer: int,
        experts: range,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "HeldExperts":
        """Read some experts of a layer from the checkpoint into `dtype` on `device`."""
        lies = layout_of(native)
        read = fused.fused_tensors(reader.shape, partial(reader.dense, layer), dtype, device, lies, experts)
        (_, entering), (_, down) = read
        return cls(native, experts, entering, down)

    @property
    def device(self) -> torch.device:
        """The device on which the experts' matrices lie."""
        return self._down.device

    @property
    def gives_back(self) -> bool:
        """Whether those that a router chooses beside experts give back what they are given."""
        return fused.gives_back(self._native)

    @property
    def intermediate(self) -> int:
        """Number of neurons of one expert: the inputs of its down matrix."""
        return layout_of(self._native).rows(self._down).shape[-1]

    def matrix(self, shape: MoEShape, expert: int, role: Role) -> Tensor:
        """One expert's matrix `[out, in]` of a role, as a view without gradients."""
        group = shape.group(role)
        tensor = self._down if role == "down" else self._entering
        own = tensor.detach()[expert - self.experts.start]
        return layout_of(self._native).matrices(own, len(group))[group.index(role)]

    def run(self, expert: int, inputs: Tensor) -> ExpertRun:
        """Run one expert on the tokens routed to it, `[routed, hidden]`, and return its values at every step."""
        own = expert - self.experts.start
        gate_up = fused.entered(self._native, inputs, self._entering[own])
        activate = partial(fused.activation, self._native, expert)
        activation = activate(gate_up)
        product = fused.left(self._native, activation, self._down[own])
        output = fused.normed(self._native, fused.add_bias(self._native, "down_proj", expert, product))
        return ExpertRun(gate_up, activation, product, output, activate)


def working_sets(experts: int, at_once: int) -> tuple[range, ...]:
    """A layer's experts in as few sets of at most `at_once` as there can be, all about as large."""
    count = -(-experts // max(1, at_once))
    return tuple(range(i * experts // count, (i + 1) * experts // count) for i in range(count))


class RoutedBatch:
    """Tokens of a batch sorted by the expert that they are routed to.

    Attributes:
        tokens: of the batch.
        weights: `[tokens · top_k, 1]`, one for each pair of a token and an expert.
    """

    def __init__(self, top_k_index: Tensor, top_k_weights: Tensor, experts: int) -> None:
        """Sort the pairs of token and expert; both inputs are `[tokens, top_k]`."""
        self.weights = top_k_weights.reshape(-1, 1)
        self._top_k = top_k_index.shape[1]
        routed_to, order = top_k_index.reshape(-1).sort(stable=True)
        self.tokens = len(top_k_index)
        self._order = order.int()
        self._ends: list[int] = torch.bincount(routed_to, minlength=experts).cumsum(0)[:experts].tolist()

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """`[routed]` each, int64: the pairs that an expert is in, and their tokens, ascending."""
        pairs = self._order[self.before(expert) : self._ends[expert]].long()
        return pairs, pairs // self._top_k

    @property
    def is_even(self) -> bool:
        """Whether every token goes to as many experts: routers of some families also choose what is none."""
        return self._ends[-1] == len(self._order)

    @property
    def rows(self) -> Tensor:
        """The tokens of all pairs with an expert, by expert: int64, on the device of the routing."""
        return self._order[: self._ends[-1]].long() // self._top_k

    def before(self, expert: int) -> int:
        """Number of (token, expert) pairs of all experts before this one."""
        return self._ends[expert - 1] if expert else 0

    def on_cpu(self) -> "RoutedBatch":
        """Copy the routing of a batch to the CPU, detached from its graph."""
        found = copy.copy(self)
        found.weights, found._order = self.weights.detach().cpu(), self._order.cpu()
        return found

    def said(self) -> tuple[Tensor, int, int, Tensor, list[int]]:
        """Return the fields of the batch as a message, from which `heard` makes it again in another process."""
        return self.weights, self._top_k, self.tokens, self._order, self._ends

    @classmethod
    def heard(cls, weights: Tensor, top_k: int, tokens: int, order: Tensor, ends: list[int]) -> "RoutedBatch":
        """The batch of another process, from the fields that its `said` gives."""
        found = cls.__new__(cls)
        found.weights, found._top_k, found.tokens, found._order, found._ends = weights, top_k, tokens, order, ends
        return found
