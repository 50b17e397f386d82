"""Router row of an expert that is added to a model whose router is there: from the text of the expert's domain."""

import torch
from torch import Tensor

from moetool.calibration.held_experts import RoutedBatch
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Peers
from moetool.convert.inputs import InputMoments
from moetool.upcycle.router import centroid_router

_OWN, _OTHER = 0, 1


class DomainInputs(Collector):
    """Moments of what a layer's experts are given, apart for windows of the new expert's domain and for others.

    Attributes:
        moments: of both groups of windows, the domain's first.
    """

    def __init__(self, is_own: Tensor, length: int, first: int, hidden: int) -> None:
        """`is_own` says of each window `[windows]` of `length` tokens whether it is of the domain; `first` is the first
        that this process runs."""
        self._is_own, self._length, self._next = is_own, length, first
        self.moments = InputMoments(2, hidden)

    def observe_inputs(self, inputs: Tensor, routing: RoutedBatch) -> None:
        windows = self._is_own[self._next : self._next + len(inputs) // self._length]
        self._next += len(windows)
        own = windows.repeat_interleave(self._length).to(inputs.device)
        for group, rows in ((_OWN, inputs[own]), (_OTHER, inputs[~own])):
            if len(rows):
                self.moments.add(group, rows)

    def reduce(self, peers: Peers) -> None:
        self.moments.reduce(peers)


def added_row(router: Tensor, moments: InputMoments) -> Tensor:
    """The row of one more expert, by the rule of Branch-Train-MiX with a text: from the mean input on other text to the
    mean input on the expert's own.

    The row is the mean of the others, so that on an average token the expert's logit is the mean of the others'; and
    that direction, scaled so that the logit varies around this mean as much as the others do.

    Args:
        router: `[experts, hidden]` of the experts that are there.
        moments: of the layer's inputs, as `DomainInputs` has them.

    Returns:
        `[hidden]` fp64.
    """
    rows, covariance = router.double(), moments.covariance
    direction = centroid_router(moments.means, moments.mean, covariance)[_OWN].double()
    apart = rows - rows.mean(0)
    spread = ((apart @ covariance) * apart).sum(1).mean().clamp_min(0).sqrt()
    return rows.mean(0) + (spread if spread > 0 else torch.ones_like(spread)) * direction
