"""Initial weights of the experts of an upcycled model, which are made of one dense model or of several."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.numerics.seeding import generator
from moetool.runtime.dense import DenseModel


class Experts(Protocol):
    """Gives the matrices of every expert, one at a time, in the dtype they are stored in."""

    def matrix(self, layer: int, expert: int, role: Role) -> Tensor:
        """Return the initial matrix `[out, in]` of one expert in a role."""

    def bias(self, layer: int, expert: int, role: Role) -> Tensor:
        """Initial bias `[out]` of one expert's matrix, of a family that has biases."""


class Copies:
    """Every expert is a dense FFN: that of one model (Sparse Upcycling, arXiv:2212.05055), or of several by turns,
    where expert e is that of the e-th (Branch-Train-MiX, arXiv:2403.07816)."""

    def __init__(self, models: Sequence[DenseModel]) -> None:
        self._models = models  # itself: an adapter's place in it is taken by the model that it is merged into

    def matrix(self, layer: int, expert: int, role: Role) -> Tensor:
        return self._models[expert % len(self._models)].matrix(layer, role)

    def bias(self, layer: int, expert: int, role: Role) -> Tensor:
        return self._models[expert % len(self._models)].bias(layer, role)


class PartlyRedrawn:
    """Copies of the dense FFN in which a share of the intermediate channels is drawn anew (Drop-Upcycling,
    arXiv:2502.19261).

    The channels are the same in gate, up and down of one expert, and others in every expert. They are drawn from a
    normal distribution with mean and standard deviation of the very numbers that they replace.
    """

    def __init__(self, dense: DenseModel, share: float, seed: int) -> None:
        self._dense, self._count, self._seed = dense, round(share * dense.intermediate), seed

    def _channels(self, layer: int, expert: int) -> Tensor:
        order = torch.randperm(self._dense.intermediate, generator=generator(self._seed, "drop", layer, expert))
        return order[: self._count].sort().values

    def _redrawn(self, values: Tensor, layer: int, expert: int, what: str) -> Tensor:
        wide = values.float()
        std, mean = torch.std_mean(wide, correction=0)
        noise = torch.randn(values.shape, generator=generator(self._seed, "redraw", layer, expert, what))
        return (mean + std * noise).to(values.dtype)

    def matrix(self, layer: int, expert: int, role: Role) -> Tensor:
        matrix = self._dense.matrix(layer, role)
        if self._count == 0:
            return matrix
        channels, axis = self._channels(layer, expert), 1 if role == "down" else 0
        dropped = matrix.index_select(axis, channels)
        return matrix.index_copy_(axis, channels, self._redrawn(dropped, layer, expert, role))

    def bias(self, layer: int, expert: int, role: Role) -> Tensor:
        bias = self._dense.bias(layer, role)
        if self._count == 0 or role == "down":
            return bias
        channels = self._channels(layer, expert)
        return bias.index_copy_(0, channels, self._redrawn(bias[channels], layer, expert, f"{role}.bias"))


class Pieces:
    """The FFN cut into `granularity` pieces along its intermediate channels, each of them an expert, several times over
    (virtual groups, arXiv:2410.07524).

    Expert e is piece e mod granularity of copy e // granularity. A copy's pieces have equal router rows, so that top-k
    takes copies whole; each then counts with 1/granularity of the copy's share, which scaled-up down matrices undo.
    Where the logits of two copies are equal, as in 16 bits they can be, top-k may take some pieces of each: copies lie
    one after the other, so that it does not where it breaks ties by order.
    """

    def __init__(self, dense: DenseModel, granularity: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the result, in which down matrices are scaled."""
        self._dense, self._granularity, self._dtype = dense, granularity, dtype
        self._width = dense.intermediate // granularity

    def matrix(self, layer: int, expert: int, role: Role) -> Tensor:
        start = expert % self._granularity * self._width
        piece = self._dense.matrix(layer, role).narrow(1 if role == "down" else 0, start, self._width)
        return piece.to(self._dtype) * self._granularity if role == "down" else piece.clone()

    def bias(self, layer: int, expert: int, role: Role) -> Tensor:
        bias = self._dense.bias(layer, role)
        return bias if role == "down" else bias.narrow(0, expert % self._granularity * self._width, self._width).clone()
