"""What errors in embeddings and head lose in each type: `calibration.table_moments` says how much they count."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moetool.calibration.table_moments import TableMoments, Weighed, mean_metric
from moetool.checkpoint.writer import check_finite
from moetool.export.blocks.coding import block_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.packing import packed
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType
from moetool.format.gguf.words import EMBEDDINGS, HEAD
from moetool.job.calibrated import CalibratedJob

TRIED_TOKENS = 512  # rows of a vocabulary, at most, that are coded in every type
_AT_ONCE = 1 << 24  # numbers of a table that are looked at, or coded, together


class Ends:
    """Embeddings and head of a file, before a job's text.

    Attributes:
        inputs: what chooses the codes of each table, by name: its metrics together, as they count in the mean; `None`
            where no error counts.
    """

    def __init__(self, calibrated: CalibratedJob, tensors: Sequence[GgufTensor], source: GgufSource) -> None:
        """With all `tensors` of the file of a model: without a head of its own, its embeddings are both."""
        self._source, self._moments = source, TableMoments(calibrated.gradient_sweep, calibrated.job.work)
        self._has_head, self._device = any(tensor.name == HEAD for tensor in tensors), calibrated.job.device

    def see_head(self) -> float:
        """Take the text that gradients are taken on through the head and back, and note what errors in it would cost.
        Returns the loss per token."""
        return self._moments.see_head()

    @cached_property
    def weighed(self) -> Mapping[str, Sequence[Weighed]]:
        """How much errors in each table count, when gradients have come back to where the text is embedded."""
        source, embedded, head = self._source, self._moments.embedded, self._moments.head
        embedded = embedded._replace(rows=source.family.multiplied(EMBEDDINGS, source.config, embedded.rows, power=-2))
        return {EMBEDDINGS: [embedded], HEAD: [head]} if self._has_head else {EMBEDDINGS: [embedded, head]}

    @cached_property
    def inputs(self) -> Mapping[str, PreparedGram | None]:
        return {name: PreparedGram.of(mean_metric(parts)) for name, parts in self.weighed.items()}

    def losses(self, tensor: GgufTensor, kinds: Sequence[BlockType]) -> list[float]:
        """Estimated loss of a table `[vocabulary, in]` in each type, in nats times the number of tokens."""
        return table_losses(tensor, kinds, self.weighed[tensor.name], self.inputs[tensor.name])

    def blocks(self, tensor: GgufTensor) -> Iterator[Tensor]:
        """Yield the coded blocks of a table, `[rows, bytes]` uint8, some rows at a time. Raises `InvalidInputError` for
        numbers that are not finite."""
        inputs, kind = self.inputs[tensor.name], BLOCK_TYPES[tensor.type]
        for part in _in_rows(tensor):
            check_finite(tensor.name, part)
            yield packed(block_codes(part.to(self._device), kind, inputs), kind)


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


def _in_rows(tensor: GgufTensor) -> Iterator[Tensor]:
    """Iterate over the rows of a table, some at a time."""
    for part in tensor.parts():
        yield from part.split(max(1, _AT_ONCE // part.shape[-1]))
