"""What an error in the output of a layer's experts costs, by the gradients of the loss there.

With the gradient g of a token's output, an error e in it costs about ½ (g·e)² beside a first-order term that averages
out; over all tokens ½ eᵀ H e with H = E[g gᵀ]. The whole matrix is kept, not its diagonal: errors may go where the loss
does not look (the output-side factor of K-FAC, arXiv:1503.05671, and of YAQA, arXiv:2505.22988).
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moetool.calibration.observation import Collector
from moetool.calibration.peers import Peers
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import save_tensors
from moetool.numerics.gram import Gram

_DAMPING = 0.01  # of the mean of the diagonal: a direction that no gradient showed may count elsewhere


class OutputGradients(Collector):
    """`Σ g gᵀ [hidden, hidden]` of the gradients of the summed loss of a window at the experts' outputs."""

    def __init__(self, sweep: Sweep, device: torch.device) -> None:
        """For a pass of `sweep` backwards."""
        self._gram = Gram(sweep.model.hidden_size, device)
        self._scale = (max(sweep.length - 1, 1) / sweep.loss_scale) ** 2
        self._tokens = sweep.count * sweep.length

    def observe_blame(self, gradients: Tensor) -> None:
        self._gram.add(gradients.reshape(-1, gradients.shape[-1]))

    def reduce(self, peers: Peers) -> None:
        peers.all_reduce(self._gram.matrix())

    def save(self, path: Path) -> None:
        """Leave the mean over all tokens in a file."""
        save_tensors(path, {"mean": (self._gram.matrix() * (self._scale / self._tokens)).float().cpu()})


def metric_path(work: Path, layer: int) -> Path:
    """Where a layer's metric waits for the layer to be refined."""
    return work / f"metric-{layer:05d}.safetensors"


def load_metric(path: Path, device: torch.device) -> Tensor:
    """C `[hidden, hidden]` fp32, so that errors e `[tokens, hidden]` cost `½ ‖e C‖²`."""
    return root(load_file(path)["mean"]).to(device)


def root(moment: Tensor) -> Tensor:
    """C of H = C Cᵀ, a bit of the mean added to its diagonal; of ones where no gradient was seen. fp32."""
    mean = float(moment.diagonal().double().mean())
    if not mean > 0:
        return torch.eye(len(moment))
    damped = moment.double() / mean
    damped.diagonal().add_(_DAMPING)
    return (torch.linalg.cholesky(damped) * mean**0.5).float()
