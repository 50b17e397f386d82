"""What a module computes, read from its forward: feed-forward networks, and what is none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from moetool.architectures.dense.networks import may_be_network, network_in
from moetool.errors import InvalidInputError

HIDDEN, WIDTH = 8, 12
ROWS = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.u = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.d, self.act = nn.Linear(WIDTH, HIDDEN), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x))


class UpFirst(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.u(x) * F.gelu(self.g(x) * 0.5, approximate="tanh")) * 2.0


class Joined(nn.Module):
    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.both, self.d = nn.Linear(HIDDEN, 2 * WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.both(x).chunk(2, dim=-1)
        return self.d(F.silu(parts[self.first]) * parts[1 - self.first])


class JoinedTheOtherWay(Joined):
    first = 1


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.d, self.drop = Conv1D(WIDTH, HIDDEN), Conv1D(HIDDEN, WIDTH), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        up = self.u(x)
        return self.drop(self.d(up * torch.sigmoid(1.702 * up)))


class Adding(Turned):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + F.dropout(self.d(F.relu(self.u(x)).square()), p=0.5, training=self.training)


class Normed(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.norm(self.act(self.g(x)) * self.u(x)))


class Summed(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) + self.u(x))


class Cut(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.g(x)
        return self.d(self.act(gate - gate.mean(-1, keepdim=True)) * self.u(x))


class Skipping(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.d(self.act(self.g(x)) * self.u(x))


class Counting(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x))[: int(x.sum())]


def put_together(module: Any, rows: Tensor, residual: Tensor | None) -> Tensor:
    """What a module computes, from what is known of it."""
    network = network_in(module)

    def project(role: str) -> Tensor:
        linear: Any = module.get_submodule(network.linear[role])
        output = rows @ (linear.weight if network.is_transposed else linear.weight.T) + linear.bias
        halves = output.chunk(2, -1)
        return halves[role == "up"] if network.linear.get("gate") == network.linear["up"] else output

    first = network.activation(project("gate" if "gate" in network.linear else "up"))
    down: Any = module.get_submodule(network.linear["down"])
    inner = first * project("up") if "gate" in network.linear else first
    output = network.factor * (inner @ (down.weight if network.is_transposed else down.weight.T) + down.bias)
    assert network.adds == (residual is not None)
    return output if residual is None else output + residual


@pytest.mark.parametrize("kind", [Gated, UpFirst, Joined, Turned, Adding])
def test_the_parts_are_the_whole(kind: type[nn.Module]) -> None:
    module = kind().eval()
    residual = ROWS * 3 if kind is Adding else None
    expected = module(ROWS) if residual is None else module(ROWS, residual)
    torch.testing.assert_close(put_together(module, ROWS, residual), expected)
    assert may_be_network(module, HIDDEN)
    assert network_in(module).dropout == {Turned: 0.25, Adding: 0.5}.get(kind, 0.0)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert dict(network_in(Gated()).linear) == {"gate": "g", "up": "u", "down": "d"}


def test_a_module_that_is_the_activation_is_given_itself() -> None:
    module = Gated()
    assert network_in(module).activation is module.act


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (JoinedTheOtherWay, "has the rows of its gate below those of up"),
        (Normed, r"computes one neuron of others \(norm\)"),
        (Summed, r"combines gate and up in another way than by a product \(add\)"),
        (Cut, r"computes one neuron of others \(mean\)"),
        (Skipping, r"does more with its output than a feed-forward network \(add\)"),
        (Counting, "computes in a way that cannot be followed"),
    ],
)
def test_what_computes_something_else_is_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{kind.__name__} {reason}"):
        network_in(kind())


def test_shapes_of_other_modules() -> None:
    attention = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])
    assert not may_be_network(attention, HIDDEN)
    assert not may_be_network(nn.Sequential(nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)), HIDDEN)
