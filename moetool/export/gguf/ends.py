"""What errors in embeddings and head cost, which lie outside of all layers: in which types they lose how much.

An error E in the head, whose inputs are h and at whose outputs the gradients are δ, costs `Σ_v mean(δ_v²) E_v G E_v^T`
with G = Σ h h^T, like one in any other matrix. The embedding of a token is its row itself: with gradients ε at it, an
error costs `Σ_v n_v E_v M E_v^T`, where n_v is how often the text has the token, and M the mean of ε ε^T. A table that
is both loses both.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.calibration.input_grams import GRAM_DTYPE
from moetool.checkpoint.files import save_tensors
from moetool.export.gguf.coding import block_codes
from moetool.export.gguf.file import GgufTensor, check_finite
from moetool.export.gguf.prepared_gram import PreparedGram
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType
from moetool.format.gguf.words import EMBEDDINGS, HEAD
from moetool.job.calibrated import CalibratedJob
from moetool.numerics.gram import Gram

TRIED_TOKENS = 512  # rows of a vocabulary, at most, that are coded in every type
_FILE = "head.safetensors"
_AT_ONCE = 1 << 24  # numbers of a table that are looked at, or coded, together
_TINY = torch.finfo(torch.float32).tiny


class Weighed(NamedTuple):
    """How much errors in the rows of a table count.

    Attributes:
        metric: `[in, in]`, of the errors of a row.
        rows: `[vocabulary]` fp64, how much each row counts.
    """

    metric: Tensor
    rows: Tensor


class _HeadMoments:
    """The Gram matrix of a head's inputs, and the energy of the gradients at its outputs."""

    def __init__(self, head: nn.Linear, device: torch.device) -> None:
        self._head, self._gram = head, Gram(head.in_features, device, GRAM_DTYPE)
        self._energy = torch.zeros(head.out_features, dtype=torch.float64, device=device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which the head's inputs, and the gradients at its outputs, are added up."""
        handle = self._head.register_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def _see(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._gram.add(inputs[0].flatten(0, -2))
        output.register_hook(self._add)

    def _add(self, gradients: Tensor) -> None:
        self._energy += torch.linalg.vector_norm(gradients.flatten(0, -2).float(), dim=0).double().square()

    def tensors(self) -> dict[str, Tensor]:
        """Return the Gram matrix and the mean squared gradients as tensors, named as the fields of `Weighed`."""
        return {"metric": self._gram.matrix(), "rows": self._energy / max(1, self._gram.count)}


class Ends:
    """Embeddings and head of a file, before a job's text.

    Attributes:
        inputs: what chooses the codes of each table, by name: its metrics together, as they count in the mean; `None`
            where no error counts.
    """

    def __init__(self, calibrated: CalibratedJob, tensors: Sequence[GgufTensor]) -> None:
        """With all `tensors` of the file: without a head of its own, its embeddings are both."""
        self._calibrated, self._has_head = calibrated, any(tensor.name == HEAD for tensor in tensors)
        self._device = calibrated.job.device

    def see_head(self) -> float:
        """Take the text that gradients are taken on through the head and back, and note what errors in it would cost.
        Returns the loss per token."""
        head = self._calibrated.model.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        moments = _HeadMoments(head, self._device)
        with moments.watching():
            loss = self._calibrated.gradient_sweep.head()
        save_tensors(self._calibrated.job.work / _FILE, moments.tensors())
        return loss

    @cached_property
    def weighed(self) -> Mapping[str, Sequence[Weighed]]:
        """How much errors in each table count, when gradients have come back to where the text is embedded."""
        head = Weighed(**load_file(self._calibrated.job.work / _FILE, str(self._device)))
        if self._has_head:
            return {EMBEDDINGS: [self._embedded()], HEAD: [head]}
        return {EMBEDDINGS: [self._embedded(), head]}

    @cached_property
    def inputs(self) -> Mapping[str, PreparedGram | None]:
        totals = {name: [own.rows.sum() * own.metric for own in parts] for name, parts in self.weighed.items()}
        return {name: PreparedGram.of(torch.stack(parts).sum(0)) for name, parts in totals.items()}

    def _embedded(self) -> Weighed:
        sweep, model = self._calibrated.gradient_sweep, self._calibrated.model
        table = model.model.get_input_embeddings().weight.detach()
        width = table.shape[1]
        gram, back = Gram(width, self._device, GRAM_DTYPE), sweep.gradient(0)
        for start in range(0, sweep.count, sweep.batch_size):
            given = back.read(start, min(start + sweep.batch_size, sweep.count))
            gram.add(_streams(given.to(self._device).float(), width).sum(2).flatten(0, -2))
        tokens = sweep.windows[:1]  # what the first layer is given may be the rows times a number of the family's
        own = _streams(model.embed(tokens), width)[:, :, 0]
        scale = own.float().norm() / table[tokens.to(self._device)].float().norm().clamp_min(_TINY)
        counts = torch.bincount(sweep.windows.flatten(), minlength=len(table)).double().to(self._device)
        return Weighed(gram.matrix() * (scale.square() / max(1, gram.count)), counts)

    def losses(self, tensor: GgufTensor, kinds: Sequence[BlockType]) -> list[float]:
        """Estimated loss of a table `[vocabulary, in]` in each type, in nats times the number of tokens."""
        return table_losses(tensor, kinds, self.weighed[tensor.name], self.inputs[tensor.name])

    def blocks(self, tensor: GgufTensor) -> Iterator[Tensor]:
        """Yield the coded blocks of a table, `[rows, bytes]` uint8, some rows at a time. Raises `InvalidInputError` for
        numbers that are not finite."""
        inputs = self.inputs[tensor.name]
        for part in _in_rows(tensor):
            check_finite(tensor.name, part)
            yield block_codes(part.to(self._device), BLOCK_TYPES[tensor.type], inputs).tobytes().cpu()


def table_losses(
    tensor: GgufTensor, kinds: Sequence[BlockType], weighed: Sequence[Weighed], inputs: PreparedGram | None
) -> list[float]:
    """Estimated loss of a table in each type, in nats times the number of tokens, by some rows of it.

    Args:
        tensor: `[vocabulary, in]`.
        kinds: the types.
        weighed: how much its errors count.
        inputs: what chooses its codes; `None` where no error counts.
    """
    if inputs is None:
        return [0.0] * len(kinds)
    step = -(-tensor.shape[0] // TRIED_TOKENS)
    carried, few, start = torch.zeros(len(weighed), dtype=torch.float64), [], 0
    for part in _in_rows(tensor):
        rows = part.to(weighed[0].metric.device).float()
        energy = [
            (rows.square() @ own.metric.diagonal()).double() @ own.rows[start : start + len(rows)] for own in weighed
        ]
        carried += torch.stack(energy).cpu()
        few.append(rows[-start % step :: step])
        start += len(rows)
    tried = torch.cat(few)
    shares = [((tried.square() @ own.metric.diagonal()).double() @ own.rows[::step]).item() for own in weighed]

    def lost(kind: BlockType) -> float:
        errors, total = tried - block_codes(tried, kind, inputs).decoded().T, 0.0
        for own, whole, share in zip(weighed, carried.tolist(), shares, strict=True):
            if share:
                squares = ((errors @ own.metric) * errors).sum(1).clamp_min(0).double()
                total += (squares @ own.rows[::step]).item() * whole / share
        return total

    return [lost(kind) for kind in kinds]


def _streams(hidden: Tensor, width: int) -> Tensor:
    """`[batch, tokens, streams, width]` of hidden states: a residual stream, or several that begin as the embedding."""
    return hidden.reshape(*hidden.shape[:2], -1, width)


def _in_rows(tensor: GgufTensor) -> Iterator[Tensor]:
    """Iterate over the rows of a table, some at a time."""
    for part in tensor.parts():
        yield from part.split(max(1, _AT_ONCE // part.shape[-1]))
