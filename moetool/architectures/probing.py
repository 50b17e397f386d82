"""What transformers calls a model's tensors on disk, found by turning its own conversion round on numbered probes.

The names alone would not say which of two matrices is the gate: probes are small tensors whose numbers tell where each
of them went.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from moetool.architectures.base import ROLES, Role
from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_OWN = "moetool_probe"  # stands for moetool's own tensors
_GATE_UP, _DOWN = range(8), range(8, 12)  # numbers in the probes of two experts, of two rows per matrix
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
        is_transposed: all experts' matrices lie in one tensor as `[experts, in, out]`.
    """

    layer: str
    own: str
    weights: Mapping[Role, str]
    others: Mapping[str, tuple[str, ...]]
    is_transposed: bool


def names_in_layers(
    model: "PreTrainedModel", experts: str, layers: Mapping[int, Mapping[str, "Tensor"]], prefix: str
) -> DiskNames:
    """Names on disk of the tensors of some decoder layers, of which the first has experts.

    Args:
        model: on any device; only its class and its config are read.
        experts: path of the experts, relative to the layer.
        layers: of some layers, by index, the tensors by name relative to the layer.
        prefix: of a layer in memory, with `{layer}`.

    Raises:
        InvalidInputError: experts lie on disk in a way that moetool does not read.
    """
    from transformers.core_model_loading import revert_weight_conversion

    probes, numbered = _probes(experts, layers, prefix)
    found = _Found(revert_weight_conversion(model, probes))
    own = found.holding(_OWN_NUMBER)
    layer, own_inside = found.split(own[0]) if len(own) == 1 else ("", "")
    if not own_inside.endswith(f"experts.{_OWN}"):
        raise InvalidInputError(f"beside its experts on disk there is no room for other tensors ({', '.join(own)})")
    _check_own_names(model, own[0].removesuffix(_OWN), f"{prefix.format(layer=next(iter(layers)))}.{experts}.")
    others: dict[str, tuple[str, ...]] = {}
    for number, name in numbered.items():
        inside = tuple(found.split(place)[1] for place in found.holding(number))
        others[name] = inside
    return DiskNames(layer, own_inside.removesuffix(_OWN), found.weights(), others, found.is_transposed())


def _check_own_names(model: "PreTrainedModel", on_disk: str, in_memory: str) -> None:
    """Raise `InvalidInputError` if what transformers renames when it loads is also a part of moetool's own names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model, None, None)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    for role in ROLES:
        own = f"moetool.0.{role}.matrix"
        renamed, _ = rename_source_key(on_disk + own, renamings, [])
        if renamed != in_memory + own:
            raise InvalidInputError(
                f"transformers renames tensors of its files in a way that does not leave other names alone ({on_disk}"
                f"{own} would become {renamed})"
            )


def _probes(
    experts: str, layers: Mapping[int, Mapping[str, "Tensor"]], prefix: str
) -> tuple[dict[str, "Tensor"], dict[int, str]]:
    """Probes by full name in memory, and which number stands for which tensor."""
    import torch

    probe_of = partial(torch.tensor, dtype=torch.float16, device="cpu")
    probes: dict[str, Tensor] = {}
    numbered: dict[int, str] = {}
    seen: set[str] = set()
    matrices = {f"{experts}.gate_up_proj": (_GATE_UP, (2, 4, 1)), f"{experts}.down_proj": (_DOWN, (2, 2, 1))}
    for layer, tensors in layers.items():
        start = prefix.format(layer=layer)
        for name, tensor in tensors.items():
            if name in matrices:
                numbers, shape = matrices[name]
                probe = probe_of([_SEEN] * len(numbers) if name in seen else [*numbers]).view(shape)
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

    def weights(self) -> dict[Role, str]:
        """Names of an expert's matrices. Raises `InvalidInputError`."""
        entering = {name: self._listed(name) for name in self._within(_GATE_UP)}
        leaving = {name: self._listed(name) for name in self._within(_DOWN)}
        if sorted(entering.values()) == [[*_GATE_UP]] and sorted(leaving.values()) == [[*_DOWN]]:
            (both,), (down,) = entering, leaving
            return {"gate": self.split(both)[1], "up": self.split(both)[1], "down": self.split(down)[1]}
        pairs = [[first, first + 1] for first in (*_GATE_UP, *_DOWN)[::2]]
        by_rows = {tuple(rows): name for name, rows in {**entering, **leaving}.items()}
        if sorted([*entering.values(), *leaving.values()]) != pairs:
            raise InvalidInputError(
                "on disk its experts' matrices lie in another order than gate, up and down of each expert, or of all "
                f"({', '.join([*entering, *leaving][:4])})"
            )
        gate, up, gate_of_next, up_of_next, down, down_of_next = (by_rows[tuple(pair)] for pair in pairs)
        return {
            "gate": self._template(gate, gate_of_next),
            "up": self._template(up, up_of_next),
            "down": self._template(down, down_of_next),
        }

    def is_transposed(self) -> bool:
        """Whether a tensor that has the rows of two experts has them in its last dimension."""
        return any(
            tensor.ndim == 3 and tensor.shape[2] > 1
            for name in self._within(_GATE_UP)
            for tensor in [self._tensors[name]]
        )

    def _within(self, numbers: range) -> Iterator[str]:
        return (name for name, number in self._numbers.items() if number in numbers)

    def _listed(self, name: str) -> list[int]:
        return [int(number) for number in self._tensors[name].flatten().tolist()]

    def _template(self, first: str, second: str) -> str:
        """The name, relative to its layer, with `{expert}` where the names of experts 0 and 1 differ."""
        parts = [self.split(name)[1].split(".") for name in (first, second)]
        if len(parts[0]) != len(parts[1]):
            raise InvalidInputError(f"names of its experts on disk differ in more than a number ({first}, {second})")
        pairs: list[Any] = [
            "{expert}" if pair == ("0", "1") else pair[0] for pair in zip(parts[0], parts[1], strict=True)
        ]
        template = ".".join(pairs)
        if [template.format(expert=expert).split(".") for expert in range(2)] != parts:
            raise InvalidInputError(f"names of its experts on disk differ in more than a number ({first}, {second})")
        return template
