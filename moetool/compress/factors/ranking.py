"""From spectra and a byte target to the rank of every matrix and the layout of every layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.calibration.collectors import LayerStatistics
from moetool.compress.allocation import (
    Curve,
    Group,
    Ranks,
    allocate,
    byte_range,
    fixed_rank,
)
from moetool.compress.choices import Allocation, Share
from moetool.compress.factors.files import FactorFile
from moetool.errors import UsageError
from moetool.format.layout import DENSE_BASE, LayerLayout
from moetool.job.sizes import format_bytes
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.representations.shared_factor import SharedU, SharedV


@dataclass(frozen=True)
class LayerSpectra:
    """What allocation needs to know of one layer."""

    layer: int
    factors: FactorFile
    base_channels: int
    dynamic_channels: int
    statistics: LayerStatistics | None
    base: Mapping[Role, Representation] = field(default_factory=lambda: DENSE_BASE)
    trimmed: frozenset[int] = frozenset()  # experts that lose their differences

    def base_bytes(self, role: Role, shape: MoEShape, dtype: torch.dtype) -> int:
        """Bytes of the stored base of one role."""
        rows, columns = shape.matrix(role)
        pruned = (rows, self.base_channels) if role == "down" else (self.base_channels, columns)
        return self.base[role].nbytes(pruned, dtype)


def build_groups(spectra: Sequence[LayerSpectra], shape: MoEShape, dtype: torch.dtype, multiple: int) -> list[Group]:
    """Two groups per layer, in order: gate with up (gate's experts first), and down."""
    groups = []
    for entry in spectra:
        for roles in shape.groups:
            curves = [
                Curve(
                    entry.factors.matrix(role),
                    *entry.factors.spectrum(role, expert),
                    dtype.itemsize,
                    multiple,
                    expert in entry.trimmed,
                )
                for role in roles
                for expert in range(entry.factors.count)
            ]
            groups.append(Group(curves, sum(entry.base_bytes(role, shape, dtype) for role in roles)))
    return groups


def layouts_from(
    spectra: Sequence[LayerSpectra], shape: MoEShape, ranks: Sequence[Ranks | None]
) -> dict[int, LayerLayout]:
    """The layout of every layer, given the ranks of its two groups."""
    layouts = {}
    for position, entry in enumerate(spectra):
        weights: dict[Role, tuple[Representation, ...] | None] = {}
        for roles, chosen in zip(shape.groups, ranks[2 * position : 2 * position + 2], strict=True):
            count = entry.factors.count
            for offset, role in enumerate(roles):
                own = None if chosen is None else chosen[offset * count : (offset + 1) * count]
                weights[role] = None if own is None else _representations(own, entry.factors.share, shape.experts)
        untouched = all(value is None for value in weights.values())
        layouts[entry.layer] = LayerLayout(
            shape,
            weights,
            shape.intermediate if untouched else entry.base_channels,
            0 if weights["down"] is None else entry.dynamic_channels,
            DENSE_BASE if untouched else entry.base,
        )
    return layouts


def _representations(ranks: Ranks, share: Share, experts: int) -> tuple[Representation, ...]:
    """How one role's differences are stored, given the rank of each, or of all together."""
    if share == "none":
        return tuple(Dense() if rank is None else LowRank(rank) for rank in ranks)
    [rank] = ranks
    joint: Representation = Dense() if rank is None else LowRank(0)
    if rank:
        joint = SharedV(rank) if share == "v" else SharedU(rank)
    return (joint,) * experts


def same_rank(groups: Sequence[Group], rank: int) -> list[Ranks | None]:
    """One rank for every matrix, dense where that costs no more."""
    return [[0 if curve.is_trimmed else fixed_rank(curve, rank) for curve in group.curves] for group in groups]


def least_routed(tokens: Tensor, count: int) -> frozenset[int]:
    """The `count` experts that were given the fewest tokens (Appendix B.1 of the D²-MoE paper); `tokens` is `[E]`."""
    return frozenset(tokens.argsort(stable=True)[:count].tolist())


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

    Headers and alignment depend a little on the layouts, so the budget for the experts is corrected until they fit,
    between one that does and one that does not.
    """
    low, high = byte_range(groups)
    step = min(curve.step_bytes for group in groups for curve in group.curves)
    best: tuple[int, dict[int, LayerLayout]] | None = None
    budget = low + max(0, target_bytes - planned_bytes(layouts_from(spectra, shape, allocate(method, groups, low))))
    for _ in range(32):
        budget = min(max(budget, low), high)
        layouts = layouts_from(spectra, shape, allocate(method, groups, budget))
        left = target_bytes - planned_bytes(layouts)
        if left >= 0 and (best is None or left < best[0]):
            best = left, layouts
        low, high = (budget, high) if left >= 0 else (low, budget)
        if 0 <= left < step or high - low < 2:
            break
        budget += left
        if not low < budget < high:
            budget = (low + high) // 2
    if best is None:
        raise UsageError(f"The experts cannot be made small enough for {format_bytes(target_bytes)} in all.")
    return best[1]
