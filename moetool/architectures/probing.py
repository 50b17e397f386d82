"""Names on disk that transformers gives to a model's tensors, found by inverting its own conversion on numbered probes.

The names alone would not say which of two matrices is the gate: probes are small tensors whose numbers tell where each
of them went.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moetool.architectures.fused_layout import PLAIN, FusedLayout, stacked
from moetool.architectures.shape import ROLES, Role, fused_name
from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

_OWN = "moetool_probe"  # stands for moetool's own tensors
_EXPERTS, _ROWS = 2, 2  # in the probes of experts, whose matrices have one column
_OWN_NUMBER, _SEEN = -1, -2  # in the probe of moetool's own tensors, and in those that tell nothing new
_FIRST = 16  # number of the first tensor beside them; below 2048 numbers are exact in 16 bits


@dataclass(frozen=True)
class DiskNames:
    """Names on disk of what lies in a decoder layer.

    Attributes:
        layer: prefix of a layer, with `{layer}`.
        own: prefix of moetool's own tensors beside the experts, relative to the layer.
        weights: an expert's matrices, relative to the layer, with `{expert}` unless all lie in one tensor.
        others: by name in memory, relative to the layer, the names of every other tensor, relative to the layer too.
        on_disk: how matrices lie in one tensor for all experts, if they do.
    """

    layer: str
    own: str
    weights: Mapping[Role, str]
    others: Mapping[str, tuple[str, ...]]
    on_disk: FusedLayout


def names_in_layers(
    model: "PreTrainedModel",
    experts: str,
    layers: Mapping[int, Mapping[str, "Tensor"]],
    prefix: str,
    groups: Sequence[Sequence[Role]],
    in_memory: FusedLayout,
) -> DiskNames:
    """Find the names on disk of the tensors of some decoder layers, of which the first must have experts.

    Args:
        model: on any device; only its class and its config are read.
        experts: path of the experts, relative to the layer.
        layers: of some layers, by index, the tensors by name relative to the layer.
        prefix: of a layer in memory, with `{layer}`.
        groups: an expert's matrices, those together that share a fused tensor.
        in_memory: how they lie in it.

    Raises:
        InvalidInputError: experts lie on disk in a way that moetool does not read.
    """
    from transformers.core_model_loading import revert_weight_conversion

    matrices = {f"{experts}.{fused_name(roles)}": in_memory.fused(_matrices(roles)) for roles in groups}
    probes, numbered = _probes(experts, layers, prefix, matrices)
    found = _Found(revert_weight_conversion(model, probes))
    own = found.holding(_OWN_NUMBER)
    layer, own_inside = found.split(own[0]) if len(own) == 1 else ("", "")
    if not own_inside.endswith(f"experts.{_OWN}"):
        raise InvalidInputError(f"beside its experts on disk there is no room for other tensors ({', '.join(own)})")
    _check_own_names(model, own[0].removesuffix(_OWN), f"{prefix.format(layer=next(iter(layers)))}.{experts}.", groups)
    others: dict[str, tuple[str, ...]] = {}
    for number, name in numbered.items():
        inside = tuple(found.split(place)[1] for place in found.holding(number))
        others[name] = inside
    weights, on_disk = found.weights(groups, in_memory)
    return DiskNames(layer, own_inside.removesuffix(_OWN), weights, others, on_disk)


def _matrices(roles: Sequence[Role]) -> "list[Tensor]":
    """Probes `[experts, rows, 1]` of the experts' matrices, each row of which has a number of its own."""
    import torch

    size = _EXPERTS * _ROWS
    starts = (ROLES.index(role) * size for role in roles)
    return [
        torch.arange(start, start + size, dtype=torch.float16, device="cpu").view(_EXPERTS, _ROWS, 1)
        for start in starts
    ]


def _check_own_names(model: "PreTrainedModel", on_disk: str, in_memory: str, groups: Sequence[Sequence[Role]]) -> None:
    """Raise `InvalidInputError` if what transformers renames when it loads is also a part of moetool's own names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model, None, None)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    renamings += undoing(renamings, on_disk)
    for role in (role for roles in groups for role in roles):
        own = f"moetool.0.{role}.matrix"
        renamed, _ = rename_source_key(on_disk + own, renamings, [])
        if renamed != in_memory + own:
            raise InvalidInputError(
                f"transformers renames tensors of its files in a way that does not leave other names alone ({on_disk}"
                f"{own} would become {renamed})"
            )


def undoing(renamings: "Sequence[WeightTransform]", on_disk: str) -> "list[WeightTransform]":
    """Renamings to run after transformers' own `renamings`, which undo what those do to moetool's tensors: parts of
    their names may equal parts of a family's names (`gate` of Mistral Large 4). The tensors' names begin with
    `on_disk`."""
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    undone = []
    for role in ROLES:
        renamed, _ = rename_source_key(f"{on_disk}moetool.0.{role}.matrix", list(renamings), [])
        inside = renamed.partition(".moetool.0.")[2].removesuffix("matrix")
        if inside and inside != f"{role}.":
            undone.append(WeightRenaming(rf"\.(moetool\.\w+)\.{re.escape(inside)}", rf".\1.{role}."))
    return undone


def _probes(
    experts: str, layers: Mapping[int, Mapping[str, "Tensor"]], prefix: str, matrices: Mapping[str, "Tensor"]
) -> tuple[dict[str, "Tensor"], dict[int, str]]:
    """Probes by full name in memory, and which number stands for which tensor."""
    import torch

    probe_of = partial(torch.tensor, dtype=torch.float16, device="cpu")
    probes: dict[str, Tensor] = {}
    numbered: dict[int, str] = {}
    seen: set[str] = set()
    for layer, tensors in layers.items():
        start = prefix.format(layer=layer)
        for name, tensor in tensors.items():
            if name in matrices:
                probe = matrices[name].new_full(matrices[name].shape, _SEEN) if name in seen else matrices[name]
            else:
                number = _SEEN if name in seen else _FIRST + len(numbered)
                probe = probe_of([number]).expand(tensor.shape)
                numbered |= {} if name in seen else {number: name}
            probes[f"{start}.{name}"] = probe
            seen.add(name)
    probes[f"{prefix.format(layer=next(iter(layers)))}.{experts}.{_OWN}"] = probe_of([_OWN_NUMBER])
    return probes, numbered


class _Found:
    """Probes as transformers names them on disk, looked up by the numbers that they hold."""

    def __init__(self, tensors: Mapping[str, "Tensor"]) -> None:
        self._tensors = tensors
        self._numbers = {name: tensor[(0,) * tensor.ndim].item() for name, tensor in tensors.items() if tensor.numel()}

    def holding(self, number: int) -> list[str]:
        return sorted(name for name, found in self._numbers.items() if found == number)

    def split(self, name: str) -> tuple[str, str]:
        """A name's prefix of a layer, as a template, and the rest."""
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            return "", name
        return ".".join([*parts[:at], "{layer}"]), ".".join(parts[at + 1 :])

    def weights(self, groups: Sequence[Sequence[Role]], in_memory: FusedLayout) -> tuple[dict[Role, str], FusedLayout]:
        """Names of an expert's matrices, and how these lie where all experts share a tensor. Raises
        `InvalidInputError`."""
        names: dict[Role, str] = {}
        if stacks := self._stacks(groups):
            return stacks, FusedLayout(is_stacked=True)
        layouts = [FusedLayout(turned, takes_turns) for takes_turns in (False, True) for turned in (False, True)]
        for roles in groups:
            matrices = dict(zip(roles, _matrices(roles), strict=True))
            found = [name for name, number in self._numbers.items() if any(number in own for own in matrices.values())]
            if len(found) == 1:
                whole = self._tensors[found[0]]
                layouts = [own for own in layouts if own.fused([*matrices.values()]).equal(whole)]
                names |= dict.fromkeys(roles, self.split(found[0])[1])
                continue
            by_rows = {tuple(self._tensors[name].flatten().tolist()): name for name in found}
            for role, matrix in matrices.items():
                if len(found) == len(roles):  # all experts' in a tensor of their own
                    name = by_rows.pop(tuple(matrix.flatten().tolist()), "")
                    names |= {role: self.split(name)[1]} if name else {}
                    continue
                parts = [by_rows.pop(tuple(own.flatten().tolist()), "") for own in matrix]
                names |= {role: self._template(*parts)} if all(parts) else {}
            layouts = [] if by_rows else [PLAIN]
        alike = {"{expert}" in name for name in names.values()}
        if not layouts or len(alike) > 1 or len(names) < sum(map(len, groups)):
            raise InvalidInputError(
                "on disk its experts' matrices lie in another order than gate, up and down of each expert, or of all "
                f"({', '.join(self._holding_matrices(groups))})"
            )
        return names, layouts[0]

    def _stacks(self, groups: Sequence[Sequence[Role]]) -> dict[Role, str]:
        """Names of the tensors in which the matrices of all experts lie below each other; empty if there are none."""
        names: dict[Role, str] = {}
        for role in (role for roles in groups for role in roles):
            [matrices] = _matrices([role])
            whole = stacked([*matrices], role)
            alike = [name for name, tensor in self._tensors.items() if tensor.shape == whole.shape]
            if (found := next((name for name in alike if self._tensors[name].equal(whole)), None)) is not None:
                names[role] = self.split(found)[1]
        return names if len(names) == sum(map(len, groups)) else {}

    def _holding_matrices(self, groups: Sequence[Sequence[Role]]) -> list[str]:
        numbers = [matrix for roles in groups for matrix in _matrices(roles)]
        return sorted(name for name, number in self._numbers.items() if any(number in own for own in numbers))[:4]

    def _template(self, first: str, second: str) -> str:
        """The name, relative to its layer, with `{expert}` where the names of experts 0 and 1 differ."""
        parts = [self.split(name)[1].split(".") for name in (first, second)]
        if len(parts[0]) != len(parts[1]):
            raise InvalidInputError(f"names of its experts on disk differ in more than a number ({first}, {second})")
        pairs = ["{expert}" if pair == ("0", "1") else pair[0] for pair in zip(parts[0], parts[1], strict=True)]
        template = ".".join(pairs)
        if [template.format(expert=expert).split(".") for expert in range(2)] != parts:
            raise InvalidInputError(f"names of its experts on disk differ in more than a number ({first}, {second})")
        return template
