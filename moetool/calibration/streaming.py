"""A model of which only one decoder layer is in memory at a time.

The model is built on the meta device, so every part keeps transformers' own code: embeddings, masks, rotary positions,
layers, final norm, head and loss. Layers are filled from the checkpoint when they are needed and emptied afterwards.
Tensors of the experts are read one matrix at a time; everything else goes through transformers' own loader.
Layers of a moetool checkpoint are filled with the dense experts they stand for.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from moetool.architectures import Architecture, Role
from moetool.architectures.dense import DenseArchitecture, is_encoder
from moetool.architectures.described import language_model_in, towers_in
from moetool.architectures.fused_layout import layout_of
from moetool.architectures.shape import by_name
from moetool.calibration.blocks import OUTSIDE, blocks_of
from moetool.calibration.disk_experts import DiskExperts
from moetool.calibration.handed_on import Beside, HandedOn, LayerCall
from moetool.calibration.held_experts import HeldExperts, working_sets
from moetool.checkpoint.decoded import decoded
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.promises import check_shape
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in, model_config
from moetool.errors import InvalidInputError
from moetool.kernels.rounding import exact_products
from moetool.quiet import quiet
from moetool.runtime.loading import model_class, run_experts_of_any_width
from moetool.runtime.memory import return_heap
from moetool.runtime.modules.fused import fused_tensors
from moetool.runtime.modules.insertion import insert_modules
from moetool.runtime.modules.simoe_mixing import weigh_equally

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StreamedModel:
    """A causal language model whose decoder layers are loaded one by one.

    Attributes:
        config: transformers' config of the (dense-expert) model.
        layer_count: number of decoder layers.
        hidden_size: width of the hidden states that experts are given.
        experts: reads the experts; `None` for a dense model, and for one with custom MoE layers.
        working_sets: which experts of a layer are in memory together; one set if a loaded layer holds all of them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: Architecture | DenseArchitecture,
        dtype: torch.dtype,
        device: torch.device,
        *,
        experts_on_disk: bool = False,
        experts_at_once: int | None = None,
    ) -> None:
        """With `experts_on_disk` not even one layer's experts are in memory together: each is read when it runs. So
        with fewer `experts_at_once` than there are, for passes of many batches (`Sweep`)."""
        checkpoint = decoded(checkpoint)
        self.checkpoint, self.architecture, self.dtype, self.device = checkpoint, architecture, dtype, device
        self.experts = ExpertReader(checkpoint, architecture) if isinstance(architecture, Architecture) else None
        self._experts_on_disk = experts_on_disk
        count = 1 if self.experts is None else self.experts.shape.experts
        self.working_sets = working_sets(count, experts_at_once or count)
        self._held: HeldExperts | None = None
        self.config = model_config(checkpoint.config, checkpoint.path)
        self.config._name_or_path = ""
        with described_in(checkpoint.path), torch.device("meta"):
            self.model: PreTrainedModel = model_class(checkpoint.config).from_config(self.config, dtype=dtype)
            insert_modules(self.model, checkpoint.config)
            weigh_equally(self.model)
            self.model.eval().requires_grad_(False)
        _with_language_first(self.model)
        run_experts_of_any_width(self.model)
        self._uncached = {} if is_encoder(checkpoint.config) else {"use_cache": False}
        text = self.config.get_text_config()
        self.layer_count = architecture.layers
        self.hidden_size = int(text.hidden_size) if self.experts is None else self.experts.shape.hidden
        # get_decoder() is not right for every family; the decoder is what holds the layers.
        held = (architecture.layer_module or architecture.layer).split(".")[-2]
        holder: Any = next(
            module
            for module in language_model_in(self.model)[1].modules()
            if isinstance(getattr(module, held, None), nn.ModuleList) and len(getattr(module, held)) == self.layer_count
        )
        self._decoder, self.layers = holder, getattr(holder, held)
        self._aside = {part for _, tower in towers_in(self.model) for part in tower.modules()}  # stay without weights
        self._beside = Beside(architecture.handed_channels if isinstance(architecture, Architecture) else 0, dtype)
        self._calls: dict[tuple[int, ...], list[LayerCall]] = {}  # how each layer is called, by batch size and length
        self._tried: set[int] = set()  # layers that have run, −1 for what is before them
        self._called_with: Tensor | None = None  # tokens of the last calls, of layers that are called with some
        self._depends_on_tokens, self._is_tried = False, False  # whether they are, and whether that is known
        mapping = get_model_conversion_mapping(self.model, None, None)
        self._loading = LoadStateDictConfig(
            dtype=dtype, device_map={"": device}, weight_mapping=mapping, dtype_plan=self.model._get_dtype_plan(dtype)
        )
        layers = {architecture.layer_prefix(layer): layer for layer in range(self.layer_count)}
        self._blocks = blocks_of(checkpoint, self.model, mapping, layers, self.experts)
        self._load_block(OUTSIDE)
        self._finish_rest()

    def _load_block(self, block: int) -> None:
        # Cast here and not by the loader, which leaves some tensors in their storage dtype in older versions.
        tensors = {name: self.checkpoint.read(name).to(dtype) for name, dtype in self._blocks.get(block, {}).items()}
        with quiet():
            info, _ = convert_and_load_state_dict_in_model(self.model, tensors, self._loading)
        if info.mismatched_keys:
            name, found, expected = min(info.mismatched_keys)
            check_shape(self.checkpoint.path, name, found, expected)
        if info.conversion_errors:
            raise InvalidInputError(f"Tensors could not be loaded: {info.conversion_errors}.")
        # Remembers the last call only; nothing may be saved through it.
        self.model.__dict__.pop("_weight_conversions", None)

    def _finish_rest(self) -> None:
        """Tie what is tied, and rebuild buffers that no file holds (rotary frequencies)."""
        if getattr(self.model, "all_tied_weights_keys", None):
            parameters = self.model.named_parameters(remove_duplicate=False)
            missing = {name for name, parameter in parameters if parameter.device.type == "meta"}
            self.model.tie_weights(missing, recompute_mapping=False)
        for module in self.model.modules():
            if "RotaryEmbedding" in type(module).__name__ and module not in self._aside:
                fresh = type(module)(config=self.config.get_text_config()).to(self.device)
                module._buffers.update(fresh._buffers)
        without = {*self.layers.modules(), *self._aside}
        for module in self.model.modules():
            if module not in without:
                self._fill_buffers(module)
        self._require_loaded(module for module in self.model.modules() if module not in without)

    def _fill_buffers(self, module: nn.Module) -> None:
        """Other buffers that no file holds, as transformers itself makes them; what was loaded is marked as such."""
        missing = {
            name: torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device=self.device)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.device.type == "meta" and name in module._non_persistent_buffers_set
        }
        module._buffers.update(missing)
        for maker in (module, self._decoder) if missing else ():
            if any(buffer.isnan().any() for buffer in missing.values()) or maker is module:
                with torch.no_grad():
                    self.model._init_weights(maker)
        if unknown := [name for name, buffer in missing.items() if buffer.isnan().any()]:
            raise InvalidInputError(f"transformers does not say what {type(module).__name__}.{unknown[0]} is.")

    def _require_loaded(self, modules: Iterator[nn.Module]) -> None:
        names = {id(module): name for name, module in self.model.named_modules()}
        for module in modules:
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if tensor.device.type == "meta" and not tensor.numel():  # of a shared expert of no width
                    setattr(module, name, nn.Parameter(torch.empty_like(tensor, device=self.device)))
                elif tensor.device.type == "meta":
                    raise InvalidInputError(f"Tensor {names[id(module)]}.{name} is missing from the checkpoint.")

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """One decoder layer with its weights, for the time of the `with` block."""
        layer = self.layers[index]
        reader = self.experts if self.experts is not None and self.experts.has(index) else None
        experts = None if reader is None else layer.get_submodule(reader.architecture.experts_module)
        absent: set[nn.Module] = set()
        try:
            self._load_block(index)
            if reader is not None and experts is not None:
                if self._experts_on_disk:
                    experts.forward = DiskExperts(experts, reader, index, self.dtype, self.device)
                    absent.update(experts.modules())
                elif len(self.working_sets) > 1:
                    absent.update(experts.modules())
                else:
                    matrix = partial(reader.dense, index)
                    lies = layout_of(experts)
                    for name, fused in fused_tensors(reader.shape, matrix, self.dtype, self.device, lies):
                        setattr(experts, name, nn.Parameter(fused, requires_grad=False))
                    self._held = HeldExperts.of_layer(experts)
                if reader.layout(index).is_extended:
                    shared = layer.get_submodule(reader.architecture.shared_expert_module)
                    self._fill_shared_expert(reader, index, shared)
            for module in layer.modules():
                self._fill_buffers(module)
            self._require_loaded(module for module in layer.modules() if module not in absent)
            yield layer
        finally:
            if experts is not None:
                experts.__dict__.pop("forward", None)
            self._held = None
            computed = [
                (module, name, module._buffers[name])
                for module in layer.modules()
                for name in module._non_persistent_buffers_set
            ]
            layer.to("meta")
            for module, name, buffer in computed:  # no file has it
                module._buffers[name] = buffer

    @contextmanager
    def holding(self, index: int, native: nn.Module, experts: range) -> Iterator[HeldExperts]:
        """Some experts of a layer that holds none, for the time of the `with` block; `native` are its fused experts."""
        assert self.experts is not None
        try:
            self._held = HeldExperts.read(native, self.experts, index, experts, self.dtype, self.device)
            yield self._held
        finally:
            self._held = None
            return_heap()

    def matrix(self, expert: int, role: Role) -> Tensor:
        """The matrix `[out, in]` of an expert that is in memory, in the dtype that is computed in."""
        assert self._held is not None
        assert self.experts is not None
        return self._held.matrix(self.experts.shape, expert, role)

    def _fill_shared_expert(self, reader: ExpertReader, index: int, shared: nn.Module) -> None:
        """Read a shared expert that is stored on the base into transformers' own module."""
        for path, roles in by_name(reader.architecture.shared_expert).items():
            matrices = [reader.dense(index, reader.shape.experts, role) for role in roles]
            linear = shared.get_submodule(path.removesuffix(".weight"))
            linear.weight = nn.Parameter(torch.cat(matrices).to(self.device, self.dtype), requires_grad=False)

    @contextmanager
    def _layers_replaced(
        self, forward: Callable[[int, Tensor, tuple[object, ...], dict[str, object]], Tensor]
    ) -> Iterator[None]:
        """Let `forward` stand in for every decoder layer. An instance attribute wins over the class's method."""
        more = [HandedOn() for _ in range(self.architecture.handed_on)]

        def bind(index: int) -> Callable[..., object]:
            def replaced(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
                output = forward(index, hidden_states, args, kwargs)
                return (output, *more) if self.architecture.returns_tuple else output

            return replaced

        try:
            for index, layer in enumerate(self.layers):
                layer.forward = bind(index)
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding of tokens."""
        head = self.model.get_output_embeddings()
        return head is not None and head.weight is self.model.get_input_embeddings().weight

    @cached_property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of what a layer is given of each token: `(hidden,)`, or several hidden states."""
        return tuple(self.embed(torch.zeros(1, 2, dtype=torch.long)).shape[2:])

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Everything before the first layer: `[batch, length]` token ids → `[batch, length, hidden]`."""
        calls, first = self._record(tokens)
        if not self._is_tried:
            others, _ = self._record((tokens + 1) % self.config.get_text_config().vocab_size)
            changed, _ = self._record(tokens, factor=2)
            if not _are_same(calls, changed):
                self._refuse("are given what layers before the last have made")
            self._depends_on_tokens, self._is_tried = not _are_same(calls, others), True
        self._calls[tuple(tokens.shape)] = calls
        self._called_with = tokens if self._depends_on_tokens else None
        return first

    def _record(self, tokens: Tensor, factor: int = 1) -> tuple[list[LayerCall], Tensor]:
        """How every layer is called, and with which hidden states the first. Each layer gives the next so many times
        what it is given."""
        calls: list[LayerCall] = []
        first: list[Tensor] = []

        def record(index: int, hidden: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
            calls.append((args, kwargs))
            first.append(hidden)
            return hidden * factor if factor > 1 else hidden

        with self._layers_replaced(record), self._trying(-1):
            self.model.base_model(input_ids=tokens.to(self.device), **self._uncached)
        if first[0].shape[1] != tokens.shape[1]:
            self._refuse("see more than the tokens of a text")
        return calls, self._beside.joined(first[0], first[0].new_zeros(*first[0].shape[:2], self._beside.channels))

    def _refuse(self, how: str) -> NoReturn:
        raise InvalidInputError(
            f"The layers of {self.architecture.name} {how}: moetool, which runs one layer after the other on all of "
            "the text, cannot calibrate it."
        )

    @exact_products()
    def run_layer(self, index: int, layer: nn.Module, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """One decoder layer on `[batch, length, hidden]`, called exactly as the whole model would call it.

        Masks and positions depend on the batch's shape only: windows are not padded. `tokens` `[batch, length]` are
        those that the hidden states are of; some layers are called with them too, or with embeddings of theirs.

        Raises:
            InvalidInputError: the layer uses more than the hidden states that another has made, or needs the tokens.
        """
        shape = tuple(hidden.shape[:2])
        if shape not in self._calls:
            self.embed(torch.zeros(shape, dtype=torch.long) if tokens is None else tokens)
        if self._depends_on_tokens:
            if tokens is None:
                self._refuse("are called with the tokens, not with hidden states alone")
            if self._called_with is None or not torch.equal(self._called_with, tokens):
                self.embed(tokens)
        hidden, beside = self._beside.parts(hidden)
        args, kwargs = self._beside.given(self._calls[shape][index], beside)
        before = _entries(kwargs)
        try:
            with self._trying(index):
                output = layer(hidden, *args, **kwargs)
        except InvalidInputError:
            entries = (entry for value in kwargs.values() if isinstance(value, Mapping) for entry in value.values())
            if any(isinstance(value, HandedOn) for value in (*args, *kwargs.values(), *entries)):
                self._refuse("hand more than hidden states to each other")
            raise
        if isinstance(output, tuple | list) and not self.architecture.returns_tuple:
            self._refuse("hand more than hidden states to each other")
        for name, ids in before.items():
            given: Any = kwargs[name]
            for key in [key for key, entry in given.items() if ids.get(key) != id(entry)]:
                given[key] = HandedOn()  # which fails in layers that use it, and is nothing to others
        return self._beside.joined(*output[:2]) if isinstance(output, tuple | list) else output

    @contextmanager
    def _trying(self, index: int) -> Iterator[None]:
        """What a layer raises when it runs first is the config's: it can promise what transformers cannot compute."""
        with nullcontext() if index in self._tried else described_in(self.checkpoint.path):
            yield
        self._tried.add(index)

    @exact_products()
    def head(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Everything after the last layer: logits `[batch, length, vocabulary]`."""
        last, (hidden, _) = self.layer_count - 1, self._beside.parts(hidden)
        with self._layers_replaced(lambda index, x, args, kwargs: hidden if index == last else x):
            return self.model(input_ids=tokens.to(self.device), **self._uncached).logits


def _with_language_first(model: nn.Module) -> None:
    """Let a model's first parameter be of its language model: by that transformers tells where it computes, and of what
    lies around there are no weights."""
    module = model
    for name in filter(None, language_model_in(model)[0].split(".")):
        module._modules = {name: module._modules[name], **module._modules}
        module = module.get_submodule(name)


def _are_same(calls: object, others: object) -> bool:
    """Whether two nests of arguments hold the same tensors."""
    if isinstance(calls, Tensor) and isinstance(others, Tensor):
        return calls.shape == others.shape and torch.equal(calls, others)
    if isinstance(calls, Mapping) and isinstance(others, Mapping):
        return all(_are_same(value, others.get(key)) for key, value in calls.items())
    if isinstance(calls, list | tuple) and isinstance(others, list | tuple):
        return len(calls) == len(others) and all(map(_are_same, calls, others))
    return True


def _entries(arguments: Mapping[str, object]) -> dict[str, dict[object, int]]:
    """What the dictionaries among a layer's arguments hold, by key."""
    return {
        name: {key: id(entry) for key, entry in value.items()}
        for name, value in arguments.items()
        if isinstance(value, Mapping)
    }
