"""What errors in embeddings and head lose in each type: `calibration.table_moments` says how much they count."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moetool.calibration.table_moments import TableMoments, Weighed, mean_metric
from moetool.checkpoint.writer import check_finite
from moetool.export.blocks.blocked import Blocked
from moetool.export.blocks.coding import block_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.choosing.written import WrittenModel, WrittenTensor
from moetool.format.blocks import BlockLayout
from moetool.job.calibrated import CalibratedJob

TRIED_TOKENS = 512  # rows of a vocabulary, at most, that are coded in every type
_AT_ONCE = 1 << 24  # numbers of a table that are looked at, or coded, together


class Ends:
    """Embeddings and head of a result, before a job's text.

    Attributes:
        inputs: what chooses the codes of each table, by name: its metrics together, as they count in the mean; `None`
            where no error counts.
    """

    def __init__(self, calibrated: CalibratedJob, written: WrittenModel) -> None:
        """Those of a model: without a head of its own, its embeddings are both."""
        self._written, self._moments = written, TableMoments(calibrated.gradient_sweep, calibrated.job.work)
        self._device = calibrated.job.device

    def see_head(self) -> float:
        """Take the text that gradients are taken on through the head and back, and note what errors in it would cost.
        Returns the loss per token."""
        return self._moments.see_head()

    @cached_property
    def weighed(self) -> Mapping[str, Sequence[Weighed]]:
        """How much errors in each table count, when gradients have come back to where the text is embedded."""
        written, embedded, head = self._written, self._moments.embedded, self._moments.head
        embedded = embedded._replace(rows=written.counted_embeddings(embedded.rows))
        if written.head is None:
            return {written.embeddings: [embedded, head]}
        return {written.embeddings: [embedded], written.head: [head]}

    @cached_property
    def inputs(self) -> Mapping[str, PreparedGram | None]:
        return {name: PreparedGram.of(mean_metric(parts)) for name, parts in self.weighed.items()}

    def losses(self, tensor: WrittenTensor, kinds: Sequence[BlockLayout]) -> list[float]:
        """Estimated loss of a table `[vocabulary, in]` in each type, in nats times the number of tokens."""
        return table_losses(tensor, kinds, self.weighed[tensor.name], self.inputs[tensor.name])

    def coded(self, tensor: WrittenTensor, kind: BlockLayout) -> Iterator[Blocked]:
        """Yield a table in blocks of a kind, some rows at a time. Raises `InvalidInputError` for numbers that are not
        finite."""
        inputs = self.inputs[tensor.name]
        for part in _in_rows(tensor):
            check_finite(tensor.name, part)
            yield block_codes(part.to(self._device), kind, inputs)


def table_losses(
    tensor: WrittenTensor, kinds: Sequence[BlockLayout], weighed: Sequence[Weighed], inputs: PreparedGram | None
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

    def lost(kind: BlockLayout) -> float:
        errors, total = tried - block_codes(tried, kind, inputs).decoded().T, 0.0
        for own, whole, share in zip(weighed, carried.tolist(), shares, strict=True):
            if share:
                squares = ((errors @ own.metric) * errors).sum(1).clamp_min(0).double()
                total += (squares @ own.rows[::step]).item() * whole / share
        return total

    return [lost(kind) for kind in kinds]


def _in_rows(tensor: WrittenTensor) -> Iterator[Tensor]:
    """Iterate over the rows of a table, some at a time."""
    for part in tensor.parts():
        yield from part.split(max(1, _AT_ONCE // part.shape[-1]))
