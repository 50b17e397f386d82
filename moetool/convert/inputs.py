"""Inputs of a dense model's feed-forward networks on a text, which routers will see: their sums and means."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moetool.calibration.peers import Peers
from moetool.numerics.gram import Gram

if TYPE_CHECKING:
    from moetool.calibration.streaming import StreamedModel


class InputMoments:
    """Means of one FFN's inputs for several groups of tokens, and their covariance over all of them.

    Attributes:
        count: `[groups]` tokens seen.
        total: `[groups, hidden]` fp64 sums.
    """

    def __init__(self, groups: int, hidden: int) -> None:
        self.count = torch.zeros(groups, dtype=torch.float64)
        self.total = torch.zeros(groups, hidden, dtype=torch.float64)
        self._gram = Gram(hidden)

    def add(self, group: int, inputs: Tensor) -> None:
        """Add inputs `[..., hidden]` to the count and sum of one group and to the common Gram matrix."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).cpu()
        self.count[group] += len(rows)
        self.total[group] += rows.sum(0, dtype=torch.float64)
        self._gram.add(rows)

    def reduce(self, peers: Peers) -> None:
        """Sum all moments over the processes, in place, so that each process has the totals."""
        for sums in (self.count, self.total, self._gram.matrix()):
            peers.all_reduce(sums)

    @property
    def means(self) -> Tensor:
        """Mean input of each group of texts, `[groups, hidden]` fp64; zero for a group without inputs."""
        return self.total / self.count[:, None].clamp_min(1)

    @property
    def mean(self) -> Tensor:
        """Mean input over all groups, `[hidden]` fp64; zero without inputs."""
        return self.total.sum(0) / self.count.sum().clamp_min(1)

    @property
    def covariance(self) -> Tensor:
        """The covariance of inputs over all groups, `[hidden, hidden]` fp64."""
        return self._gram.matrix() / self.count.sum().clamp_min(1) - torch.outer(self.mean, self.mean)


@contextmanager
def watched_inputs(ffn: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Let `see` have every input of a feed-forward network for the time of a `with` block."""
    handle = ffn.register_forward_pre_hook(lambda _, inputs: see(inputs[0]))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def prompt_moments(
    model: "StreamedModel", prompts: Sequence[Sequence[Tensor]], ffn: str, tick: Callable[[], None]
) -> list[InputMoments]:
    """Moments of every layer's FFN inputs, by group of prompts.

    Args:
        model: a dense model.
        prompts: by group, token ids `[length]` of each prompt. None is padded.
        ffn: path of the FFN in a decoder layer.
        tick: called once per layer.
    """
    hidden = [[model.embed(prompt[None]) for prompt in group] for group in prompts]
    found = []
    for index in range(model.layer_count):
        moments = InputMoments(len(prompts), model.hidden_size)
        with model.layer(index) as layer:
            for group, states in enumerate(hidden):
                with watched_inputs(layer.get_submodule(ffn), partial(moments.add, group)):
                    hidden[group] = [model.run_layer(index, layer, state) for state in states]
        found.append(moments)
        tick()
    return found
