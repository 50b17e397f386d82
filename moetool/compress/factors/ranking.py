"""The choice of a rank for every matrix, and so of every layer's layout, from spectra and a byte target."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.calibration.collectors import LayerStatistics
from moetool.checkpoint.sizes import format_bytes, format_least_bytes
from moetool.compress.budget.items import Factors, Forms, Group, Item, Ladder, dropped, factors_of
from moetool.compress.budget.spending import Allocation, fit
from moetool.compress.factors.files import SpectrumFile
from moetool.compress.factors.svd import SharedFactor
from moetool.errors import UsageError
from moetool.format.layout import DENSE_BASE, LayerLayout
from moetool.job.options import SizeOptions
from moetool.representations import Representation
from moetool.representations.low_rank import LowRank
from moetool.representations.shared_factor import SharedU, SharedV

FACTORS: Mapping[SharedFactor, Factors] = {"none": LowRank, "v": SharedV, "u": SharedU}  # by --share


@dataclass(frozen=True)
class LayerSpectra:
    """Spectra and sizes of one layer, from which ranks are allocated.

    Attributes:
        layer: the number of the layer.
        factors: the file of its spectra.
        base_channels: intermediate channels that the base still has.
        dynamic_channels: intermediate channels that every batch skips.
        statistics: statistics that were measured for the base, if any.
        base: by role, the representation of the base.
        trimmed: experts that lose their deltas.
        bits: bits of the codes that factors are stored in; `None` for the model's dtype.
    """

    layer: int
    factors: SpectrumFile
    base_channels: int
    dynamic_channels: int
    statistics: LayerStatistics | None
    base: Mapping[Role, Representation] = field(default_factory=lambda: DENSE_BASE)
    trimmed: frozenset[int] = frozenset()
    bits: int | None = None

    def base_bytes(self, role: Role, shape: MoEShape, dtype: torch.dtype) -> int:
        """Bytes of a role's base in its stored form, without its pruned channels."""
        rows, columns = shape.matrix(role)
        pruned = (rows, self.base_channels) if role == "down" else (self.base_channels, columns)
        return self.base[role].nbytes(pruned, dtype)


def build_groups(spectra: Sequence[LayerSpectra], shape: MoEShape, dtype: torch.dtype, multiple: int) -> list[Group]:
    """The groups between which the budget is shared, two per layer: gate with up, and down. A factor that experts share
    is the item of expert 0."""
    # The arrays of a ladder are the same for all matrices of a shape.
    ladders: dict[tuple[tuple[int, int], SharedFactor], Ladder] = {}

    def item(entry: LayerSpectra, role: Role, expert: int) -> Item:
        spectrum, energy = entry.factors.spectrum(role, expert)
        if expert in entry.trimmed:
            return dropped(energy)
        kind = entry.factors.matrix(role), entry.factors.share
        ladder = ladders.setdefault(kind, Ladder(kind[0], dtype, multiple, FACTORS[kind[1]], entry.bits))
        return ladder.item(spectrum, energy)

    groups = []
    for entry in spectra:
        for roles in shape.groups:
            keys = [(entry.layer, role, expert) for role in roles for expert in range(entry.factors.count)]
            native = sum(math.prod(entry.factors.matrix(role)) for _, role, _ in keys) * dtype.itemsize
            groups.append(
                Group(
                    {key: item(entry, *key[1:]) for key in keys},
                    sum(entry.base_bytes(role, shape, dtype) for role in roles),
                    None if entry.trimmed else native,
                )
            )
    return groups


def layouts_from(spectra: Sequence[LayerSpectra], shape: MoEShape, forms: Forms) -> dict[int, LayerLayout]:
    """The layout of every layer, given the forms of its deltas. A role without forms keeps its original matrices."""
    layouts = {}
    for entry in spectra:
        weights: dict[Role, tuple[Representation, ...] | None] = {}
        for role in shape.roles:
            own = [forms[key] for e in range(entry.factors.count) if (key := (entry.layer, role, e)) in forms]
            weights[role] = tuple(own) * (shape.experts // entry.factors.count) or None
        untouched = all(value is None for value in weights.values())
        layouts[entry.layer] = LayerLayout(
            shape,
            weights,
            shape.intermediate if untouched else entry.base_channels,
            0 if weights["down"] is None else entry.dynamic_channels,
            DENSE_BASE if untouched else entry.base,
        )
    return layouts


def same_rank(spectra: Sequence[LayerSpectra], shape: MoEShape, rank: int) -> Forms:
    """The forms of all deltas at one rank; a delta is dense where that takes no more bytes than factors."""
    return {
        (entry.layer, role, expert): LowRank(0)
        if expert in entry.trimmed
        else factors_of(entry.factors.matrix(role), rank, FACTORS[entry.factors.share], entry.bits)
        for entry in spectra
        for role in shape.roles
        for expert in range(entry.factors.count)
    }


def least_routed(tokens: Tensor, count: int) -> frozenset[int]:
    """The `count` experts that were given the fewest tokens (Appendix B.1 of the D²-MoE paper); `tokens` is `[E]`."""
    return frozenset(tokens.argsort(stable=True)[:count].tolist())


def check_ratio(options: SizeOptions, least: int, original: int, stored: str = "", present: int | None = None) -> None:
    """Raise `UsageError` with the possible range if weight files that had `original` bytes, `stored` in a format
    (" in FP8"), before anything was compressed cannot be made smaller by the ratio of the options: `least` bytes remain
    at any rank, and they have `present` bytes by now (`original` by default)."""
    now = original if present is None else min(present, original)
    share = options.ratio
    if share is not None and 0 < share <= 1 - least / original and round(original * (1 - share)) <= now:
        return
    left = f" before anything was compressed {format_bytes(now)} are left, and of these" if now < original else ","
    limits = "no rank makes it smaller" if least > now else options.target_limits(least, original, now)
    raise UsageError(
        f"{options.target_option} is not possible here: of {format_bytes(original)}{stored}{left} "
        f"{format_least_bytes(least)} are shared bases and tensors that are not experts, so {limits}."
    )


def fit_layouts(
    method: Allocation,
    spectra: Sequence[LayerSpectra],
    groups: Sequence[Group],
    shape: MoEShape,
    target_bytes: int,
    planned_bytes: Callable[[Mapping[int, LayerLayout]], int],
) -> dict[int, LayerLayout]:
    """Layouts whose weight files, headers included, come as close to `target_bytes` from below as ranks allow."""
    forms = fit(method, groups, target_bytes, lambda forms: planned_bytes(layouts_from(spectra, shape, forms)))
    return layouts_from(spectra, shape, forms)
