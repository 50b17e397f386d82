"""Losses of types whose codes moetool chooses itself: what each tensor loses in each, measured at the output.

A few rows of a tensor are coded in every type on offer, as they would be in the result, on the Gram matrix G of their
inputs. With gradients δ at the outputs, an error E costs about `Σ_j mean(δ_j²) E_j G E_j^T` in loss. How much of what
these rows carry is lost stands for all rows of the tensor; experts that are given most tokens stand for the others.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from typing_extensions import TypeVar

from moetool.calibration.row_moments import row_moment_numbers
from moetool.export.blocks.coding import block_codes, choosing_blocks, preparing_inputs
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.choosing.ends import TRIED_TOKENS
from moetool.export.choosing.menu import Menu
from moetool.export.choosing.written import WrittenTensor
from moetool.format.blocks import BlockLayout, SizedLayout
from moetool.numerics.work import Work, altogether

_ROWS = 32  # of each matrix, at most, that are tried
TRIED_EXPERTS = 4  # of a layer, at most
LayoutT = TypeVar("LayoutT", bound=SizedLayout)


def trying_types(menu: Menu[LayoutT]) -> Work:
    """The work of coding a few rows of every tensor in every type on offer."""
    works = []
    for tensor in menu.tensors:
        if kinds := menu.types.get(tensor.name):
            *experts, rows, columns = tensor.shape
            most = _ROWS if tensor.layer >= 0 else TRIED_TOKENS
            few = (*(min(count, TRIED_EXPERTS) for count in experts), min(rows, most), columns)
            works += [preparing_inputs(few, tokens=0), *(choosing_blocks(few, kind) for kind in kinds)]
    return altogether(works)


def moments_between_rows(menu: Menu[LayoutT]) -> list[int]:
    """By layer, how many numbers the moments are by which rows of its projections make good for each other."""
    projections = [own for own in menu.tensors if own.name in menu.types and len(own.shape) == 2]
    layers = groupby(projections, key=lambda tensor: tensor.layer)
    return [sum(row_moment_numbers(own.shape[0]) for own in tensors) for layer, tensors in layers if layer >= 0]


def expected_coding(menu: Menu[LayoutT], tensor: WrittenTensor) -> Work:
    """The work of coding a tensor in a type that is still to be chosen: the mean of those on offer."""
    kinds = menu.types[tensor.name]
    in_turn = tensor.layer >= 0
    return altogether(choosing_blocks(tensor.shape, kind, in_turn=in_turn) for kind in kinds) * (1 / len(kinds))


class TypeLosses:
    """Losses of one tensor in each type on offer: of the rows that are tried, and by these of all.

    Args:
        kinds: the types.
    """

    def __init__(self, kinds: Sequence[BlockLayout]) -> None:
        self.kinds, self._lost = kinds, [0.0] * len(kinds)
        self._carried = self._tried = 0.0

    def count(self, rows: Tensor, given: Tensor, sensitivity: Tensor) -> Tensor:
        """Count the rows `[out, in]` of a matrix; returns `[out]`, what each carries of the tensor's energy."""
        carried = (rows.square() @ given.float()) * sensitivity
        self._carried += carried.sum().item()
        return carried

    def add(self, index: int, lost: float) -> None:
        """Add the loss of rows that were tried in the type of that index."""
        self._lost[index] += lost

    def tried(self, carried: float) -> None:
        """Add the energy, as `count` returns it, of the rows that were coded in every type."""
        self._tried += carried

    def estimates(self) -> list[float]:
        """Estimated loss of the whole tensor in each type, in nats times the number of tokens."""
        share = self._carried / self._tried if self._tried else 0.0
        return [lost * share for lost in self._lost]


def try_types(
    losses: Sequence[TypeLosses],
    matrices: Sequence[Tensor],
    given: Tensor,
    sensitivities: Sequence[Tensor],
    inputs: PreparedGram | None,
) -> None:
    """Add matrices that have the same inputs to the losses of their tensors, which have the same types on offer.

    Args:
        losses: of the tensor of each.
        matrices: `[out, in]`.
        given: `[in]`, Σ over tokens of the squared inputs.
        sensitivities: `[out]` of each, mean squared gradients.
        inputs: of the inputs, with which some rows are coded; `None` where none are.
    """
    few, weights = [], []
    for own, matrix, sensitivity in zip(losses, matrices, sensitivities, strict=True):
        rows, sensitivity = matrix.float(), sensitivity.float()
        step = slice(0, None, -(-len(rows) // _ROWS))
        carried = own.count(rows, given, sensitivity)
        if inputs is not None:
            own.tried(carried[step].sum().item())
        few.append(rows[step])
        weights.append(sensitivity[step])
    if inputs is None:
        return
    together = torch.cat(few)
    for index, kind in enumerate(losses[0].kinds):
        errors = inputs.output_errors(together - block_codes(together, kind, inputs).decoded().T)
        for own, lost, weight in zip(losses, errors.split([len(rows) for rows in few]), weights, strict=True):
            own.add(index, (lost @ weight).item())
