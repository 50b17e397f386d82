"""The loss that errors in the output of a layer's experts cause, from the gradients of the loss at that output.

With the gradient g of a token's output, an error e in it costs about ½ (g·e)² beside a first-order term that averages
out; over all tokens ½ eᵀ H e with H = E[g gᵀ]. The whole matrix is kept, not its diagonal: errors may go where the loss
does not look (the output-side factor of K-FAC, arXiv:1503.05671, and of YAQA, arXiv:2505.22988), as far as the text
tells (`numerics.halved_gram`).
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from moetool.calibration.observation import Collector
from moetool.calibration.peers import Peers
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import save_tensors
from moetool.checkpoint.writer import is_finite
from moetool.errors import InvalidInputError
from moetool.numerics.halved_gram import HalvedGram

_DAMPING = 0.01  # of the mean of the diagonal: a direction that no gradient showed may count elsewhere


class OutputGradients(Collector):
    """A collector of `Σ g gᵀ [hidden, hidden]` of the gradients g of a window's summed loss at the experts' output."""

    def __init__(self, sweep: Sweep, device: torch.device) -> None:
        """Collect in a pass of `sweep` backwards, on `device`."""
        self._gram = HalvedGram(sweep.model.hidden_size, sweep.length, sweep.own.start, device)
        self._scale = (max(sweep.length - 1, 1) / sweep.loss_scale) ** 2
        self._tokens = sweep.count * sweep.length

    def observe_gradients(self, gradients: Tensor) -> None:
        self._gram.add(gradients.reshape(-1, gradients.shape[-1]))

    def reduce(self, peers: Peers) -> None:
        self._gram.reduce(peers.all_reduce)

    def save(self, path: Path) -> None:
        """Write the mean of `g gᵀ` over all tokens, `[hidden, hidden]` fp32 in nats², to a safetensors file."""
        save_tensors(path, {"mean": (self._gram.matrix() * (self._scale / self._tokens)).float().cpu()})


def metric_path(work: Path, layer: int) -> Path:
    """The file in a directory, of work or of a base, in which a layer's mean of `g gᵀ` waits for the layer to be
    encoded."""
    return work / f"metric-{layer:05d}.safetensors"


def load_metric(path: Path, device: torch.device) -> Tensor:
    """Read C `[hidden, hidden]` fp32, with which errors e `[tokens, hidden]` cost `½ ‖e C‖²` nats."""
    return root(load_moment(path, device))


def load_moment(path: Path, device: torch.device) -> Tensor:
    """Read the mean of `g gᵀ`, `[hidden, hidden]` fp32 in nats².

    Raises:
        InvalidInputError: a number in the file is none.
    """
    moment = load_file(path)["mean"]
    if not is_finite(moment):
        raise InvalidInputError(f"{path} is damaged (NaN or infinity). Delete it: errors then count by channel.")
    return moment.to(device)


def moment_shape(path: Path) -> tuple[int, ...]:
    """The shape that the head of a file promises; empty where it holds something else.

    Raises:
        SafetensorError, OSError: the file is damaged.
    """
    with safe_open(path, "pt") as file:
        return tuple(file.get_slice("mean").get_shape()) if "mean" in file.keys() else ()  # noqa: SIM118


def root(moment: Tensor) -> Tensor:
    """The Cholesky factor C of a second moment H = C Cᵀ, fp32; a hundredth of the mean of H's diagonal is added to the
    diagonal first. C is the identity where no gradient was seen."""
    mean = float(moment.diagonal().double().mean())
    if not mean > 0:
        return torch.eye(len(moment), device=moment.device)
    damped = moment.double() / mean
    damped.diagonal().add_(_DAMPING)
    return (torch.linalg.cholesky(damped) * mean**0.5).float()
