"""A model in the words of GGUF: which tensors there are, and what its metadata says."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.architectures import Architecture, MoEShape, Role
from moetool.architectures.base import Settings
from moetool.architectures.shape import by_name
from moetool.checkpoint.decoded import decoded
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import model_config
from moetool.errors import InvalidInputError
from moetool.export.gguf.file import GgufTensor, is_quantized, type_for
from moetool.format.families import architecture_of
from moetool.format.gguf.blocks import NumberType
from moetool.format.gguf.families import gguf_family
from moetool.format.gguf.family import Change, GgufFamily, under
from moetool.format.gguf.words import (
    EXPERT_BIASES,
    EXPERTS,
    HEAD,
    ROPE_FACTORS,
    SHARED_EXPERT,
    interleaved,
    layer_in_file,
    layer_of,
    place,
)
from moetool.format.kinds import custom_module
from moetool.runtime.dense import DenseModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_COMPUTED = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias)$")
_FURTHER = re.compile(r"(model\.)?mtp[._]")  # layers that predict further tokens
_STILL = 1e30
_PART = 1 << 24  # numbers of a tensor that are in memory at once
ROPE_SCALINGS = ("linear", "yarn")
WINDOWED, WHOLE = "sliding_attention", "full_attention"  # kinds of layers (`layer_types`)


@dataclass(frozen=True)
class GgufSource:
    """An MoE or dense model of a family that llama.cpp knows.

    Attributes:
        checkpoint: where it lies, with matrices in the place of codes beside its experts.
        family: as llama.cpp computes it.
        dense: of a model without experts.
        experts: of one that has some.
    """

    checkpoint: Checkpoint
    family: GgufFamily
    dense: DenseModel | None
    experts: ExpertReader | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "GgufSource":
        config = checkpoint.config
        if (spec := custom_module(config)) is not None:
            raise InvalidInputError(
                f"This model has modules that only moetool runs ('{spec.key}' in its quantization_config): llama.cpp "
                "does not know them."
            )
        text = model_config(config, checkpoint.path).get_text_config()
        family = gguf_family(Settings({**checkpoint.settings, "model_type": text.model_type}))
        if not family.is_moe:
            return cls(checkpoint, family, DenseModel(checkpoint), None)
        checkpoint = decoded(checkpoint)
        return cls(checkpoint, family, None, ExpertReader(checkpoint, architecture_of(config)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the model's weights."""
        model = self.dense or self.experts
        assert model is not None
        return model.dtype

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """transformers' config of the language model, defaults filled in. Raises `InvalidInputError`."""
        text = model_config(self.checkpoint.config, self.checkpoint.path).get_text_config()
        if getattr(text, "per_layer_config", None):  # what most layers have, where transformers asks which one is meant
            text.allow_global_per_layer_attribute_access = True
        return text

    @property
    def layers(self) -> int:
        """Number of decoder layers, by the model's config."""
        return int(self.config.num_hidden_layers)

    def layer_prefix(self, layer: int) -> str:
        """The beginning of the names of a layer's tensors in the checkpoint, with its dot."""
        return f"model.layers.{layer}." if self.moe is None else self.moe.layer_prefix(layer)

    @property
    def is_within(self) -> bool:
        """Whether the language model lies in a model that sees or hears, too."""
        return self.checkpoint.config.get("text_config") is not None

    @property
    def moe(self) -> Architecture | None:
        """The architecture of a model with experts; `None` for a dense model."""
        return None if self.experts is None else self.experts.architecture

    @property
    def dense_layers(self) -> int:
        """How many layers without experts come first."""
        return 0 if self.experts is None else self.experts.moe_layers[0]

    @property
    def heads_in_file(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values: of latent attention one, as llama.cpp computes it."""
        heads = max(self.query_heads)
        if self.heads_by_layer is not None:
            return heads, max(self.heads_by_layer)
        return heads, 1 if self.family.is_latent else int(self.config.num_key_value_heads)

    @property
    def query_heads(self) -> list[int]:
        """Heads of queries of each layer, which may differ in Laguna."""
        own = getattr(self.config, "num_attention_heads_per_layer", None)
        return list(own or [int(self.config.num_attention_heads)] * self.layers)

    @property
    def heads_by_layer(self) -> list[int] | None:
        """Heads of keys and values of each layer, where some layers have no attention."""
        if not self.family.varies_heads:
            return None
        names = self.family.in_file(self.layers, self.moe)
        rows = {
            layer_of(own): self.checkpoint.info(name).shape[0]
            for name, own in names.items()
            if own.endswith("attn_k.weight") and name in self.checkpoint.tensors
        }
        widths = [
            self.head_width if windowed else self.whole_width for windowed in self.windows or [False] * self.layers
        ]
        return [rows.get(layer, 0) // width for layer, width in enumerate(widths)]

    @property
    def attention_interval(self) -> int:
        """How many layers there are for one with attention, which is the last of them."""
        kinds = list(self.config.layer_types)
        return kinds.index(WHOLE) + 1 if WHOLE in kinds else len(kinds) + 1

    @property
    def windows(self) -> list[bool]:
        """Whether each layer attends to a window of the text only; empty if none does."""
        found = [kind == WINDOWED for kind in getattr(self.config, "layer_types", None) or ()]
        return found if any(found) and getattr(self.config, "sliding_window", None) else []

    @property
    def rope(self) -> Mapping[str, Any]:
        """The parameters of the rotary embeddings, as `config.json` has them; of layers that attend to all of a text,
        where others have parameters of their own."""
        return self._rope_of(WHOLE)

    @property
    def rope_of_windows(self) -> Mapping[str, Any]:
        """As `rope`, of layers that attend to a window."""
        return self._rope_of(WINDOWED)

    def _rope_of(self, kind: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(self.config, "rope_parameters", None) or {}
        return found.get(kind) or found

    @property
    def rotary_share(self) -> float:
        """Which part of each head rotary embeddings turn."""
        own = self.rope.get("partial_rotary_factor", getattr(self.config, "partial_rotary_factor", None))
        return 1.0 if own is None or self.family.is_latent else float(own)

    @property
    def is_tied(self) -> bool:
        """Whether the model's head shares the matrix of its embeddings, which the config of the whole model says."""
        whole = model_config(self.checkpoint.config, self.checkpoint.path)
        is_said = self.family.may_tie and getattr(whole, "tie_word_embeddings", False)
        return is_said or self._head not in self.checkpoint.tensors

    @property
    def _head(self) -> str:
        return under(self.moe, "lm_head.weight")

    @property
    def _embeddings(self) -> str:
        return under(self.moe, "model.embed_tokens.weight")

    @property
    def idle_names(self) -> list[str]:
        """Tensors of shared experts that are left out; whether they are idle has to be seen by their numbers."""
        prefixes = tuple(
            self.layer_prefix(layer) + start for layer in range(self.layers) for start in self.family.leaves_out
        )
        return [name for name in self.checkpoint.tensors if name.startswith(prefixes)]

    def tensors(self, common: NumberType, experts: NumberType) -> list[GgufTensor]:
        """Every tensor of the file, in its order.

        Args:
            common: type of what is not an expert.
            experts: type of experts.

        Raises:
            InvalidInputError: the checkpoint has a tensor that GGUF has no place for.
        """
        names, found = self.family.in_file(self.layers, self.moe), dict[str, GgufTensor]()
        changed = self.family.changed(range(self.layers), self.moe)
        if self.is_tied:
            del names[self._head]
        left_out = {self._head, *self.idle_names, *self._expert_names} - names.keys()
        for name, info in self.checkpoint.tensors.items():
            if name in left_out or _COMPUTED.search(name) or self._is_elsewhere(name):
                continue
            if name in changed:
                found |= {tensor.name: tensor for tensor in self._changed(name, *changed[name], common)}
                continue
            if (own := names.get(name)) is None:
                raise InvalidInputError(
                    f"llama.cpp's '{self.family.architecture}' has no place for the tensor {name} {list(info.shape)}."
                )
            found[own] = self._tensor(own, info.shape, common, partial(self._rows, name, own))
        if self.is_tied and self.family.needs_head:
            shape = self.checkpoint.info(self._embeddings).shape
            found[HEAD] = self._tensor(HEAD, shape, common, partial(self._rows, self._embeddings, HEAD))
        if self.rope.get("rope_type") in ("llama3", "proportional"):
            found[ROPE_FACTORS] = GgufTensor(ROPE_FACTORS, (self.whole_width // 2,), "f32", self._rope_factors)
        if self.experts is not None:
            found |= self._expert_tensors(self.experts, common, experts)
        return sorted(found.values(), key=lambda tensor: place(tensor.name))

    @property
    def most_at_once(self) -> int:
        """Most numbers of the model that are in memory at once while its tensors are written: a part of a tensor, an
        expert's matrix, or a matrix whose rows lie in another order in the file."""
        expert = 0 if self.experts is None else self.experts.shape.hidden * self.experts.shape.intermediate
        changed = self.family.changed(range(self.layers), self.moe)
        whole = [info for name, info in self.checkpoint.tensors.items() if name in changed]
        turned = self.head_width * int(self.config.num_attention_heads) * int(self.config.hidden_size)
        return max(_PART, expert, turned, *(math.prod(info.shape) for info in whole), 0)

    def projections(self, layer: int) -> dict[str, list[str]]:
        """By module of a loaded layer, GGUF's names of the matrices that lie in its weight, one below the other: those
        that can have few bits, without experts."""
        prefix, found = self.layer_prefix(layer), defaultdict[str, list[str]](list)
        for name, own in self.family.in_file(self.layers, self.moe).items():
            if not name.startswith(prefix) or name not in self.checkpoint.tensors:
                continue
            if type_for(own, self.checkpoint.info(name).shape, "f16") != "f32":
                found[self.family.module_path(name.removeprefix(prefix))].append(own)
        for path, change in self.changes(layer).items():
            found[path] += [layer_in_file(layer, own) for own in change.names]
        if (
            self.moe is not None
            and self.family.has_shared
            and self.shared_intermediate
            and layer in self.moe.moe_layers
        ):
            for name, roles in by_name(self.moe.shared_expert_names(layer)).items():
                module = name.removeprefix(prefix).removesuffix(".weight")
                found[module] += [layer_in_file(layer, SHARED_EXPERT[role]) for role in roles]
        return found

    def changes(self, layer: int) -> dict[str, Change]:
        """By module of a loaded layer, how rows of its weight are arranged in the file, where that is not by heads."""
        changed, prefix = self.family.changed([layer], self.moe), self.layer_prefix(layer)
        return {
            name.removeprefix(prefix).removesuffix(".weight"): change
            for name, (change, _) in changed.items()
            if change.keeps_inputs and name in self.checkpoint.tensors
        }

    def turned(self, name: str, rows: Tensor) -> Tensor:
        """Reorder values per row of a tensor, named as in GGUF, from the model's order of rows to the file's."""
        heads = self.family.turned_heads(name, *self.heads_in_file)
        return rows if heads is None else interleaved(rows, heads)

    @property
    def head_width(self) -> int:
        """Number of channels of one attention head."""
        own = getattr(self.config, "head_dim", None)
        return int(own or self.config.hidden_size // self.config.num_attention_heads)

    @property
    def whole_width(self) -> int:
        """Number of channels of one attention head in layers that attend to all of a text."""
        if not self.family.has_two_widths or not self.windows or all(self.windows):
            return self.head_width
        layer = self.windows.index(False)
        return self.checkpoint.info(f"{self.layer_prefix(layer)}self_attn.k_norm.weight").shape[0]

    @property
    def _expert_names(self) -> set[str]:
        """Names of all tensors that experts come from, shared ones among them."""
        if self.experts is None:
            return set()
        shared = (self.experts.architecture.shared_expert_names(layer) for layer in self.experts.moe_layers)
        own = {name for names in shared for name in names.values()}
        prefixes = tuple(map(self.experts.architecture.experts_prefix, self.experts.moe_layers))
        return own | self.experts.names | {name for name in self.checkpoint.tensors if name.startswith(prefixes)}

    def _tensor(
        self, name: str, shape: tuple[int, ...], wanted: NumberType, parts: Callable[[], Iterator[Tensor]]
    ) -> GgufTensor:
        return GgufTensor(name, shape, type_for(name, shape, wanted), parts)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a tensor is of no part of the language model: eyes, or layers that predict more tokens."""
        layers = self.layer_prefix(0).removesuffix("0.")
        if name.startswith(layers) and (number := name.removeprefix(layers).partition(".")[0]).isdecimal():
            return int(number) >= self.layers
        is_seen = self.is_within and name != self._head and not name.startswith(under(self.moe, "model."))
        return is_seen or _FURTHER.match(name) is not None

    def _changed(self, name: str, change: Change, owns: Sequence[str], common: NumberType) -> Iterator[GgufTensor]:
        """Tensors of the file that one of the checkpoint becomes."""
        wanted: NumberType = "q8_0" if is_quantized(common) and not change.keeps_inputs else common
        settings = self.config.to_dict()
        empty = torch.empty(self.checkpoint.info(name).shape, device="meta")
        for index, (own, shape) in enumerate(zip(owns, change.apart(settings, empty), strict=True)):

            def parts(index: int = index) -> Iterator[Tensor]:
                yield change.apart(settings, self.checkpoint.read(name))[index].contiguous()

            yield replace(self._tensor(own, tuple(shape.shape), wanted, parts), has_inputs=change.keeps_inputs)

    def _rows(self, name: str, own: str) -> Iterator[Tensor]:
        shape = self.checkpoint.info(name).shape
        if self.family.turned_heads(own, *self.heads_in_file) is not None:
            yield self.turned(own, self.checkpoint.read(name))
            return
        step = max(1, _PART // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            yield self.checkpoint.read_rows(name, start, min(shape[0], start + step))

    def _expert_tensors(self, reader: ExpertReader, common: NumberType, experts: NumberType) -> dict[str, GgufTensor]:
        found = {}
        shape: MoEShape = reader.shape
        for layer in reader.moe_layers:
            for role in shape.roles:
                name = layer_in_file(layer, EXPERTS[role])
                whole = (shape.experts, *shape.matrix(role))
                found[name] = self._tensor(name, whole, experts, partial(self._matrices, reader, layer, role))
                if role in shape.biases:
                    name = layer_in_file(layer, EXPERT_BIASES[role])
                    biases = shape.experts, shape.matrix(role)[0]
                    found[name] = self._tensor(name, biases, "f32", partial(self._biases, reader, layer, role))
                if self.family.has_shared and self.shared_intermediate:
                    name = layer_in_file(layer, SHARED_EXPERT[role])
                    rows, columns = shape.hidden, self.shared_intermediate
                    matrix = (rows, columns) if role == "down" else (columns, rows)
                    found[name] = self._tensor(name, matrix, common, partial(self._shared, reader, layer, role))
        return found

    @property
    def shared_intermediate(self) -> int:
        """Number of neurons of the shared expert; 0 if there is none."""
        if self.experts is None:
            return 0
        if (key := self.family.shared_width) is not None:
            return int(getattr(self.config, key, 0) or 0)
        layer = self.experts.moe_layers[0]
        names = {own: name for name, own in self.family.in_file(self.layers, self.moe).items()}
        down = names.get(layer_in_file(layer, SHARED_EXPERT["down"]))
        if down is None and self.family.has_shared:
            down = self.experts.architecture.shared_expert_names(layer).get("down")
        return 0 if down is None or down not in self.checkpoint.tensors else self.checkpoint.info(down).shape[1]

    def _matrices(self, reader: ExpertReader, layer: int, role: Role) -> Iterator[Tensor]:
        for expert in range(reader.shape.experts):
            yield reader.dense(layer, expert, role).to(reader.dtype)

    def _biases(self, reader: ExpertReader, layer: int, role: Role) -> Iterator[Tensor]:
        for expert in range(reader.shape.experts):
            yield reader.bias(layer, expert, role)[None]

    def _shared(self, reader: ExpertReader, layer: int, role: Role) -> Iterator[Tensor]:
        if reader.layout(layer).is_extended:
            yield reader.dense(layer, reader.shape.experts, role).to(reader.dtype)
            return
        names = reader.architecture.shared_expert_names(layer)
        roles = by_name(names)[names[role]]
        yield self.checkpoint.read(names[role]).chunk(len(roles))[roles.index(role)]

    def _rope_factors(self) -> Iterator[Tensor]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if self.rope["rope_type"] == "proportional":  # the others are not turned: by so little that it is nothing
            turned = int(self.whole_width * self.rotary_share) // 2
            yield torch.cat([torch.ones(turned), torch.full((self.whole_width // 2 - turned,), _STILL)])
            return
        slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        steps = torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width
        yield self.rope["rope_theta"] ** -steps / slowed
