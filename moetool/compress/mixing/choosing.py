"""Chooses, within a budget of bytes, a storage scheme for each group of matrices and a form for each matrix."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moetool.architectures import Role
from moetool.checkpoint.sizes import format_bytes
from moetool.checkpoint.writer import TensorSpec, entry_nbytes
from moetool.compress.budget.items import Group, Key, offered
from moetool.compress.budget.spending import cheapest, fit
from moetool.compress.mixing.schemes import Granularity, StorageScheme
from moetool.format.layout import LayerLayout, base_name, delta_name
from moetool.job.job import Source
from moetool.job.options import names_of_included
from moetool.job.result import significant
from moetool.job.shards import OutputPlan
from moetool.representations import Representation

_SPENT = 0.98  # share of the bytes that a result may take; one that takes less gets a note
Place = tuple[int, tuple[Role, ...]]  # a layer, and the roles that have one scheme there
# The estimated loss of every form that a scheme offers to a matrix, by layer, scheme, role and expert.
FormLosses = Callable[[int, StorageScheme, Role, int], Sequence[float]]


@dataclass(frozen=True)
class Mix:
    """A choice of forms for all matrices of a model.

    Attributes:
        layouts: layout of each layer, but for those whose experts stay as another tool has stored them.
        schemes: name of the scheme, by layer and role; empty where nothing was chosen.
        losses: estimated loss of the forms of all experts together, by layer and role, to four digits.
    """

    layouts: Mapping[int, LayerLayout]
    schemes: Mapping[int, Mapping[Role, str]]
    losses: Mapping[int, Mapping[Role, float]]


@dataclass(frozen=True, eq=False)
class Choosing:
    """A choice among storage schemes and their forms.

    Attributes:
        source: the model.
        schemes: schemes on offer.
        granularity: which matrices have to have the same form.
        shard_size: bytes of a weight file, at most.
    """

    source: Source
    schemes: Sequence[StorageScheme]
    granularity: Granularity
    shard_size: int

    @property
    def smallest(self) -> int:
        """Bytes of all weight files with the smallest form of every matrix, in the scheme where that is least."""
        return min(map(self._smallest_in, self.schemes))

    @property
    def largest(self) -> int:
        """Bytes of all weight files with the last form of every matrix, in the scheme where that is most."""
        return max(
            self._planned(
                dict.fromkeys(self._places, own),
                {key: len(own.forms[key[1]]) - 1 for key in self._units},
            )
            for own in self.schemes
        )

    def _smallest_in(self, scheme: StorageScheme) -> int:
        return self._planned(dict.fromkeys(self._places, scheme), dict.fromkeys(self._units, 0))

    def _planned(self, assigned: Mapping[Place, StorageScheme], chosen: Mapping[Key, int]) -> int:
        """Exact bytes of all weight files with a scheme for each place, and the number of each unit's form in it."""
        return OutputPlan(self.source, self._layouts(assigned, chosen), self.shard_size).nbytes

    def mix(self, target: int, losses: FormLosses) -> Mix:
        """The mix of at most `target` bytes whose estimated loss is least.

        First each place gets the scheme that is cheapest at one price per byte, then the bytes that are left after the
        bases buy forms (`budget.spending`), counted exactly as the files will have them.

        Raises:
            UsageError: no mix is as small as that.
        """
        groups = {place: [self._group(place, own, target, losses) for own in self.schemes] for place in self._places}
        least = self.schemes[0]
        beside = self._smallest_in(least) - sum(own[0].least for own in groups.values())
        start = min(target, self.shard_size)
        stored = [
            ([i for i, (own, _) in enumerate(self._places) if own == layer], self._stored_bytes(layer, start))
            for layer in self.storable
        ]
        taken = cheapest(list(groups.values()), target - beside, stored)
        indices = {place: own for place, own in zip(self._places, taken, strict=True) if own is not None}
        assigned = {place: self.schemes[index] for place, index in indices.items()}
        items = {key: item for place, index in indices.items() for key, item in groups[place][index].items.items()}

        def numbers(forms: Mapping[Key, Representation]) -> dict[Key, int]:
            return {key: list(assigned[self._place(key)].forms[key[1]]).index(form) for key, form in forms.items()}

        found = numbers(
            fit("water-filling", [Group(items)], target, lambda forms: self._planned(assigned, numbers(forms)))
        )
        lost = summed(
            (key, losses(key[0], assigned[self._place(key)], key[1], key[2])[found[first]])
            for first, keys in self._units.items()
            if first in found
            for key in keys
        )
        schemes: dict[int, dict[Role, str]] = {}
        for (layer, roles), scheme in assigned.items():
            schemes.setdefault(layer, {}).update(dict.fromkeys(roles, scheme.name))
        return Mix(self._layouts(assigned, found), schemes, lost)

    @cached_property
    def storable(self) -> list[int]:
        """Layers whose experts may stay as another tool has stored them, in few bits."""
        reader, forms = self.source.experts, self.source.checkpoint.forms
        if not self.source.keeps_stored:
            return []
        return [layer for layer in reader.moe_layers if all(spec.name in forms for spec in reader.specs(layer))]

    def _stored_bytes(self, layer: int, start: int) -> int:
        """Bytes of a layer's experts as they are stored, with their entries in the header of a file."""
        parts = self.source.checkpoint.stored_parts(spec.name for spec in self.source.experts.specs(layer))
        specs = [TensorSpec(name, info.dtype, info.shape) for name, info in parts.items()]
        return sum(spec.nbytes + entry_nbytes(spec, start) for spec in specs)

    @cached_property
    def _places(self) -> list[Place]:
        reader = self.source.experts
        groups = [reader.shape.roles] if self.granularity == "layer" else reader.shape.groups
        return [(layer, tuple(roles)) for layer in reader.moe_layers for roles in groups]

    def _place(self, key: Key) -> Place:
        shape = self.source.experts.shape
        return key[0], tuple(shape.roles if self.granularity == "layer" else shape.group(key[1]))

    @cached_property
    def _units(self) -> dict[Key, list[Key]]:
        """Units: the matrices that get the same form, by the first of them."""
        reader, units = self.source.experts, dict[Key, list[Key]]()
        for layer in reader.moe_layers:
            for role in reader.shape.roles:
                for expert in range(reader.shape.experts):
                    first = reader.shape.roles[0] if self.granularity == "layer" else role
                    unit = layer, first, expert if self.granularity == "matrix" else 0
                    units.setdefault(unit, []).append((layer, role, expert))
        return units

    @cached_property
    def _units_at(self) -> dict[Place, list[Key]]:
        """The first matrix of every unit, by place."""
        found: dict[Place, list[Key]] = {place: [] for place in self._places}
        for first in self._units:
            found[self._place(first)].append(first)
        return found

    def _layouts(self, assigned: Mapping[Place, StorageScheme], chosen: Mapping[Key, int]) -> dict[int, LayerLayout]:
        """Layouts with a scheme for each place, and the number of each unit's form in it; of all layers that have
        some."""
        reader, forms, layouts = self.source.experts, dict[Key, Representation](), dict[int, LayerLayout]()
        for first, number in chosen.items():
            for key in self._units[first]:
                forms[key] = assigned[self._place(key)].forms[key[1]][number]
        for layer in dict.fromkeys(layer for layer, _ in assigned):
            own = {role: assigned[self._place((layer, role, 0))] for role in reader.shape.roles}
            layouts[layer] = LayerLayout(
                reader.shape,
                {
                    role: tuple(forms[layer, role, expert] for expert in range(reader.shape.experts))
                    for role in reader.shape.roles
                },
                reader.shape.intermediate,
                base={role: scheme.base[role] for role, scheme in own.items()},
                rotation={
                    role: seed
                    for role, scheme in own.items()
                    for other, seed in scheme.rotation_seeds(reader.shape, layer).items()
                    if other == role
                },
            )
        return layouts

    def _group(self, place: Place, scheme: StorageScheme, target: int, losses: FormLosses) -> Group:
        """The matrices of a place in one scheme, with bytes and estimated losses of their forms."""
        (layer, roles), start = place, min(target, self.shard_size)  # no tensor's data starts further into a file
        items = {}
        for first in self._units_at[place]:
            keys = self._units[first]
            sizes = [
                sum(self._bytes(layer, role, delta_name(expert, role, ""), scheme.forms[role][index], start)
                    for _, role, expert in keys)
                for index in range(len(scheme.forms[first[1]]))
            ]  # fmt: skip
            lost = [losses(layer, scheme, role, expert) for _, role, expert in keys]
            items[first] = offered(scheme.forms[first[1]], sizes, [math.fsum(own) for own in zip(*lost, strict=True)])
        base = sum(self._bytes(layer, role, base_name(role, ""), scheme.base[role], start) for role in roles)
        return Group(items, base)

    def _bytes(self, layer: int, role: Role, name: str, form: Representation, start: int) -> int:
        """Bytes of a form with its entries in the header of a file, where its data starts `start` bytes in."""
        reader = self.source.experts
        specs = [
            TensorSpec(
                f"{reader.architecture.experts_prefix(layer)}{name}{tensor}", stored.dtype or reader.dtype, stored.shape
            )
            for tensor, stored in form.tensors(reader.shape.matrix(role)).items()
        ]
        return sum(spec.nbytes + entry_nbytes(spec, start) for spec in specs)


def notes_on(mix: Mix) -> Sequence[str]:
    """A sentence on where a base was chosen, and what that says of the model."""
    chosen = [layout.has_base(role) for layer, layout in mix.layouts.items() for role in mix.schemes.get(layer, ())]
    total, none = len(chosen), chosen.count(False)
    if not total:
        return ()
    if none == total:
        return ["No layer has a shared base: without one, less is lost in the same bytes."]
    if none:
        groups = f"{total - none} of {total} groups of matrices (gate, up or down of one layer)"
        return [f"{groups} are stored as deltas to a shared base; without one the others lose less."]
    return ["Experts are stored as deltas to a shared base in every layer."]


def notes_on_size(output: int, original: int, ratio: float) -> Sequence[str]:
    """A sentence where an `output` of so many bytes leaves much of what the `ratio` of the `original` bytes allows."""
    if output >= _SPENT * (1 - ratio) * original:
        return ()
    found = f"{1 - output / original:.1%} smaller, more than the {ratio:.1%} that were asked for"
    return [f"It is {found}: every matrix has the largest of the forms on offer."]


def note_on_including(
    bits: Mapping[str, int], stored: str, saves: Sequence[tuple[int, int]], output: int, left: float
) -> str:
    """A sentence on what `--include` would leave to experts of few bits.

    Args:
        bits: to ask for, by the kinds that would be worth including.
        stored: the kinds in the bits that they would have, which can be more (`included_in_words`).
        saves: bytes that each kind takes, and how many fewer it would take in so many bits.
        output: bytes of all weight files.
        left: bits that there are for each number of the experts.
    """
    taken, saved = (sum(own[place] for own in saves) for place in (0, 1))
    return (
        f"{' and '.join(bits).capitalize()} take {format_bytes(taken)} of {format_bytes(output)}, and the experts "
        f"have {left:.1f} bits per number: --include {','.join(names_of_included(bits))} would store {stored}, "
        f"and leave the experts {format_bytes(saved)} more."
    )


def summed(losses: Iterable[tuple[Key, float]]) -> dict[int, dict[Role, float]]:
    """Losses of all experts together, by layer and role, to four digits; given by layer, role and expert."""
    parts: dict[int, dict[Role, list[float]]] = {}
    for (layer, role, _), loss in losses:
        parts.setdefault(layer, {}).setdefault(role, []).append(loss)
    return {
        layer: {role: significant(math.fsum(own)) for role, own in by_role.items()} for layer, by_role in parts.items()
    }
