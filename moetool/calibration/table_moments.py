"""What errors in embeddings and head cost, which lie outside of all layers.

An error E in the head, whose inputs are h and at whose outputs the gradients are δ, costs `Σ_v mean(δ_v²) E_v G E_v^T`
with G = Σ h h^T, like one in any other matrix. The embedding of a token is its row itself: with gradients ε at it, an
error costs `Σ_v n_v E_v M E_v^T`, where n_v is how often the text has the token, and M the mean of ε ε^T. A table that
is both loses both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.calibration.input_grams import GRAM_DTYPE
from moetool.calibration.peers import Peers
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import save_tensors
from moetool.numerics.gram import Gram

_FILE = "head.safetensors"
_TINY = torch.finfo(torch.float32).tiny


class Weighed(NamedTuple):
    """How much errors in the rows of a table count.

    Attributes:
        metric: `[in, in]`, of the errors of a row.
        rows: `[vocabulary]` fp64, how much each row counts.
    """

    metric: Tensor
    rows: Tensor


class TableMoments:
    """How much errors in a model's embedding and head count, before a text that goes through it and back."""

    def __init__(self, sweep: Sweep, work: Path) -> None:
        """Keep what is seen at the head in the directory `work`."""
        self._sweep, self._model, self._path = sweep, sweep.model, work / _FILE

    def see_head(self) -> float:
        """Take the text through the head and back, and note what errors in it would cost. Returns the loss per
        token."""
        head = self._model.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        moments = _HeadMoments(head, self._model.device)
        with moments.watching():
            loss = self._sweep.head()
        moments.reduce(self._sweep.peers)
        if self._sweep.peers.is_first:
            save_tensors(self._path, moments.tensors())
        return loss

    @cached_property
    def head(self) -> Weighed:
        """Of the head."""
        return Weighed(**load_file(self._path, str(self._model.device)))

    @cached_property
    def embedded(self) -> Weighed:
        """Of the embedding, when gradients have come back to where the text is embedded."""
        sweep, model = self._sweep, self._model
        table = model.model.get_input_embeddings().weight.detach()
        width = table.shape[1]
        gram, back = Gram(width, model.device, GRAM_DTYPE), sweep.gradient(0)
        for start in range(0, sweep.count, sweep.batch_size):
            given = back.read(start, min(start + sweep.batch_size, sweep.count))
            gram.add(_streams(given.to(model.device).float(), width).sum(2).flatten(0, -2))
        tokens = sweep.windows[:1]  # what the first layer is given may be the rows times a number of the family's
        own = _streams(model.embed(tokens), width)[:, :, 0]
        scale = own.float().norm() / table[tokens.to(model.device)].float().norm().clamp_min(_TINY)
        counts = torch.bincount(sweep.windows.flatten(), minlength=len(table)).double().to(model.device)
        return Weighed(gram.matrix() * (scale.square() / max(1, gram.count)), counts)


def mean_metric(parts: Sequence[Weighed]) -> Tensor:
    """How errors of a row of a table count in the mean of all rows, `[in, in]`, where it loses all `parts`."""
    return torch.stack([own.rows.sum() * own.metric for own in parts]).sum(0)


class _HeadMoments:
    """The Gram matrix of a head's inputs, and the energy of the gradients at its outputs."""

    def __init__(self, head: nn.Linear, device: torch.device) -> None:
        self._head, self._gram = head, Gram(head.in_features, device, GRAM_DTYPE)
        self._energy = torch.zeros(head.out_features, dtype=torch.float64, device=device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which the head's inputs, and the gradients at its outputs, are added up."""
        handle = self._head.register_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def _see(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        given = inputs[0].flatten(0, -2)
        self._gram.add(given)
        self._tokens += len(given)
        output.register_hook(self._add)

    def _add(self, gradients: Tensor) -> None:
        self._energy += torch.linalg.vector_norm(gradients.flatten(0, -2).float(), dim=0).double().square()

    def reduce(self, peers: Peers) -> None:
        """Add up what each process has seen of the windows that are its own."""
        for own in (self._gram.matrix(), self._energy, self._tokens):
            peers.all_reduce(own)

    def tensors(self) -> dict[str, Tensor]:
        """Return the Gram matrix and the mean squared gradients as tensors, named as the fields of `Weighed`."""
        return {"metric": self._gram.matrix(), "rows": self._energy / self._tokens.clamp_min(1)}


def _streams(hidden: Tensor, width: int) -> Tensor:
    """`[batch, tokens, streams, width]` of hidden states: a residual stream, or several that begin as the embedding."""
    return hidden.reshape(*hidden.shape[:2], -1, width)
