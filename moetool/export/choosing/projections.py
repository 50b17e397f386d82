"""Codes of the projections of a layer, matrices that every token passes through, chosen on what a text gives them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moetool.calibration.projection_grams import ProjectionGrams
from moetool.calibration.row_moments import ProjectionMetric
from moetool.checkpoint.writer import check_finite
from moetool.export.blocks.blocked import Blocked
from moetool.export.blocks.coding import block_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.format.blocks import BlockLayout


def projection_codes(
    grams: ProjectionGrams,
    named: Mapping[str, Sequence[str]],
    matrix: Callable[[str], tuple[Tensor, BlockLayout]],
    moments: Path | None,
    device: torch.device,
) -> Iterator[tuple[str, Blocked]]:
    """Yield the matrices of a layer's projections in blocks, by name.

    Args:
        grams: of the inputs of the projections, which the text has passed.
        named: names of the matrices in each projection's weight, by its path.
        matrix: gives a matrix `[out, in]` of a name, and its kind of blocks.
        moments: the file that says how errors in rows count together, with which rows are coded in turn; `None` if each
            counts by itself.
        device: where they are coded.

    Raises:
        InvalidInputError: numbers that are not finite.
    """
    for owner, same in grams.shared().items():
        names = [name for path in same for name in named.get(path, ())]
        inputs = PreparedGram.of(grams[owner]) if names else None
        for name in names:
            whole, kind = matrix(name)
            check_finite(name, whole)
            rows = None if moments is None else ProjectionMetric.read(moments, name, device)
            yield name, block_codes(whole.to(device), kind, inputs, rows)
