"""A model in the words of GGUF: which tensors there are, and what its metadata says."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.architectures import Architecture, MoEShape, Role
from moetool.architectures.shape import by_name
from moetool.checkpoint.decoded import decoded
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import model_config
from moetool.errors import InvalidInputError
from moetool.export.gguf.file import GgufTensor, type_for
from moetool.format.families import architecture_of
from moetool.format.gguf import (
    COUNTS,
    EMBEDDINGS,
    EXPERT_COUNT,
    EXPERTS,
    EXPERTS_USED,
    FRACTIONS,
    HEAD,
    HEAD_WIDTHS,
    ROPE_BASE,
    ROPE_FACTORS,
    SHARED_EXPERT,
    SHARED_WIDTH,
    WIDTH,
    GgufFamily,
    attention_heads,
    gguf_family,
    interleaved,
    layer_in_file,
)
from moetool.format.gguf_blocks import NumberType
from moetool.format.kinds import custom_module
from moetool.runtime.building import check_sizes
from moetool.runtime.dense import DenseModel

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig

_COMPUTED = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias)$")
_PART = 1 << 24  # numbers of a tensor that are in memory at once
_SCALINGS = ("linear", "yarn")


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
        family = gguf_family(checkpoint.settings)
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
        """transformers' config, defaults filled in. Raises `InvalidInputError`."""
        return model_config(self.checkpoint.config, self.checkpoint.path)

    @property
    def layers(self) -> int:
        """Number of decoder layers, by the model's config."""
        return int(self.config.num_hidden_layers)

    @property
    def moe(self) -> Architecture | None:
        """The architecture of a model with experts; `None` for a dense model."""
        return None if self.experts is None else self.experts.architecture

    def check(self) -> None:
        """Raise `InvalidInputError` for what llama.cpp would compute otherwise, or transformers not at all."""
        for key, known in {
            **self.family.computes,
            "hidden_act": ("silu", "swish"),
            "partial_rotary_factor": (1.0,),
        }.items():
            value = getattr(self.config, key, known[0])
            if value not in known:
                raise InvalidInputError(
                    f"config.json has {key} = {value!r}; llama.cpp's '{self.family.architecture}' computes with "
                    f"{known[0]!r}, whatever a file says. It would be another model."
                )
        if self.experts is not None and self.family.leaves_out and any(map(self._is_extended, self.experts.moe_layers)):
            raise _two_rules("they are stored on the base of the others")
        if self.experts is not None and self.experts.moe_layers != tuple(range(self.layers)):
            raise InvalidInputError(
                f"{self.layers - len(self.experts.moe_layers)} of {self.layers} layers have no experts; llama.cpp's "
                f"'{self.family.architecture}' has them in every layer."
            )
        self._check_attention()
        if not self.checkpoint.is_imagined:
            check_sizes(self.checkpoint)

    def _check_attention(self) -> None:
        config, own = self.config, self.family.architecture
        heads, groups = int(config.num_attention_heads), int(config.num_key_value_heads)
        if self.family.is_square and heads * self.head_width != config.hidden_size:
            raise InvalidInputError(
                f"{heads} heads of {self.head_width} do not add up to the hidden size of {config.hidden_size}; "
                f"llama.cpp's '{own}' has no others."
            )
        if groups != heads and not self.family.groups_heads:
            raise InvalidInputError(
                f"This model has {groups} heads of keys for {heads} of queries; llama.cpp's '{own}' has as many."
            )
        rope = self.rope.get("rope_type", "default")
        if rope not in ("default", *_SCALINGS) and not (rope == "llama3" and self.family.is_interleaved):
            raise InvalidInputError(f"llama.cpp's '{self.family.architecture}' has no rotary embeddings '{rope}'.")

    def _is_extended(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layout(layer).is_extended

    @property
    def rope(self) -> Mapping[str, Any]:
        """The parameters of the rotary embeddings, as `config.json` has them."""
        return getattr(self.config, "rope_parameters", None) or {}

    @property
    def is_tied(self) -> bool:
        """Whether the model's head shares the matrix of its embeddings."""
        return bool(self.config.tie_word_embeddings) or "lm_head.weight" not in self.checkpoint.tensors

    @property
    def idle_names(self) -> list[str]:
        """Tensors of shared experts that are left out; whether they are idle has to be seen by their numbers."""
        prefixes = tuple(
            f"model.layers.{layer}.{start}" for layer in range(self.layers) for start in self.family.leaves_out
        )
        return [name for name in self.checkpoint.tensors if name.startswith(prefixes)]

    def check_idle(self) -> None:
        """Raise `InvalidInputError` unless shared experts that are left out give nothing."""
        for name in self.idle_names:
            if name.endswith("down_proj.weight") and bool(self.checkpoint.read(name).any()):
                raise _two_rules(f"{name} is not zero")

    def tensors(self, common: NumberType, experts: NumberType) -> list[GgufTensor]:
        """Every tensor of the file, in its order.

        Args:
            common: type of what is not an expert.
            experts: type of experts.

        Raises:
            InvalidInputError: the checkpoint has a tensor that GGUF has no place for.
        """
        names, found = self.family.names(self.layers, self.moe), {}
        left_out = set(self.idle_names) | self._expert_names | ({"lm_head.weight"} if self.is_tied else set())
        for name, info in self.checkpoint.tensors.items():
            if name in left_out or _COMPUTED.search(name):
                continue
            if (own := names.get(name)) is None:
                raise InvalidInputError(
                    f"llama.cpp's '{self.family.architecture}' has no place for the tensor {name} {list(info.shape)}."
                )
            found[own] = self._tensor(own, info.shape, common, partial(self._rows, name, own))
        if self.is_tied and self.family.needs_head:
            shape = self.checkpoint.info("model.embed_tokens.weight").shape
            found[HEAD] = self._tensor(HEAD, shape, common, partial(self._rows, "model.embed_tokens.weight", HEAD))
        if self.rope.get("rope_type") == "llama3":
            found[ROPE_FACTORS] = GgufTensor(ROPE_FACTORS, (self.head_width // 2,), "f32", self._rope_factors)
        if self.experts is not None:
            found |= self._expert_tensors(self.experts, common, experts)
        return sorted(found.values(), key=lambda tensor: _place(tensor.name))

    def projections(self, layer: int) -> dict[str, list[str]]:
        """By module of a loaded layer, GGUF's names of the matrices that lie in its weight, one below the other: those
        that can have few bits, without experts."""
        prefix, found = f"model.layers.{layer}.", defaultdict[str, list[str]](list)
        for name, own in self.family.names(self.layers, self.moe).items():
            if not name.startswith(prefix) or name not in self.checkpoint.tensors:
                continue
            if type_for(own, self.checkpoint.info(name).shape, "f16") != "f32":
                found[name.removeprefix(prefix).removesuffix(".weight")].append(own)
        if self.moe is not None and self.shared_intermediate:
            for name, roles in by_name(self.moe.shared_expert_names(layer)).items():
                module = name.removeprefix(prefix).removesuffix(".weight")
                found[module] += [layer_in_file(layer, SHARED_EXPERT[role]) for role in roles]
        return found

    def turned(self, name: str, rows: Tensor) -> Tensor:
        """Reorder values per row of a tensor, named as in GGUF, from the model's order of rows to the file's."""
        heads = self.family.turned_heads(name, *attention_heads(self.checkpoint.settings))
        return rows if heads is None else interleaved(rows, heads)

    @property
    def head_width(self) -> int:
        """Number of channels of one attention head."""
        own = getattr(self.config, "head_dim", None)
        return int(own or self.config.hidden_size // self.config.num_attention_heads)

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

    def _rows(self, name: str, own: str) -> Iterator[Tensor]:
        shape = self.checkpoint.info(name).shape
        if self.family.turned_heads(own, *attention_heads(self.checkpoint.settings)) is not None:
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
                if self.shared_intermediate:
                    name = layer_in_file(layer, SHARED_EXPERT[role])
                    rows, columns = shape.hidden, self.shared_intermediate
                    matrix = (rows, columns) if role == "down" else (columns, rows)
                    found[name] = self._tensor(name, matrix, common, partial(self._shared, reader, layer, role))
        return found

    @property
    def shared_intermediate(self) -> int:
        """Number of neurons of the shared expert; 0 if the family has none."""
        key = self.family.shared_width
        return 0 if key is None else int(getattr(self.config, key, 0) or 0)

    def _matrices(self, reader: ExpertReader, layer: int, role: Role) -> Iterator[Tensor]:
        for expert in range(reader.shape.experts):
            yield reader.dense(layer, expert, role).to(reader.dtype)

    def _shared(self, reader: ExpertReader, layer: int, role: Role) -> Iterator[Tensor]:
        if reader.layout(layer).is_extended:
            yield reader.dense(layer, reader.shape.experts, role).to(reader.dtype)
            return
        names = reader.architecture.shared_expert_names(layer)
        roles = by_name(names)[names[role]]
        yield self.checkpoint.read(names[role]).chunk(len(roles))[roles.index(role)]

    def _rope_factors(self) -> Iterator[Tensor]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        steps = torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width
        yield self.rope["rope_theta"] ** -steps / slowed

    def describe(self, writer: "GGUFWriter") -> None:
        """Write the metadata of the model itself into the library's `GGUFWriter`."""
        config, start = self.config, self.family.architecture
        for key, own in COUNTS.items():
            writer.add_uint32(f"{start}.{own}", int(getattr(config, key)))
        for key, own in {**FRACTIONS, **self.family.multipliers}.items():
            writer.add_float32(f"{start}.{own}", float(getattr(config, key)))
        for own in HEAD_WIDTHS:
            writer.add_uint32(f"{start}.{own}", self.head_width)
        self._describe_rope(writer, start)
        if self.experts is None:
            writer.add_uint32(f"{start}.{WIDTH}", int(config.intermediate_size))
            return
        shape = self.experts.shape
        writer.add_uint32(f"{start}.{EXPERT_COUNT}", shape.experts)
        writer.add_uint32(f"{start}.{EXPERTS_USED}", shape.top_k)
        writer.add_uint32(f"{start}.{self.family.width_key}", shape.intermediate)
        if self.family.width_key != WIDTH:
            writer.add_uint32(f"{start}.{WIDTH}", int(config.intermediate_size))
        if self.shared_intermediate:
            writer.add_uint32(f"{start}.{SHARED_WIDTH}", self.shared_intermediate)

    def _describe_rope(self, writer: "GGUFWriter", start: str) -> None:
        writer.add_float32(f"{start}.{ROPE_BASE}", float(self.rope.get("rope_theta", 10000.0)))
        kind = self.rope.get("rope_type", "default")
        if kind not in _SCALINGS:
            return
        writer.add_string(f"{start}.rope.scaling.type", kind)
        writer.add_float32(f"{start}.rope.scaling.factor", float(self.rope["factor"]))
        if kind == "yarn":
            original = self.rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
            writer.add_uint32(f"{start}.rope.scaling.original_context_length", int(original))


def _two_rules(reason: str) -> InvalidInputError:
    return InvalidInputError(
        "This model's routing weights add up to one (norm_topk_prob), and it has shared experts that are not idle "
        f"({reason}): llama.cpp has no architecture that computes both."
    )


def layer_of(name: str) -> int:
    """The layer of a tensor, by GGUF's name; -1 for what is in none."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return -1 if layer is None else int(layer[1])


def _place(name: str) -> tuple[int, bool, str]:
    """What is outside the layers first, embeddings before the rest; then layer by layer."""
    layer = layer_of(name)
    return layer, layer < 0 and name != EMBEDDINGS, name
