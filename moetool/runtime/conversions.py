"""transformers' conversions of experts between files and model, for bases and placeholders, too."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping
from transformers.core_model_loading import Interleave, MergeModulelist, SplitModulelist, Transpose

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def conversions_of(model: "PreTrainedModel") -> list[Any]:
    """The conversions by which transformers saves a model that was built and not loaded, fit for moetool's tensors."""
    rules = get_model_conversion_mapping(model, add_legacy=False)
    found = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    for rule in found:
        if operations := getattr(rule, "operations", None):
            rule.operations = [fitting(operation) for operation in operations]
    return found


def fitting(operation: Any) -> Any:
    """An operation of transformers itself, or what takes its place where it would not do for moetool's tensors."""
    if type(operation) is Transpose and operation.check_dims:
        return TransposeIfNeeded(operation.dim0, operation.dim1, check_dims=True)
    return MergeExperts(operation.dim) if type(operation) is MergeModulelist else operation


def only(found: Any) -> Any:
    """A tensor, which conversions hand on by itself or in a list of one."""
    return found[0] if isinstance(found, list) else found


class MergeExperts(MergeModulelist):
    """Experts of one tensor, which are saved with all other dimensions of theirs, of whatever length."""

    @property
    def reverse_op(self) -> "_SplitExperts":
        return _SplitExperts(self.dim)


class _SplitExperts(SplitModulelist):
    """transformers 5.17 to 5.22 leaves out every dimension of length one: a placeholder `[1, 1]` would lose both."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **options: Any
    ) -> dict[str, Any]:
        shapes = []
        for found in input_dict.values():
            tensor = only(found)
            shapes += [tensor.select(self.dim, 0).shape] * tensor.size(self.dim)
        split = super().convert(input_dict, source_patterns, target_patterns, **options)
        return {name: own.reshape(shape) for (name, own), shape in zip(split.items(), shapes, strict=True)}

    @property
    def reverse_op(self) -> MergeExperts:
        return MergeExperts(self.dim)


class TransposeIfNeeded(Transpose):
    """Turns experts round where the file has them as `[in, out]`. Placeholders of bases, which are no parameters, stay
    as they are."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **options: Any
    ) -> dict[str, Any]:
        held = options["model"].get_parameter_or_buffer(options["full_layer_name"])
        if isinstance(held, nn.Parameter):
            converted: dict[str, Any] = super().convert(input_dict, source_patterns, target_patterns, **options)
            return converted
        [found] = input_dict.values()
        tensor = only(found)
        return {self.get_target_pattern(input_dict, source_patterns, target_patterns): tensor}

    @property
    def reverse_op(self) -> "TransposeIfNeeded":
        return TransposeIfNeeded(self.dim1, self.dim0, check_dims=True)


class InterleaveIfNeeded(Interleave):
    """Changes the order of the rows of gate and up of all experts of a layer. Bases and placeholders of them, which
    have gate above up on disk, too, stay as they are."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **options: Any
    ) -> dict[str, Any]:
        [found] = input_dict.values()
        tensor = only(found)
        if len(tensor) == 1:
            return {target_patterns[0]: tensor}
        converted: dict[str, Any] = super().convert(input_dict, source_patterns, target_patterns, **options)
        return converted

    @classmethod
    def of(cls, operation: Any) -> Any:
        """The operation of transformers itself, or this in the place of one that changes an order of rows."""
        return cls(operation.dim, operation.inverse) if type(operation) is Interleave else operation

    @property
    def reverse_op(self) -> "InterleaveIfNeeded":
        return InterleaveIfNeeded(self.dim, inverse=not self.inverse)
