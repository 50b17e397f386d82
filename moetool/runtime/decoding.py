"""Decoding of tensors in another tool's format while transformers loads the result that they were passed on to.

transformers' loader gives each tensor of the files the name of a parameter, and has its conversions make that of all
that have it. Here all tensors that hold one matrix get the name that the matrix would have, and a conversion decodes
them before it does anything else.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming

from moetool.checkpoint.reader import Checkpoint
from moetool.runtime.conversions import only

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALONE = "moetool-stored"  # a pattern of no name: what is decoded is a parameter as it is


class _StoredParts:
    """Names of the tensors that hold matrices of a checkpoint, as the loader comes to see them.

    Attributes:
        matrices: name of the matrix that a tensor holds a part of, by the name of the tensor in the files.
        renamed: name of the matrix by the name of the tensor, after the loader's renamings of both.
    """

    def __init__(self, checkpoint: Checkpoint, renamings: Sequence[WeightRenaming]) -> None:
        self.checkpoint = checkpoint
        self.matrices = {part: name for name, form in checkpoint.forms.items() for part in (*form.parts, *form.notes)}
        rules = deepcopy(list(renamings))
        self.renamed = {_renamed(part, rules): _renamed(name, rules) for part, name in self.matrices.items()}

    def __deepcopy__(self, _: Any) -> "_StoredParts":
        return self  # the loader copies conversions for every parameter

    def decoded(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The matrix of that name, of the tensors that hold it, on their device."""
        form = self.checkpoint.forms[name]
        held = {part: tensor.cpu().to(self.checkpoint.stored[part].dtype) for part, tensor in parts.items()}

        def span(part: str, first: int, shape: tuple[int, ...]) -> Tensor:
            return held[part].reshape(-1)[first : first + math.prod(shape)].view(shape)

        rows = form.rows(span, 0, math.prod(form.shape[:-1]))
        return rows.view(form.shape).to(parts[form.parts[0]].device)


def _renamed(name: str, rules: Sequence[WeightRenaming]) -> str:
    """A name after all renamings: `apply_renamings` of transformers, which 5.17 to 5.19 do not have."""
    for rule in rules:
        name, _ = rule.rename_source_key(name)
    return name


class DecodingConversion(WeightConverter):
    """A conversion of transformers' loader, or none, of matrices that are decoded first."""

    def __init__(self, parts: _StoredParts, inner: WeightConverter | None) -> None:
        if inner is None:
            super().__init__([_ALONE], [_ALONE], [_Nothing()])
        else:
            sources, targets = inner._original_source_patterns, inner._original_target_patterns
            super().__init__([*sources], [*targets], inner.operations)
            self.force_cpu = inner.force_cpu
        self._parts, self.inner = parts, inner
        self._found: list[tuple[str, str, Any]] = []

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name of the parameter that a tensor belongs to, and the pattern that says so, if one does."""
        shown = self._parts.renamed.get(source_key)
        if self.inner is not None:
            renamed, pattern = self.inner.rename_source_key(source_key if shown is None else shown)
            return (source_key, None) if pattern is None else (renamed, pattern)
        return (source_key, None) if shown is None else (shown, _ALONE)

    def was_used(self) -> bool:
        """Whether the conversion itself has a tensor of the files, so that saving turns it round."""
        return self.inner is not None and self.inner.was_used()

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Remember a tensor of the files, which is not read yet."""
        super().add_tensor(target_key, source_key, source_pattern, future)
        self._found.append((source_key, source_pattern, len(self.collected_tensors[source_pattern]) - 1))

    def convert(self, layer_name: str, model: Any = None, **options: Any) -> dict[str, Any]:
        """Parameters by name, in the dtype that the model has for them."""
        collected = self.materialize_tensors()
        waiting: dict[str, dict[str, Tensor]] = {}
        matrices: dict[str, list[Tensor]] = {}
        for name, pattern, place in self._found:
            tensor, matrix = collected[pattern][place], self._parts.matrices.get(name)
            if matrix is not None:
                form, held = self._parts.checkpoint.forms[matrix], waiting.setdefault(matrix, {})
                held[name] = tensor
                if len(held) < len(form.parts) + len(form.notes):
                    continue
                tensor = self._parts.decoded(matrix, waiting.pop(matrix))
            matrices.setdefault(pattern, []).append(tensor)
        if self.inner is None:
            made: dict[str, Any] = {layer_name: matrices[_ALONE][0]}
        else:
            self.inner.collected_tensors.update(matrices)
            made = self.inner.convert(layer_name, model=model, **options)
        return {name: _as_held(model, name, tensor) for name, tensor in made.items()}


def _as_held(model: "PreTrainedModel", name: str, made: Any) -> Tensor:
    tensor: Tensor = only(made)
    return tensor.to(model.get_parameter_or_buffer(name).dtype)


class _Nothing:
    """In the place of an operation, where a conversion needs one."""

    supports_many_to_many = False


def decoding(conversions: Sequence[Any], checkpoint: Checkpoint) -> list[Any]:
    """The loader's conversions of the files of a checkpoint that decode first what is stored in another tool's
    format."""
    parts = _StoredParts(checkpoint, [rule for rule in conversions if isinstance(rule, WeightRenaming)])
    own = [DecodingConversion(parts, rule) if isinstance(rule, WeightConverter) else rule for rule in conversions]
    return [*own, DecodingConversion(parts, None)]


def without_decoding(conversions: Sequence[Any]) -> list[Any]:
    """The conversions by which a model is saved whose matrices have been decoded, of those that were used."""
    return [rule.inner if isinstance(rule, DecodingConversion) else rule for rule in conversions]
