"""What the neurons of a dense feed-forward network do on a text, seen at the input of its down matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from moetool.architectures.dense import DenseArchitecture

CHUNK = 1024  # tokens whose activations are in memory together


class NeuronStatistics:
    """Mean activations and a sample of inputs of one layer's feed-forward network.

    Activations are those of the input of the down matrix: after the activation function, and of a gated network after
    the product.

    Attributes:
        saliency: `[intermediate]` fp64, `|Σ a · ∂loss/∂a|` of every neuron (SNIP, arXiv:1810.02340), if gradients were
            watched.
    """

    def __init__(self, layer: nn.Module, architecture: DenseArchitecture, most: int, tokens: int) -> None:
        """`most` of the `tokens` to come are sampled, evenly spread over them; all, if there are no more."""
        self._architecture = architecture
        self._layer = layer
        names = {
            role: name.removesuffix(".weight")
            if architecture.spread
            else f"{architecture.ffn}.{name.removesuffix('.weight')}"
            for role, name in architecture.weights.items()
        }
        self._up = cast(nn.Linear, layer.get_submodule(names["gate"] if "gate" in names else names["up"]))
        self._down = cast(nn.Linear, layer.get_submodule(names["down"]))
        self._entry = layer.get_submodule(architecture.ffn)
        self._most, self._tokens = min(most, tokens), tokens
        self._seen = self._count = 0
        width = int(self._down.weight.shape[1])
        self._total = torch.zeros(width, dtype=torch.float64, device=self.device)
        self._product = torch.zeros(width, dtype=torch.float64, device=self.device)
        self._inputs: list[Tensor] = []
        self._is_watching = True

    @property
    def device(self) -> torch.device:
        """Where the layer is."""
        return self._down.weight.device

    @property
    def mean(self) -> Tensor:
        """`[intermediate]` fp64, mean activation of every neuron."""
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

    def _see_inputs(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        # One of t tokens where ⌊t · most / tokens⌋ rises.
        places = torch.arange(self._seen, self._seen + len(rows) + 1) * self._most // self._tokens
        self._seen += len(rows)
        self._inputs.append(rows[places.diff().nonzero()[:, 0].to(rows.device)])

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

    def sampled_inputs(self) -> Tensor:
        """Inputs `[sampled, hidden]` of the network."""
        return torch.cat(self._inputs)

    @torch.no_grad()
    def sampled_activations(self) -> Iterator[Tensor]:
        """Activations `[up to CHUNK, intermediate]` on the sampled inputs, computed anew, one part after the other."""
        found: list[Tensor] = []
        handle = self._down.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].detach()[0]))
        try:
            for rows in self.sampled_inputs().split(CHUNK):
                self._run(rows[None])
                yield found.pop()
        finally:
            handle.remove()

    def _run(self, rows: Tensor) -> None:
        """The network alone on `[1, rows, hidden]`."""
        spread = self._architecture.spread
        if spread is None:
            self._entry(rows)
            return
        hidden = self._entry(rows)
        if spread.activation is not None:
            hidden = self._layer.get_submodule(spread.activation)(hidden)
        self._down(hidden)

    @torch.no_grad()
    def input_rows(self) -> Tensor:
        """Weights `[intermediate, hidden]` that meet the input: the gate's, of a network that has one."""
        return self._up.weight[: self._down.weight.shape[1]]
