"""Storage schemes: a base or none that matrices are relative to, and the forms that they are offered in."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import torch

from moetool.architectures import MoEShape, Role
from moetool.checkpoint.experts import ExpertReader
from moetool.compress.delta_forms import base_representations, in_groups
from moetool.errors import UsageError
from moetool.format.layout import NO_BASE
from moetool.numerics.counter import key
from moetool.numerics.packing import rows_served
from moetool.numerics.quantization import BITS
from moetool.numerics.rotation import Rotation
from moetool.numerics.trellis import WIDTHS
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank, break_even_rank
from moetool.representations.mixed_rows import MOST_WIDTHS, ROW_SHARES, ROW_UNIT, MixedRows, TrellisRows
from moetool.representations.quantized import Quantized
from moetool.representations.quantized_low_rank import QuantizedLowRank
from moetool.representations.trellis import in_trellis

Granularity = Literal["matrix", "role", "layer"]

_NONE = "none"  # the name of the scheme without a base
# Forms are offered from a third to three times the bits that every number can have on average.
_REACH = 3.0
_LOW_RANK_BITS = 3  # of factors; 3 bits of twice the rank beat 4 and 8 bits on trained experts
# Of the rank at which full-precision factors break even. With all of it, factors would take as much as codes of the
# whole matrix in so many bits, which lose less.
_LOW_RANK_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
_SPREADS = (0.5, 1.0, 1.5)  # of bits by row, for rows that count two, four and eight times as much as others
_MOST_ROW_BITS = 6
_STEP = 0.5  # bits from one mean of a row mixture to the next
_QUANTILES = [NormalDist().inv_cdf((place + 0.5) / ROW_SHARES) for place in range(ROW_SHARES)]
_LEAST_BLOCK = 8  # inputs that a rotation has to mix with each other to be worth a product


@dataclass(frozen=True, eq=False)
class StorageScheme:
    """A base or none, with or without rotated inputs, and the forms that matrices are offered in relative to it.

    Attributes:
        name: bits of the base, or `none`; `, rotated` follows where inputs are rotated.
        base: representation of the base, by role.
        forms: representations on offer for each delta, by role, rising in bytes; without a base, for each matrix.
        seed: seed of the rotations of inputs; `None` where inputs are not rotated.
    """

    name: str
    base: Mapping[Role, Representation]
    forms: Mapping[Role, Sequence[Representation]]
    seed: int | None = None

    @property
    def has_base(self) -> bool:
        """Whether the scheme stores matrices as deltas to a shared base, rather than by themselves."""
        return not self.name.startswith(_NONE)

    @cached_property
    def identity(self) -> str:
        """A name that differs between schemes of one name whose forms differ."""
        forms = [(role, [form.spec for form in own]) for role, own in self.forms.items()]
        return f"{self.name}:{hashlib.sha256(repr(forms).encode()).hexdigest()[:8]}"

    def rotation_seeds(self, shape: MoEShape, layer: int) -> Mapping[Role, int]:
        """Seeds of the rotations of a layer's inputs by role; empty where inputs are not rotated."""
        return {} if self.seed is None else rotation_seeds(shape, layer, self.seed)

    def input_rotation(self, shape: MoEShape, layer: int, role: Role) -> Rotation | None:
        """The rotation of a role's inputs; `None` where inputs are not rotated."""
        found = self.rotation_seeds(shape, layer)
        return Rotation(shape.matrix(role)[1], found[role]) if found else None


def rotation_seeds(shape: MoEShape, layer: int, seed: int) -> dict[Role, int]:
    """Seeds of the random rotations of a layer's inputs, by role: one for gate and up, another for down.

    Raises:
        UsageError: a width cannot be cut into blocks that are powers of two.
    """
    for role in shape.roles:
        rotation = Rotation(shape.matrix(role)[1], 0)
        if rotation.block < _LEAST_BLOCK:
            raise UsageError(
                f"--rotate mixes blocks of inputs by powers of two: of the {rotation.width} inputs of {role}, "
                f"blocks of {rotation.block} are all that fit, and at least {_LEAST_BLOCK} are needed."
            )
    return {role: key(seed, "rotation", layer, shape.group(role)[0]) >> 33 for role in shape.roles}


def average_bits(experts: ExpertReader, left: int) -> float:
    """Bits for every number of the experts, if `left` bytes are shared evenly among all of them."""
    return max(8 * left / experts.numbers, 1e-3)


def on_base(
    shape: MoEShape,
    base_bits: str,
    bits: float | None,
    group: int,
    rotated_by: int | None = None,
    trellis: bool = False,
) -> StorageScheme:
    """The scheme of deltas to a quantized base.

    Args:
        shape: MoE shape of every layer.
        base_bits: bits of the base, or the name of its format.
        bits: average bits of a delta's number, which forms on offer lie around; `None` offers all but dense deltas.
        group: inputs that share a scale.
        rotated_by: seed of the rotations of inputs; `None` leaves inputs as they are.
        trellis: whether codes of 1 to 4 bits are trellis-coded.
    """
    base, few = base_representations(shape, base_bits, group, trellis), bits is None or bits <= _LOW_RANK_BITS
    near = [b for b in BITS if bits is None or bits / _REACH <= b <= bits * _REACH] or [1 if few else 8]
    if few:
        near = sorted({*near, _LOW_RANK_BITS})
    forms: dict[Role, list[Representation]] = {}
    for role in shape.roles:
        matrix = shape.matrix(role)
        own: list[Representation] = [LowRank(0), *(codes_form(b, group, matrix, trellis) for b in near)]
        own += _row_forms(role, near, group, matrix, trellis)
        if few:
            ranks = sorted({_rank(break_even_rank(matrix) * share) for share in _LOW_RANK_SHARES})
            own += [in_groups(QuantizedLowRank(rank, _LOW_RANK_BITS, group), matrix, group) for rank in ranks]
        if bits is not None and rotated_by is None and (bits * _REACH >= 16 or not near[1:]):
            own.append(Dense())
        forms[role] = _rising(own, matrix)
    return StorageScheme(_named(base_bits, rotated_by), base, forms, rotated_by)


def without_base(
    shape: MoEShape,
    bits: float | None,
    group: int,
    rotated_by: int | None = None,
    exact: int | None = None,
    trellis: bool = False,
    granularity: Granularity = "matrix",
) -> StorageScheme:
    """The scheme of every matrix on its own.

    Args:
        shape: MoE shape of every layer.
        bits: average bits of a number, which forms on offer lie around; `None` offers all from 1 to 8.
        group: inputs that share a scale.
        rotated_by: seed of the rotations of inputs; `None` leaves inputs as they are.
        exact: bits of every number, if nothing else is to be offered.
        trellis: whether codes of 1 to 4 bits are trellis-coded.
        granularity: which matrices have to have the same form; rows of one matrix differ in bits only if matrices may.
    """
    near = [b for b in BITS if bits is None or bits / _REACH <= b <= bits * _REACH] or [8]
    whole = [Dense()] if bits is not None and bits * _REACH >= 16 and rotated_by is None else []
    if exact is not None:
        near, whole = [exact], []
    forms: dict[Role, list[Representation]] = {}
    for role in shape.roles:
        matrix = shape.matrix(role)
        own = [*(codes_form(b, group, matrix, trellis) for b in near), *whole]
        if granularity == "matrix" and exact is None:
            own += _row_forms(role, near, group, matrix, trellis)
        forms[role] = _rising(own, matrix)
    return StorageScheme(_named(_NONE, rotated_by), {role: NO_BASE[role] for role in shape.roles}, forms, rotated_by)


def _rank(near: float) -> int:
    """The nearest rank of which bytes serve whole rows of factors, as products want them; below the least of these any
    up to it."""
    step = rows_served(_LOW_RANK_BITS)
    return step * round(near / step) if near >= step else max(1, math.floor(near))


def codes_form(bits: int, group: int, matrix: tuple[int, int], trellis: bool) -> Representation:
    """Codes of `bits` for a matrix `[out, in]`, trellis-coded if that was asked for and its rows allow it.

    Raises:
        UsageError: only groups of one would fit.
    """
    form = Quantized(bits, group)
    return in_groups(in_trellis(form, matrix[0]) if trellis else form, matrix, group)


def row_mixtures(bits: Sequence[int], group: int, matrix: tuple[int, int], *, trellis: bool) -> list[MixedRows]:
    """Mixtures of bits that the rows of a matrix `[out, in]` are offered in; none where it has too few rows.

    Where rows count so differently that the logarithms of what they count are about normal, so are the bits that lose
    least in all. A mixture is such a distribution, rounded: a mean and a spread.

    Args:
        bits: widths that rows can have, besides 0; those above 6 are left out, in a trellis those above 4.
        group: inputs that share a scale.
        matrix: shape `[out, in]`.
        trellis: whether codes are trellis-coded, if the number of rows allows it.

    Raises:
        ValueError: only groups of one would fit.
    """
    few = [own for own in bits if own <= (max(WIDTHS) if trellis else _MOST_ROW_BITS)]
    if not few or matrix[0] < ROW_SHARES * ROW_UNIT:
        return []
    kind = TrellisRows if trellis and matrix[0] % ROW_UNIT == 0 else MixedRows
    steps = range(int(min(few) / 2 / _STEP), int(max(few) / _STEP) + 1)
    found = {_row_shares(_STEP * step, spread, few) for step in steps for spread in _SPREADS}
    return [kind(shares, group).fitted(matrix) for shares in sorted(found) if sum(map(bool, shares)) > 1]


def _row_shares(mean: float, spread: float, bits: Sequence[int]) -> tuple[int, ...]:
    """How many of `ROW_SHARES` parts of the rows have 0, 1, … bits, for bits of that mean and standard deviation."""
    near = sorted(bits, key=lambda own: abs(own - mean))[:MOST_WIDTHS]
    shares = [0] * (max(near) + 1)
    for quantile in _QUANTILES:
        wanted = mean + spread * quantile
        shares[min((0, *near), key=lambda own: abs(own - wanted))] += 1
    while not shares[-1]:
        shares.pop()
    return tuple(shares)


def _row_forms(
    role: Role, bits: Sequence[int], group: int, matrix: tuple[int, int], trellis: bool
) -> Sequence[Representation]:
    """Row mixtures of gate and up, whose rows are neurons; rows of down, outputs, count too evenly for them."""
    return [] if role == "down" else row_mixtures(bits, group, matrix, trellis=trellis)


def _rising(forms: Sequence[Representation], matrix: tuple[int, int]) -> list[Representation]:
    """The forms of a matrix `[out, in]` in the order of their bytes, the smallest first."""
    return sorted(forms, key=lambda form: form.nbytes(matrix, torch.bfloat16))


def _named(base: str, rotated_by: int | None) -> str:
    """The name of a scheme."""
    return base if rotated_by is None else f"{base}, rotated"
