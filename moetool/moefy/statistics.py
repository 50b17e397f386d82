"""Statistics of a dense feed-forward network's neurons on a text, seen at the input of its down matrix.

Activations are those of that input: after the activation function, and of a gated network after the product.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.architectures.dense import DenseArchitecture
from moetool.architectures.dense.networks import network_in, size_of
from moetool.calibration.peers import Peers
from moetool.format.kinds.moefied import Lead

CHUNK = 1024  # tokens whose activations are in memory together


def _linear(layer: nn.Module, architecture: DenseArchitecture, role: Role) -> nn.Linear:
    """The module of a layer that has the matrix of a role."""
    name = architecture.weights[role].removesuffix(".weight")
    return cast(nn.Linear, layer.get_submodule(name if architecture.spread else f"{architecture.ffn}.{name}"))


class NeuronStatistics:
    """Mean activations and a sample of inputs of one layer's feed-forward network, of the tokens that this process sees
    or, once they are reduced, of all.

    Attributes:
        inputs: parts `[tokens, hidden]` of the sample, of this process.
        first: number in the whole sample of the first of them.
        size: of the whole sample.
        saliency: `[intermediate]` fp64, `|Σ a · ∂loss/∂a|` of every neuron (SNIP, arXiv:1810.02340), if gradients were
            watched.
    """

    def __init__(
        self, layer: nn.Module, architecture: DenseArchitecture, most: int, tokens: int, before: int = 0
    ) -> None:
        """`most` of the `tokens` of a text are sampled, evenly spread over them; all, if there are no more. Of them
        `before` come before those that this process will see."""
        self._down = _linear(layer, architecture, "down")
        self._entry = layer.get_submodule(architecture.ffn)
        self.size, self._tokens = min(most, tokens), tokens
        self._seen, self._count = before, 0
        self.first = before * self.size // tokens
        width, device = size_of(self._down)[1], self._down.weight.device
        self._total = torch.zeros(width, dtype=torch.float64, device=device)
        self._product = torch.zeros(width, dtype=torch.float64, device=device)
        self.inputs: list[Tensor] = []

    @property
    def mean(self) -> Tensor:
        """Mean activation of every neuron over all tokens, `[intermediate]` fp64."""
        return self._total.cpu() / self._count

    @property
    def saliency(self) -> Tensor:
        return self._product.abs().cpu()

    @contextmanager
    def watching(self, *, gradients: bool = False, loss_scale: float = 1.0) -> Iterator[None]:
        """See everything that runs through the network, and with `gradients` what comes back, `loss_scale` times too
        large (`Sweep.loss_scale`)."""
        self._loss_scale = loss_scale
        handles = [
            self._entry.register_forward_pre_hook(self._see_inputs),
            self._down.register_forward_pre_hook(self._see_gradients if gradients else self._see_activations),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def reduce(self, peers: Peers) -> None:
        """Sum counts and activation sums over all processes, in place; sampled inputs stay with each process."""
        count = torch.tensor([self._count])
        for sum_ in (self._total, self._product, count):
            peers.all_reduce(sum_)
        self._count = int(count)

    def _see_inputs(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        # One of t tokens where ⌊t · size / tokens⌋ rises.
        places = torch.arange(self._seen, self._seen + len(rows) + 1) * self.size // self._tokens
        self._seen += len(rows)
        self.inputs.append(rows[places.diff().nonzero()[:, 0].to(rows.device)])

    def _see_activations(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        self._total += rows.sum(0, dtype=torch.float64)
        self._count += len(rows)

    def _see_gradients(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._see_activations(_, inputs)
        activations = inputs[0]

        def see(gradient: Tensor) -> None:
            product = activations.detach().double() * gradient.double()
            self._product += product.reshape(-1, product.shape[-1]).sum(0) / self._loss_scale

        activations.register_hook(see)


class SampledNetwork:
    """A loaded layer's feed-forward network, with a sample of its inputs.

    Attributes:
        inputs: `[tokens, hidden]`.
    """

    def __init__(self, layer: nn.Module, architecture: DenseArchitecture, inputs: Tensor) -> None:
        self._layer, self._architecture, self.inputs = layer, architecture, inputs
        self._is_gated = "gate" in architecture.weights
        roles: tuple[Role, ...] = ("gate", "up") if self._is_gated else ("up",)
        self._entering = [*dict.fromkeys(_linear(layer, architecture, role) for role in roles)]
        self._down = _linear(layer, architecture, "down")
        self._more = architecture.spread is None and network_in(layer.get_submodule(architecture.ffn)).adds

    @property
    def device(self) -> torch.device:
        """The device on which the network's weights lie."""
        return self._down.weight.device

    def activations(self, every: int = 1) -> Iterator[Tensor]:
        """Activations `[up to CHUNK, intermediate]` on the sample, or on one of `every` so many of its tokens, computed
        anew, one part after the other."""
        for activations, _ in self._runs((), every):
            yield activations

    @torch.no_grad()
    def factors(self) -> Iterator[dict[Lead, Tensor]]:
        """What activations on the sample are products of, `[up to CHUNK, intermediate]` each, one part after the other:
        the activated gate, and up; without a gate up, activated."""
        if not self._is_gated:
            for activations in self.activations():
                yield {"up": activations}
            return
        # A module of its own in every family with gates.
        activation = network_in(self._layer.get_submodule(self._architecture.ffn)).activation
        for _, projected in self._runs(self._entering):
            gate, up = projected if len(projected) == 2 else projected[0].chunk(2, dim=-1)
            yield {"gate": activation(gate), "up": up}

    @torch.no_grad()
    def _runs(self, noted: Sequence[nn.Module], every: int = 1) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Activations, and what the `noted` linear layers before them gave."""
        found: list[Tensor] = []

        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> NoReturn:
            found.append(inputs[0].detach()[0])
            raise _SeenError

        projected = dict[nn.Module, Tensor]()

        def note(module: nn.Module, _: object, output: Tensor) -> None:
            projected[module] = output.detach()[0]

        handles = [self._down.register_forward_pre_hook(see)]
        handles += [linear.register_forward_hook(note) for linear in noted]
        try:
            for rows in self.inputs[::every].split(CHUNK):
                with suppress(_SeenError):
                    self._run(rows[None])
                yield found.pop(), [projected[linear] for linear in noted]
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, rows: Tensor) -> None:
        """The network alone on `[1, rows, hidden]`, as far as its down matrix."""
        entry, spread = self._layer.get_submodule(self._architecture.ffn), self._architecture.spread
        hidden = entry(rows, *(rows,) * self._more)  # a residual that is added after all that is seen
        if spread is not None and spread.activation is not None:
            hidden = getattr(self._layer, spread.activation)(hidden)
        self._down(hidden)

    @torch.no_grad()
    def input_rows(self) -> Tensor:
        """Weights `[intermediate, hidden]` that meet the input: the gate's, of a network that has one."""
        weight = self._entering[0].weight
        weight = weight.t() if self._architecture.is_transposed else weight
        return weight[: size_of(self._down)[1]]

    @torch.no_grad()
    def output_norms(self) -> Tensor:
        """`[intermediate]` fp32, the norm of what each neuron writes into the output."""
        return self._down.weight.float().norm(dim=1 if self._architecture.is_transposed else 0)


class _SeenError(Exception):
    """What was wanted has been seen; the product with the down matrix is not."""
