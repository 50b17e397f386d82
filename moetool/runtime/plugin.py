"""Plug-in by which transformers loads moetool checkpoints: a quantizer that is used as a loader only.

`config.json` says `"quantization_config": {"quant_method": "moetool", ...}`. On loading, the experts of the listed
layers are replaced by `SharedBaseExperts`, and what is quantized beside them by modules of codes, before the weights
arrive; afterwards the model is an ordinary float model that generates, trains, moves between devices and saves.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from moetool.architectures.base import Settings
from moetool.architectures.probing import undoing
from moetool.architectures.shape import fused_name
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import filled_in
from moetool.errors import InvalidInputError
from moetool.format.beside import quantizable
from moetool.format.entry import check_format_version, layer_layouts
from moetool.format.families import architecture_of
from moetool.format.marker import BESIDE, METHOD, STORED, version_of
from moetool.numerics.index_sets import are_indices
from moetool.runtime.conversions import InterleaveIfNeeded, fitting
from moetool.runtime.decoding import DecodingConversion, decoding, without_decoding
from moetool.runtime.memory import sparing_memory
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import CustomLayer, insert_modules, path_in, paths_in
from moetool.runtime.modules.linear import multiply_by_kernels
from moetool.runtime.modules.quantized import QuantizedModule
from moetool.runtime.modules.quantized_in_model import (
    fill_embeddings,
    insert_quantized,
    quantized_modules,
    still_quantized,
)
from moetool.runtime.modules.shared_expert import SharedExpertOnBase

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Below transformers' own logger, so that its verbosity is ours.
_LOGGER = logging.get_logger(f"transformers.{__name__}")


class _Described:
    """The model that an entry of a config describes. Copies of a model have entries that describe the copy."""

    def __init__(self, model: "PreTrainedModel | None" = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __call__(self) -> "PreTrainedModel | None":
        return None if self._model is None else self._model()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Described":
        return _Described(memo.get(id(model), model) if (model := self()) is not None else None)

    def __reduce__(self) -> Any:
        return _Described, ()


class _Unwritable(dict[str, str]):
    """In the place of what cannot be described: raises its error when it is written, and not when peft looks at the
    config of a model that it has not finished with."""

    def __init__(self, error: InvalidInputError) -> None:
        super().__init__(error=str(error))
        self._error = error

    def items(self) -> NoReturn:
        """Raise the error: this is how a dictionary is turned into JSON."""
        raise self._error


class MoetoolConfig(QuantizationConfigMixin):
    """The `quantization_config` of a moetool checkpoint, as it was read, but for modules that are dense now."""

    _described = _Described()

    def __init__(self, **entries: object) -> None:
        entries.pop("quant_method", None)
        self.quant_method = METHOD
        check_format_version(entries)
        for name, value in entries.items():
            setattr(self, name, value)

    def leave_stored(self) -> None:
        """Forget the format of tensors that have been decoded."""
        delattr(self, STORED)
        self.format_version = version_of(self.__dict__)

    def to_dict(self) -> dict[str, Any]:
        """The entry for `config.json`, of what the model holds now. If that could not be read again, writing the entry
        raises `InvalidInputError`."""
        entry: dict[str, Any] = super().to_dict()
        entry.pop("_described", None)
        beside = entry.get(BESIDE)
        if (model := self._described()) is not None and isinstance(beside, dict):
            try:
                coded = still_quantized(model)
            except InvalidInputError as error:
                return {**entry, BESIDE: _Unwritable(error)}
            entry[BESIDE] = {name: beside[name] for name, path in paths_in(model, beside).items() if path in coded}
        return entry


class MoetoolQuantizer(HfQuantizer):
    """Puts `SharedBaseExperts` where the config lists them, and gets out of the way."""

    requires_calibration = True  # a dense checkpoint cannot be compressed by passing a quantization_config
    _checkpoint: Checkpoint | None = None  # whose tensors in another tool's format are to be decoded

    def preprocess_model(self, model: "PreTrainedModel", *arguments: Any, **options: Any) -> None:
        """The model without weights becomes what the config lists, and memory is spared until it has them."""
        files = options.get("checkpoint_files")
        if files and getattr(self.quantization_config, STORED, None):
            with torch.device("cpu"):  # the model is built without memory
                self._checkpoint = Checkpoint.open(Path(files[0]).parent)
        super().preprocess_model(model, *arguments, **options)
        self._sparing = ExitStack()
        self._sparing.enter_context(sparing_memory())
        weakref.finalize(self, self._sparing.close)  # where loading fails, nothing else would

    def postprocess_model(self, model: "PreTrainedModel", **options: Any) -> "PreTrainedModel":
        """Finish loading: the model, whose weights are all in place, becomes an ordinary one."""
        # Which need more than is loaded with this module.
        from moetool.runtime.attention import attend_by_kernels
        from moetool.runtime.modules.token_attention import attend_in_one_call
        from moetool.runtime.modules.token_layer import decode_in_few_calls
        from moetool.runtime.modules.token_model import decode_in_one_call

        model = super().postprocess_model(model, **options)
        self._sparing.close()
        attend_by_kernels(model)
        multiply_by_kernels(model)
        attend_in_one_call(model)
        decode_in_few_calls(model)
        decode_in_one_call(model)
        return model

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **_: object) -> None:
        self._loading = weakref.ref(model)
        config = self._described(model)
        insert_modules(model, config)
        if self.quantization_config.to_dict().get("layers"):
            self._replace_experts(model, config)
        insert_quantized(model, config)
        self._dtypes = {name: tensor.dtype for name, tensor in _tensors(model)}
        self._shapes = {name: tensor.shape for name, tensor in _own_tensors(model)}

    def _described(self, model: "PreTrainedModel") -> Settings:
        """The settings of a model, with the entry by which it is loaded."""
        config = filled_in(model.config, {})
        config["quantization_config"] = _named_for(model, config, self.quantization_config.to_dict())
        return config

    def update_weight_conversions(self, weight_conversions: list[Any], *given: "PreTrainedModel") -> list[Any]:
        """transformers' conversions of files, which take placeholders, too, and leave moetool's own names alone.

        The model that is loaded is `given`; transformers 5.17 to 5.19 do not name it.
        """
        conversions: list[Any] = super().update_weight_conversions(weight_conversions, *given)
        model = given[0] if given else self._loading()
        assert model is not None
        entering = None
        if self.quantization_config.to_dict().get("layers"):
            architecture = architecture_of(self._described(model))
            entering = f"{architecture.experts_module}.{fused_name(architecture.shape.entering)}"
            renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
            conversions += undoing(renamings, architecture.experts_prefix(architecture.moe_layers[0]))
        for conversion in conversions:
            if operations := getattr(conversion, "operations", None):
                operations = [fitting(operation) for operation in operations]
                if conversion.target_patterns == [entering]:
                    operations = [InterleaveIfNeeded.of(operation) for operation in operations]
                conversion.operations = operations
        return conversions if self._checkpoint is None else decoding(conversions, self._checkpoint)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """The dtype to read a tensor in: its own (`None`) where it is decoded.

        Raises:
            InvalidInputError: the loader would take codes for the numbers that they stand for.
        """
        if isinstance(converter, DecodingConversion):
            return None
        if self._checkpoint is not None and (names := self._coded & set(converter.source_patterns)):
            raise InvalidInputError(
                f"{min(names)} is in few bits, which transformers would take for the numbers that they stand for: its "
                "name is none that the family has on disk. Give tensors the names of their family."
            )
        return super().get_new_dtype(converter, param, dtype)

    @cached_property
    def _coded(self) -> set[str]:
        """Names of the tensors in the files that are to be decoded."""
        forms = {} if self._checkpoint is None else self._checkpoint.forms
        return {part for form in forms.values() for part in form.parts}

    def _replace_experts(self, model: "PreTrainedModel", config: Settings) -> None:
        architecture = architecture_of(config)
        layouts = layer_layouts(config)
        if any(layout.dynamic_channels for layout in layouts.values()):
            _LOGGER.warning(BATCH_DEPENDENT)
        for layer, layout in layouts.items():
            path = path_in(model, f"{architecture.layer_path(layer)}.{architecture.experts_module}")
            experts = SharedBaseExperts(model.get_submodule(path), layout)
            model.set_submodule(path, experts)
            if layout.is_extended:
                beside = path.removesuffix(architecture.experts_module) + architecture.shared_expert_module
                names = architecture.shared_expert
                model.set_submodule(beside, SharedExpertOnBase(experts, model.get_submodule(beside), names))

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **_: object) -> "PreTrainedModel":
        fill_embeddings(model)
        # transformers does not fail on tensors that are missing from a file; it leaves memory as it found it.
        own = [*_own_tensors(model)]
        missing = [
            name
            for name, tensor in own
            if not getattr(tensor, "_is_hf_initialized", False) and tensor.device.type != "meta"
        ]
        if missing:
            raise RuntimeError(
                f"moetool tensors are missing from the checkpoint: {missing[:4]} ({len(missing)} in all)"
            )
        # Nor do versions 5.17 to 5.22 fail on a wrong shape where there is a quantizer.
        for name, tensor in own:
            if (expected := self._shapes.get(name, tensor.shape)) != tensor.shape:
                raise RuntimeError(f"size mismatch for {name}: {list(tensor.shape)} in the files, not {list(expected)}")
        _check_indices(model)
        # Older transformers leave tensors that they rename in the dtype of the file, whatever was asked for.
        for name, tensor in _tensors(model):
            if tensor.device.type != "meta" and tensor.dtype != self._dtypes.get(name, tensor.dtype):
                tensor.data = tensor.data.to(self._dtypes[name])
        # As long as the model counts as quantized, .half(), Trainer fine-tuning and save_pretrained(state_dict=...)
        # are blocked or ignored. Only `config.quantization_config` stays, so that saving writes it back.
        for _name, quantized in quantized_modules(model):
            quantized.is_filled = True
        self.quantization_config._described = _Described(model)
        if getattr(self.quantization_config, STORED, None):
            # What is saved from now on has the matrices, and no longer what they were decoded from.
            model._weight_conversions = without_decoding(getattr(model, "_weight_conversions", ()))
            self.quantization_config.leave_stored()
        model.is_quantized = False
        del model.hf_quantizer, model.quantization_method
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _named_for(model: "PreTrainedModel", config: Settings, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry, in which modules have the names that the model's family has for them: the entry of a model with
    others around it also describes the language model by itself."""
    if not (beside := entry.get(BESIDE)):
        return entry
    architecture = architecture_of(config)
    known = {name for names in quantizable(architecture).values() for name in names}
    paths = paths_in(model, [name for name in beside if name not in known])
    return {**entry, BESIDE: {paths.get(name, name): form for name, form in beside.items()}}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are to be in the model's dtype: parameters, and the placeholders of bases."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        if isinstance(module, SharedBaseExperts):
            for name, buffer in module.named_buffers(path, recurse=False):
                if buffer.is_floating_point():
                    yield name, buffer


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each parameter and buffer of moetool's modules in a model."""
    for path, module in model.named_modules():
        if isinstance(module, SharedBaseExperts | CustomLayer | QuantizedModule):
            yield from module.named_parameters(path)
            yield from module.named_buffers(path)


def _check_indices(model: nn.Module) -> None:
    """Raise `InvalidInputError` for indices in the files that lie outside of what they index: a card would not say so,
    and not go on either."""
    for path, module in model.named_modules():
        for name, limit in getattr(module, "index_limits", {}).items():
            indices = module.get_buffer(name)
            if indices.device.type != "meta" and not are_indices(indices, limit):
                raise InvalidInputError(f"{path}.{name} must hold different indices below {limit}, and does not.")


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(MoetoolConfig)
    register_quantizer(METHOD)(MoetoolQuantizer)
