"""Vectors that decoder layers hand to each other beside hidden states."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]


class HandedOn:
    """Stands for what a layer gives the next beside hidden states. A layer that uses it fails: it is nothing."""


@dataclass(frozen=True)
class Beside:
    """A vector for each token that layers hand on, and that goes through a sweep in one tensor with the hidden states,
    behind them.

    Attributes:
        channels: of the vector; 0 if layers hand on none.
        dtype: of the vector, as layers compute it.
    """

    channels: int
    dtype: torch.dtype

    def joined(self, hidden: Tensor, *more: Tensor) -> Tensor:
        """Hidden states with the first of what a layer gives beside them: `[batch, length, hidden + channels]`."""
        return torch.cat([hidden, more[0].to(hidden)], -1) if self.channels else hidden

    def parts(self, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states and the vectors, as `joined` put them into one tensor."""
        if not self.channels:
            return state, None
        hidden, beside = state.split([state.shape[-1] - self.channels, self.channels], -1)
        return hidden, beside.to(self.dtype)

    def given(self, call: LayerCall, beside: Tensor | None) -> LayerCall:
        """Replace the place holders of handed-on vectors in a layer's call by these vectors."""
        if beside is None:
            return call
        args, kwargs = call
        return (
            tuple(beside if isinstance(value, HandedOn) else value for value in args),
            {name: beside if isinstance(value, HandedOn) else value for name, value in kwargs.items()},
        )
