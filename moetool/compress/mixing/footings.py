"""What the experts of a layer can stand on, and the forms that their matrices are offered in there."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from moetool.architectures import MoEShape, Role
from moetool.bases.layer_base import LayerBase
from moetool.checkpoint.experts import ExpertReader
from moetool.compress.choices import Scheme
from moetool.compress.encoding import base_representations, in_groups
from moetool.compress.mixing.row_mixtures import row_mixtures
from moetool.compress.rotated import seeds
from moetool.format.layout import NO_BASE
from moetool.numerics.rotation import Rotation
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank, break_even_rank
from moetool.representations.quantized import Quantized
from moetool.representations.quantized_low_rank import QuantizedLowRank
from moetool.representations.trellis import in_trellis

NONE = "none"  # the name of where matrices stand on their own
_BITS = (1, 2, 3, 4, 8)
# Forms are offered from a third to three times the bits that every number can have on average.
_REACH = 3.0
_LOW_RANK_BITS = 3  # of factors; 3 bits of twice the rank beat 4 and 8 bits on trained experts
# Of the rank at which full-precision factors break even. With all of it, factors would take as much as codes of the
# whole matrix in so many bits, which lose less.
_LOW_RANK_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True, eq=False)
class Footing:
    """A base, or none, and what is offered on it.

    Attributes:
        name: tells it from others: the bits of its base, or `none`.
        base: by role, how it is stored.
        forms: by role, what every delta to it is offered in; without a base, every matrix.
        seed: of the rotations of inputs, if these are rotated.
    """

    name: str
    base: Mapping[Role, Representation]
    forms: Mapping[Role, Sequence[Representation]]
    seed: int | None = None

    @cached_property
    def menu(self) -> str:
        """Tells footings of one name apart by what is offered on them."""
        forms = [(role, [form.spec for form in own]) for role, own in self.forms.items()]
        return f"{self.name}:{hashlib.sha256(repr(forms).encode()).hexdigest()[:8]}"

    def rotation(self, shape: MoEShape, layer: int) -> Mapping[Role, int]:
        """Seeds of the rotations of a layer's inputs, by role, if they are rotated."""
        return {} if self.seed is None else seeds(shape, layer, self.seed)

    def turning(self, shape: MoEShape, layer: int, role: Role) -> Rotation | None:
        """The rotation of a role's inputs, if they are rotated."""
        found = self.rotation(shape, layer)
        return Rotation(shape.matrix(role)[1], found[role]) if found else None

    def under(self, shape: MoEShape, layer: int, merged: LayerBase) -> LayerBase:
        """A layer's base as it is stored here, of the merge of its experts."""
        return merged.encoded(self.base, self.rotation(shape, layer))


def average_bits(experts: ExpertReader, left: int) -> float:
    """Of every number of the experts, if there are so many bytes `left` for all."""
    numbers = experts.shape.expert_parameters * experts.shape.experts * len(experts.moe_layers)
    return max(8 * left / numbers, 1e-3)


def on_base(
    shape: MoEShape,
    base_bits: str,
    bits: float | None,
    group: int,
    rotated_by: int | None = None,
    trellis: bool = False,
) -> Footing:
    """On a base in few bits, where every number of a delta can have `bits` on average, or, if that is not known, all
    but deltas as they are; for rotated inputs with a seed, codes in a trellis if that is wanted."""
    base, few = base_representations(shape, base_bits, group, trellis), bits is None or bits <= _LOW_RANK_BITS
    near = [b for b in _BITS if bits is None or bits / _REACH <= b <= bits * _REACH] or [1 if few else 8]
    if few:
        near = sorted({*near, _LOW_RANK_BITS})
    forms: dict[Role, list[Representation]] = {}
    for role in shape.roles:
        matrix = shape.matrix(role)
        own: list[Representation] = [LowRank(0), *(codes_form(b, group, matrix, trellis) for b in near)]
        own += _rows_forms(role, near, group, matrix, trellis)
        if few:
            ranks = sorted({max(1, math.floor(break_even_rank(matrix) * share)) for share in _LOW_RANK_SHARES})
            own += [in_groups(QuantizedLowRank(rank, _LOW_RANK_BITS, group), matrix, group) for rank in ranks]
        if bits is not None and rotated_by is None and (bits * _REACH >= 16 or not near[1:]):
            own.append(Dense())
        forms[role] = _rising(own, matrix)
    return Footing(_named(base_bits, rotated_by), base, forms, rotated_by)


def without_base(
    shape: MoEShape,
    bits: float | None,
    group: int,
    rotated_by: int | None = None,
    exact: int | None = None,
    trellis: bool = False,
    scheme: Scheme = "matrix",
) -> Footing:
    """Every matrix on its own, where every number can have `bits` on average (all from 1 to 8 if that is not known), or
    has an `exact` number of them; for rotated inputs with a seed, in a trellis if that is wanted. Rows of one matrix
    differ in bits if matrices may."""
    near = [b for b in _BITS if bits is None or bits / _REACH <= b <= bits * _REACH] or [8]
    whole = [Dense()] if bits is not None and bits * _REACH >= 16 and rotated_by is None else []
    if exact is not None:
        near, whole = [exact], []
    forms: dict[Role, list[Representation]] = {}
    for role in shape.roles:
        matrix = shape.matrix(role)
        own = [*(codes_form(b, group, matrix, trellis) for b in near), *whole]
        if scheme == "matrix" and exact is None:
            own += _rows_forms(role, near, group, matrix, trellis)
        forms[role] = _rising(own, matrix)
    return Footing(_named(NONE, rotated_by), {role: NO_BASE[role] for role in shape.roles}, forms, rotated_by)


def codes_form(bits: int, group: int, matrix: tuple[int, int], trellis: bool) -> Representation:
    """Codes of so many bits for a matrix `[out, in]`, in a trellis if that is wanted and can be.

    Raises:
        UsageError: only groups of one would fit.
    """
    form = Quantized(bits, group)
    return in_groups(in_trellis(form, matrix[0]) if trellis else form, matrix, group)


def _rows_forms(
    role: Role, bits: Sequence[int], group: int, matrix: tuple[int, int], trellis: bool
) -> Sequence[Representation]:
    """With more bits in some rows, where these are of neurons: they count more differently than what they add up to."""
    return [] if role == "down" else row_mixtures(bits, group, matrix, trellis=trellis)


def _rising(forms: Sequence[Representation], matrix: tuple[int, int]) -> list[Representation]:
    """From the smallest to the largest."""
    return sorted(forms, key=lambda form: form.nbytes(matrix, torch.bfloat16))


def _named(base: str, rotated_by: int | None) -> str:
    return base if rotated_by is None else f"{base}, rotated"
