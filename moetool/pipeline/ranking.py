"""From spectra and a byte target to the rank of every matrix and the layout of every layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.architectures import ROLES, MoEShape, Role
from moetool.calibration.collectors import LayerStatistics
from moetool.errors import UsageError
from moetool.methods.allocation import (
    Curve,
    Group,
    Ranks,
    allocate,
    byte_range,
    fixed_rank,
    weighted_curve,
)
from moetool.methods.choices import Allocation
from moetool.pipeline.factors import FactorFile
from moetool.pipeline.sizes import format_bytes
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.layout import GROUPS, LayerLayout
from moetool.representations.low_rank import LowRank


@dataclass(frozen=True)
class LayerSpectra:
    """What allocation needs to know of one layer."""

    layer: int
    factors: FactorFile
    base_channels: int
    dynamic_channels: int
    statistics: LayerStatistics | None


def matrix_weights(
    role: Role, energy: Tensor, statistics: LayerStatistics | None, inputs: int, *, whitened: bool
) -> list[float]:
    """How much one unit of each expert's spectrum costs in loss.

    The sensitivity of a matrix is the trace of its Fisher information over the energy of its inputs: with output
    gradients δ, `E‖δ xᵀ‖² / E‖x‖² ≈ E‖δ‖²`, which turns a squared output error into loss. A spectrum that was not
    whitened says nothing about the inputs and is scaled by their mean energy per channel. An expert that no token
    reached is never whitened; it counts as if one average token had reached it.

    Args:
        role: gate, up or down.
        energy: `[3, experts]`, Σ over tokens of the squared norm of each role's input; zeros if nothing was measured.
        statistics: token counts and Fisher traces; without them all sensitivities are 1.
        inputs: width of the role's input.
        whitened: whether spectra include the inputs.
    """
    row = ROLES.index(role)
    given = energy[row]
    if not bool(given.any()):
        return [1.0] * len(given)
    reached = given > 0
    tokens = float(reached.sum()) if statistics is None else float(statistics.tokens.sum())
    sensitivity = torch.ones_like(given)
    if statistics is not None and bool(statistics.fisher_trace[row].any()):
        trace = statistics.fisher_trace[row]
        average = trace.sum() / given.sum()
        sensitivity = torch.where(reached, trace / torch.where(reached, given, 1.0), average)
    plain = torch.where(reached, given, given.sum() / tokens) / inputs
    scale = torch.where(reached, 1.0, plain) if whitened else plain
    return (sensitivity * scale).tolist()


def build_groups(
    spectra: Sequence[LayerSpectra], shape: MoEShape, itemsize: int, *, weighted: bool, whitened: bool, multiple: int
) -> list[Group]:
    """Two groups per layer, in order: gate with up (gate's experts first), and down."""
    groups = []
    for entry in spectra:
        energy = entry.factors.input_energy()
        for roles in GROUPS:
            curves: list[Curve] = []
            for role in roles:
                matrix = shape.matrix(role)
                weights = [1.0] * shape.experts
                if weighted:
                    weights = matrix_weights(role, energy, entry.statistics, matrix[1], whitened=whitened)
                for expert in range(shape.experts):
                    values, total = entry.factors.spectrum(role, expert)
                    curves.append(weighted_curve(matrix, values, total, weights[expert], itemsize, multiple))
            groups.append(Group(curves, len(roles) * entry.base_channels * shape.hidden * itemsize))
    return groups


def layouts_from(
    spectra: Sequence[LayerSpectra], shape: MoEShape, ranks: Sequence[Ranks | None]
) -> dict[int, LayerLayout]:
    """The layout of every layer, given the ranks of its two groups."""
    layouts = {}
    for position, entry in enumerate(spectra):
        weights: dict[Role, tuple[Representation, ...] | None] = {}
        for roles, chosen in zip(GROUPS, ranks[2 * position : 2 * position + 2], strict=True):
            for offset, role in enumerate(roles):
                own = None if chosen is None else chosen[offset * shape.experts : (offset + 1) * shape.experts]
                weights[role] = None if own is None else tuple(Dense() if r is None else LowRank(r) for r in own)
        untouched = all(value is None for value in weights.values())
        layouts[entry.layer] = LayerLayout(
            shape,
            weights,
            shape.intermediate if untouched else entry.base_channels,
            0 if weights["down"] is None else entry.dynamic_channels,
        )
    return layouts


def same_rank(groups: Sequence[Group], rank: int) -> list[Ranks | None]:
    """One rank for every matrix, dense where that costs no more."""
    return [[fixed_rank(curve, rank) for curve in group.curves] for group in groups]


def check_ratio(ratio: float, least: int, original: int) -> None:
    """Raise `UsageError` with the possible range if `original` bytes cannot be made smaller by `ratio`."""
    highest = 1 - least / original
    if not 0 < ratio <= highest:
        raise UsageError(
            f"--ratio {ratio:g} is not possible here: of {format_bytes(original)}, {format_bytes(least)} are shared "
            "bases and tensors that are not experts, so the ratio must be above 0 and at most "
            f"{int(highest * 1000) / 1000:g}."
        )


def fit_layouts(
    method: Allocation,
    spectra: Sequence[LayerSpectra],
    groups: Sequence[Group],
    shape: MoEShape,
    target_bytes: int,
    planned_bytes: Callable[[Mapping[int, LayerLayout]], int],
) -> dict[int, LayerLayout]:
    """Layouts whose weight files, headers included, come as close to `target_bytes` from below as ranks allow.

    Headers and alignment depend a little on the layouts, so the budget for the experts is corrected until they fit.
    """
    least, most = byte_range(groups)
    step = min(curve.step_bytes for group in groups for curve in group.curves)
    best: tuple[int, dict[int, LayerLayout]] | None = None
    budget = least + max(0, target_bytes - planned_bytes(layouts_from(spectra, shape, allocate(method, groups, least))))
    for _ in range(16):
        layouts = layouts_from(spectra, shape, allocate(method, groups, min(max(budget, least), most)))
        left = target_bytes - planned_bytes(layouts)
        if left >= 0 and (best is None or left < best[0]):
            best = left, layouts
        if 0 <= left < step:
            break
        budget += left if left > 0 else min(left, -step)
    if best is None:
        raise UsageError(f"The experts cannot be made small enough for {format_bytes(target_bytes)} in all.")
    return best[1]
