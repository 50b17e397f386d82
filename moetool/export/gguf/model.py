"""A model as the tensors of a GGUF file: their names, shapes, types and rows."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor, nn

from moetool.architectures import MoEShape, Role
from moetool.architectures.base import Settings
from moetool.architectures.shape import by_name
from moetool.checkpoint.decoded import decoded
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.manifest import manifest_of
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import model_config
from moetool.errors import InvalidInputError
from moetool.export.choosing.written import WatchedModule
from moetool.export.gguf.facts import GgufFacts
from moetool.export.gguf.file import GgufTensor, is_quantized, type_for
from moetool.export.gguf.rope import LONG_ROPE, ROPES_BY_PAIR, factors_by_pair
from moetool.format.families import architecture_of
from moetool.format.gguf.blocks import NumberType
from moetool.format.gguf.changes import Change
from moetool.format.gguf.families import gguf_family
from moetool.format.gguf.family import under
from moetool.format.gguf.words import (
    EMBEDDINGS,
    EXPERT_BIASES,
    EXPERTS,
    HEAD,
    LONG_ROPE_FACTORS,
    ROPE_FACTORS,
    interleaved,
    layer_in_file,
    layer_of,
    place,
)
from moetool.format.kinds import custom_module
from moetool.format.kinds.moefied import MoefiedSpec
from moetool.runtime.dense import DenseModel

_COMPUTED = re.compile(
    r"\.(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias|slope_rate|(query|key|diagonal)_decay)$"
)
_FURTHER = re.compile(r"((language_)?model\.)*mtp[._]")  # layers that predict further tokens
_PART = 1 << 24  # numbers of a tensor that are in memory at once


@dataclass(frozen=True)
class GgufSource(GgufFacts):
    """An MoE or dense model of a family that llama.cpp knows: its tensors under GGUF's names, beside its facts."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "GgufSource":
        config = checkpoint.config
        if (spec := custom_module(config)) is not None:
            raise InvalidInputError(
                f"This model has modules that only moetool runs ('{spec.key}' in its quantization_config): llama.cpp "
                f"does not know them.{_instead(checkpoint) if isinstance(spec, MoefiedSpec) else ''}"
            )
        text = model_config(config, checkpoint.path).get_text_config()
        family = gguf_family(Settings({**checkpoint.settings, "model_type": text.model_type}))
        if not family.is_moe:
            dense = DenseModel(checkpoint, may_lie_within=True)
            return cls(dense.checkpoint, family, dense, None)
        checkpoint = decoded(checkpoint)
        return cls(checkpoint, family, None, ExpertReader(checkpoint, architecture_of(config)))

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
        names, found, changed = dict(self.names_in_file), dict[str, GgufTensor](), self._changes_by_name
        if self.is_tied:
            del names[self.head_name]
        left_out = {self.head_name, *self.idle_names, *self._expert_names} - names.keys()
        left_out |= {*self.constants, *chain(*self.numbers.values(), *self._joined.values())}
        for name, info in self.checkpoint.tensors.items():
            is_empty = 0 in info.shape  # as transformers saves a shared expert without neurons
            if is_empty or name in left_out or _COMPUTED.search(name) or self._is_elsewhere(name):
                continue
            if name in changed:
                found |= {tensor.name: tensor for tensor in self._changed(name, *changed[name], common)}
                continue
            if (own := names.get(name)) is None:
                raise InvalidInputError(
                    f"llama.cpp's '{self.family.architecture}' has no place for the tensor {name} {list(info.shape)}."
                )
            found[own] = self._tensor(own, info.shape, common, partial(self._rows, name, own))
        for own, names_of_parts in self._joined.items():
            infos = [self.checkpoint.info(name) for name in names_of_parts]
            whole = sum(info.shape[0] for info in infos), infos[0].shape[1]
            found[own] = self._tensor(own, whole, common, partial(self._rows_of_all, names_of_parts, own))
        if self.is_tied and self.family.needs_head:
            shape = self.checkpoint.info(self.embeddings_name).shape
            found[HEAD] = self._tensor(HEAD, shape, common, partial(self._rows, self.embeddings_name, HEAD))
        if self.rope.get("rope_type") in ROPES_BY_PAIR:
            pairs = self.most_turned // 2
            found[ROPE_FACTORS] = GgufTensor(ROPE_FACTORS, (pairs,), "f32", partial(factors_by_pair, self))
        if self.rope.get("rope_type") == LONG_ROPE:
            for key, own in LONG_ROPE_FACTORS.items():
                factors = torch.tensor(self.rope[key], dtype=torch.float32)
                found[own] = GgufTensor(own, tuple(factors.shape), "f32", partial(iter, [factors]))
        if self.experts is not None:
            found |= self._expert_tensors(self.experts, common, experts)
        return sorted(found.values(), key=lambda tensor: place(tensor.name))

    @property
    def constants(self) -> dict[str, str]:
        """Tensors of the checkpoint that metadata holds, and its keys."""
        named = {
            self.layer_prefix(layer) + name: own
            for layer in range(self.layers)
            for name, own in self.family.constants.items()
        }
        return {name: own for name, own in named.items() if name in self.checkpoint.tensors}

    @property
    def numbers(self) -> dict[str, list[str]]:
        """By keys of the metadata, tensors of the checkpoint of which these hold the numbers, layer by layer."""
        prefixes = [self.layer_prefix(layer) for layer in range(self.layers)]
        return {own: [prefix + name for prefix in prefixes] for name, (own, _) in self.family.numbers.items()}

    @cached_property
    def _joined(self) -> Mapping[str, list[str]]:
        """By GGUF's name of a table that the checkpoint has in parts, these in the order of their numbers."""
        found = defaultdict[str, list[str]](list)
        for start, own in self.family.joined.items():
            prefixes = tuple(self.layer_prefix(layer) + start for layer in range(self.layers))
            found[own] += [name for name in self.checkpoint.tensors if name.startswith(prefixes)]
        return {own: sorted(names, key=_numbers_in) for own, names in found.items() if names}

    @property
    def most_at_once(self) -> int:
        """Most numbers of the model that are in memory at once while its tensors are written: a part of a tensor, an
        expert's matrix, or a matrix whose rows lie in another order in the file."""
        expert = 0 if self.experts is None else self.experts.shape.hidden * self.experts.shape.intermediate
        tensors = self.checkpoint.tensors
        part = min(_PART, max(math.prod(info.shape) for info in tensors.values()))
        whole = [info for name, info in tensors.items() if name in self._changes_by_name]
        turned = self.head_width * int(self.config.num_attention_heads) * int(self.config.hidden_size)
        return max(part, expert, turned, *(math.prod(info.shape) for info in whole))

    def projections(self, layer: int) -> dict[str, list[str]]:
        """By module of a loaded layer, GGUF's names of the matrices that lie in its weight, one below the other: those
        that can have few bits, without experts."""
        prefix, found = self.layer_prefix(layer), defaultdict[str, list[str]](list)
        for name, own in self.names_in_file.items():
            if not name.startswith(prefix) or name not in self.checkpoint.tensors:
                continue
            if type_for(own, self.checkpoint.info(name).shape, "f16") == "f16":
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
                shared = by_name({role: self.family.shared[role] for role in roles})
                found[module] += [layer_in_file(layer, own) for own in shared]
        return found

    def changes(self, layer: int) -> dict[str, Change]:
        """By module of a loaded layer, how rows of its weight are arranged in the file, where that is not by heads."""
        changed, prefix = self.family.changed([layer], self.layer), self.layer_prefix(layer)
        return {
            name.removeprefix(prefix).removesuffix(".weight"): change
            for name, (change, _) in changed.items()
            if change.keeps_inputs and name in self.checkpoint.tensors
        }

    @cached_property
    def _changes_by_name(self) -> Mapping[str, tuple[Change, tuple[str, ...]]]:
        """The changes of tensors of all layers and outside of them by the checkpoint's names, with the file's names."""
        return self.family.changed(range(self.layers), self.layer)

    @property
    def embeddings(self) -> str:
        return EMBEDDINGS

    @property
    def head(self) -> str | None:
        return None if self.is_tied and not self.family.needs_head else HEAD

    def watched(self, layer: int, module: nn.Module) -> dict[str, WatchedModule]:
        return {path: self._projection(layer, module, path, names) for path, names in self.projections(layer).items()}

    def _projection(self, layer: int, module: nn.Module, path: str, names: Sequence[str]) -> WatchedModule:
        projection, change = module.get_submodule(path), self.changes(layer).get(path)
        weight = projection.weight
        assert isinstance(weight, Tensor)
        is_transposed = change is not None and change.is_transposed
        rows, columns = weight.shape[::-1] if is_transposed else weight.shape
        settings = {} if change is None else self.config.to_dict()

        def apart(gradients: Tensor) -> Sequence[Tensor]:
            if change is None or is_transposed:
                return gradients.chunk(len(names))
            return change.apart(settings, gradients)

        def in_file(gradients: Tensor) -> list[Tensor]:  # what multiplies a row in the file divides the gradient at it
            parts = zip(names, apart(gradients), strict=True)
            return [self.turned(name, self.family.multiplied(name, self.config, own, power=-1)) for name, own in parts]

        parts = apart(torch.empty(rows, 1, device="meta"))
        shapes = {name: (len(part), columns) for name, part in zip(names, parts, strict=True)}
        return WatchedModule(projection, shapes, in_file)

    def expert_tensor(self, layer: int, role: Role) -> str:
        return layer_in_file(layer, EXPERTS[role])

    def counted_embeddings(self, rows: Tensor) -> Tensor:
        return self.family.multiplied(EMBEDDINGS, self.config, rows, power=-2)

    def turned(self, name: str, rows: Tensor) -> Tensor:
        """Reorder values per row of a tensor, named as in GGUF, from the model's order of rows to the file's."""
        heads = self.family.turned_heads(name, *self.heads_in_file)
        return rows if heads is None else interleaved(rows, heads)

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
        has_inputs = layer_of(name) >= 0 or name in (EMBEDDINGS, HEAD)
        return GgufTensor(name, shape, type_for(name, shape, wanted), parts, has_inputs)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a tensor is of no part of the language model: eyes, or layers that predict more tokens."""
        layers = self.layer_prefix(0).removesuffix("0.")
        if name.startswith(layers) and (number := name.removeprefix(layers).partition(".")[0]).isdecimal():
            return int(number) >= self.layers
        is_own = name.startswith(under(self.layer, "model.")) and not name.startswith(self.family.around)
        return (self.is_within and name != self.head_name and not is_own) or _FURTHER.match(name) is not None

    def _changed(self, name: str, change: Change, owns: Sequence[str], common: NumberType) -> Iterator[GgufTensor]:
        """Tensors of the file that one of the checkpoint becomes."""
        wanted: NumberType = "q8_0" if is_quantized(common) and not change.keeps_inputs else common
        settings = self.config_of(layer_of(owns[0])).to_dict()
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
            rows = self.checkpoint.read_rows(name, start, min(shape[0], start + step))
            yield self.family.multiplied(own, self.config, rows, start=start)

    def _rows_of_all(self, names: Sequence[str], own: str) -> Iterator[Tensor]:
        for name in names:
            yield from self._rows(name, own)

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
            if self.family.has_shared and (width := self.shared_intermediate):
                for own, roles in by_name({role: self.family.shared[role] for role in shape.roles}).items():
                    name = layer_in_file(layer, own)
                    matrix = (shape.hidden, width) if roles == ["down"] else (len(roles) * width, shape.hidden)
                    found[name] = self._tensor(name, matrix, common, partial(self._shared, reader, layer, roles))
        return found

    def _matrices(self, reader: ExpertReader, layer: int, role: Role) -> Iterator[Tensor]:
        for expert in range(reader.shape.experts):
            yield reader.dense(layer, expert, role).to(reader.dtype)

    def _biases(self, reader: ExpertReader, layer: int, role: Role) -> Iterator[Tensor]:
        for expert in range(reader.shape.experts):
            yield reader.bias(layer, expert, role)[None]

    def _shared(self, reader: ExpertReader, layer: int, wanted: Sequence[Role]) -> Iterator[Tensor]:
        names = reader.architecture.shared_expert_names(layer)
        for role in wanted:
            if reader.layout(layer).is_extended:
                yield reader.dense(layer, reader.shape.experts, role).to(reader.dtype)
                continue
            roles = by_name(names)[names[role]]
            yield self.checkpoint.read(names[role]).chunk(len(roles))[roles.index(role)]


def _instead(checkpoint: Checkpoint) -> str:
    """What to export in the place of a moefied model: the dense model that it was made of, by its manifest."""
    manifest = manifest_of(checkpoint.path)
    origins = () if manifest is None else manifest.origins
    named = next((f" ({origin.source})" for origin in origins if origin.stage.endswith("moefication")), "")
    return f" Export the dense model that it was made of{named}: it computes all neurons."


def _numbers_in(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
