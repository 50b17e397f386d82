"""Which footing the experts of each group get within a budget, and which form each of their matrices."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moetool.architectures import Role
from moetool.checkpoint.writer import TensorSpec, entry_nbytes
from moetool.compress.budget.items import Group, Key, offered
from moetool.compress.budget.places import cheapest
from moetool.compress.budget.spending import fit
from moetool.compress.choices import Scheme
from moetool.compress.mixing.footings import NONE, Footing
from moetool.format.layout import LayerLayout, base_name, delta_name
from moetool.job.job import Source
from moetool.job.shards import OutputPlan
from moetool.representations import Representation

_SPENT = 0.98  # of the bytes that a result may take: what is left of less is worth a word
Place = tuple[int, tuple[Role, ...]]  # a layer, and the roles that have one footing there
FormLosses = Callable[[int, Footing, Role, int], Sequence[float]]  # of every form: layer, footing, role, expert


@dataclass(frozen=True)
class Mix:
    """What was chosen.

    Attributes:
        layouts: by layer.
        footings: by layer and role, the name of the footing.
        losses: by layer and role, what the forms of all experts are estimated to lose together, to four digits.
    """

    layouts: Mapping[int, LayerLayout]
    footings: Mapping[int, Mapping[Role, str]]
    losses: Mapping[int, Mapping[Role, float]]


@dataclass(frozen=True, eq=False)
class Choosing:
    """What there is to choose from.

    Attributes:
        source: the model.
        footings: that experts can stand on.
        scheme: which matrices have to be of one form.
        shard_size: of the files that are written.
    """

    source: Source
    footings: Sequence[Footing]
    scheme: Scheme
    shard_size: int

    @property
    def smallest(self) -> int:
        """Bytes of all weight files with the smallest form of everything, all on the footing where that is least."""
        return min(map(self._smallest_on, self.footings))

    @property
    def largest(self) -> int:
        """The same with the last form of everything, all on the footing where that is most."""
        return max(
            self.planned(
                dict.fromkeys(self._places, own),
                {key: len(own.forms[key[1]]) - 1 for key in self._units},
            )
            for own in self.footings
        )

    def _smallest_on(self, footing: Footing) -> int:
        return self.planned(dict.fromkeys(self._places, footing), dict.fromkeys(self._units, 0))

    def planned(self, standing: Mapping[Place, Footing], chosen: Mapping[Key, int]) -> int:
        """Exact bytes of all weight files."""
        return OutputPlan(self.source, self._layouts(standing, chosen), self.shard_size).nbytes

    def mix(self, target: int, losses: FormLosses) -> Mix:
        """The mix of at most `target` bytes that loses least.

        Raises:
            UsageError: none is as small as that.
        """
        groups = {place: [self._group(place, own, target, losses) for own in self.footings] for place in self._places}
        least = self.footings[0]
        beside = self._smallest_on(least) - sum(own[0].least for own in groups.values())
        taken = cheapest(list(groups.values()), target - beside)
        standing = {place: self.footings[index] for place, index in zip(self._places, taken, strict=True)}
        chosen = [groups[place][index] for place, index in zip(self._places, taken, strict=True)]
        items = {key: item for group in chosen for key, item in group.items.items()}

        def numbers(forms: Mapping[Key, Representation]) -> dict[Key, int]:
            return {key: list(standing[self._place(key)].forms[key[1]]).index(form) for key, form in forms.items()}

        found = numbers(
            fit("water-filling", [Group(items)], target, lambda forms: self.planned(standing, numbers(forms)))
        )
        lost = summed(
            (key, losses(key[0], standing[self._place(key)], key[1], key[2])[found[first]])
            for first, keys in self._units.items()
            for key in keys
        )
        footings: dict[int, dict[Role, str]] = {layer: {} for layer in self.source.experts.moe_layers}
        for (layer, roles), footing in standing.items():
            footings[layer].update(dict.fromkeys(roles, footing.name))
        return Mix(self._layouts(standing, found), footings, lost)

    @cached_property
    def _places(self) -> list[Place]:
        reader = self.source.experts
        groups = [reader.shape.roles] if self.scheme == "layer" else reader.shape.groups
        return [(layer, tuple(roles)) for layer in reader.moe_layers for roles in groups]

    def _place(self, key: Key) -> Place:
        shape = self.source.experts.shape
        return key[0], tuple(shape.roles if self.scheme == "layer" else shape.group(key[1]))

    @cached_property
    def _units(self) -> dict[Key, list[Key]]:
        """The matrices that get the same form, by the first of them."""
        reader, units = self.source.experts, dict[Key, list[Key]]()
        for layer in reader.moe_layers:
            for role in reader.shape.roles:
                for expert in range(reader.shape.experts):
                    first = reader.shape.roles[0] if self.scheme == "layer" else role
                    unit = layer, first, expert if self.scheme == "matrix" else 0
                    units.setdefault(unit, []).append((layer, role, expert))
        return units

    @cached_property
    def _units_at(self) -> dict[Place, list[Key]]:
        """The first of every unit, by place."""
        found: dict[Place, list[Key]] = {place: [] for place in self._places}
        for first in self._units:
            found[self._place(first)].append(first)
        return found

    def _layouts(self, standing: Mapping[Place, Footing], chosen: Mapping[Key, int]) -> dict[int, LayerLayout]:
        """With the number of every unit's form on its footing."""
        reader, forms, layouts = self.source.experts, dict[Key, Representation](), dict[int, LayerLayout]()
        for first, keys in self._units.items():
            for key in keys:
                forms[key] = standing[self._place(key)].forms[key[1]][chosen[first]]
        for layer in reader.moe_layers:
            own = {role: standing[self._place((layer, role, 0))] for role in reader.shape.roles}
            layouts[layer] = LayerLayout(
                reader.shape,
                {
                    role: tuple(forms[layer, role, expert] for expert in range(reader.shape.experts))
                    for role in reader.shape.roles
                },
                reader.shape.intermediate,
                base={role: footing.base[role] for role, footing in own.items()},
                rotation={
                    role: seed
                    for role, footing in own.items()
                    for other, seed in footing.rotation(reader.shape, layer).items()
                    if other == role
                },
            )
        return layouts

    def _group(self, place: Place, footing: Footing, target: int, losses: FormLosses) -> Group:
        (layer, roles), start = place, min(target, self.shard_size)  # of a tensor's data, no further
        items = {}
        for first in self._units_at[place]:
            keys = self._units[first]
            sizes = [
                sum(self._bytes(layer, role, delta_name(expert, role, ""), footing.forms[role][index], start)
                    for _, role, expert in keys)
                for index in range(len(footing.forms[first[1]]))
            ]  # fmt: skip
            lost = [losses(layer, footing, role, expert) for _, role, expert in keys]
            items[first] = offered(footing.forms[first[1]], sizes, [math.fsum(own) for own in zip(*lost, strict=True)])
        base = sum(self._bytes(layer, role, base_name(role, ""), footing.base[role], start) for role in roles)
        return Group(items, base)

    def _bytes(self, layer: int, role: Role, name: str, form: Representation, start: int) -> int:
        """Of a form with its entries in the file's header, which small matrices notice."""
        reader = self.source.experts
        specs = [
            TensorSpec(
                f"{reader.architecture.experts_prefix(layer)}{name}{tensor}", stored.dtype or reader.dtype, stored.shape
            )
            for tensor, stored in form.tensors(reader.shape.matrix(role)).items()
        ]
        return sum(spec.nbytes + entry_nbytes(spec, start) for spec in specs)


def notes_on(mix: Mix) -> Sequence[str]:
    """What was chosen, and what that says of the model."""
    counts = Counter(name for by_role in mix.footings.values() for name in by_role.values())
    total, none = sum(counts.values()), sum(count for name, count in counts.items() if name.startswith(NONE))
    if not total:
        return ()
    if none == total:
        return ["No layer has a shared base: stored on its own, every matrix loses less for its bytes."]
    if none:
        return [
            f"Of {total} kinds of matrices, counted by layer, {total - none} are stored as deltas to a shared base."
        ]
    return ["Experts are stored as deltas to a shared base in every layer."]


def notes_on_size(output: int, original: int, ratio: float) -> Sequence[str]:
    """Whether an `output` of so many bytes leaves much of what the `ratio` allows."""
    if output >= _SPENT * (1 - ratio) * original:
        return ()
    return [f"Smaller than asked for, by {1 - output / original:.1%} and not {ratio:.1%}: no form on offer takes more."]


def summed(losses: Iterable[tuple[Key, float]]) -> dict[int, dict[Role, float]]:
    """What all experts lose together, by layer and role, to four digits; given by layer, role and expert."""
    parts: dict[int, dict[Role, list[float]]] = {}
    for (layer, role, _), loss in losses:
        parts.setdefault(layer, {}).setdefault(role, []).append(loss)
    return {
        layer: {role: float(f"{math.fsum(own):.4g}") for role, own in by_role.items()}
        for layer, by_role in parts.items()
    }
