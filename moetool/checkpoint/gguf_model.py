"""Contents of a GGUF file under a checkpoint's names.

Weights are dequantized to 16 bits (a file in fp32 stays so), or to fp32, which holds them exactly. Config and names
come from `moetool.format.gguf`.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from moetool.architectures import Architecture, Role, find_architecture
from moetool.architectures.shape import by_name
from moetool.checkpoint.gguf_config import GgufConfig
from moetool.checkpoint.gguf_parts import parts_of
from moetool.checkpoint.gguf_tokenizer import OF_TOKENIZER, write_tokenizer
from moetool.checkpoint.names import CONFIG, INDEX
from moetool.checkpoint.permissions import open_to_readers
from moetool.errors import InvalidInputError, in_one_line
from moetool.format.gguf.families import family_in_file
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.words import (
    EXPERT_BIASES,
    EXPERT_COUNT,
    EXPERTS,
    GATE_AND_UP,
    LONG_ROPE_FACTORS,
    ROPE_FACTORS,
    gguf_library,
    halved,
    layer_in_file,
    layer_of,
)

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedConfig

_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}  # tokens, by their entries and by GGUF's names
_OF_ROPE = {ROPE_FACTORS, *LONG_ROPE_FACTORS.values()}  # tensors that the config tells of


class Written(Protocol):
    """The model that a GGUF file was made of."""

    @property
    def family(self) -> GgufFamily: ...
    @property
    def moe(self) -> Architecture | None: ...
    @property
    def layer(self) -> str: ...
    def config_of(self, layer: int) -> "PreTrainedConfig": ...
    @property
    def kinds(self) -> Sequence[str]: ...


def _opened(file: Path) -> "GGUFReader":
    """A file as the library `gguf` has it. Raises `InvalidInputError` where it is damaged or cut short."""
    library = gguf_library()
    try:
        reader = library.GGUFReader(file)
    except (ValueError, KeyError, IndexError, OSError, OverflowError, UnicodeDecodeError) as error:
        reason = in_one_line(error, 200)
        raise InvalidInputError(
            f"Cannot read {file}: it is damaged, cut short, or has numbers of an unknown type ({reason})."
        ) from error
    size = file.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise InvalidInputError(f"{file} ends inside {tensor.name}: it is cut short. Download it again.")
    return reader


@dataclass(frozen=True)
class GgufModel:
    """Contents of a GGUF file's header: entries and tensors.

    Attributes:
        file: where it lies; of a model in several parts the first, which has the metadata.
        written: what it was made of, where that is known; else its own metadata tell.
        is_exact: whether weights become fp32, whatever they are stored in.
    """

    file: Path
    written: Written | None = None
    is_exact: bool = False

    @cached_property
    def _reader(self) -> "GGUFReader":
        return _opened(self.file)

    @cached_property
    def tensors(self) -> "dict[str, ReaderTensor]":
        """Tensors of the file, or of all its parts, by name, as the library `gguf` has them."""
        readers = [self._reader, *map(_opened, parts_of(self.file)[1:])]
        return {tensor.name: tensor for reader in readers for tensor in reader.tensors}

    def _field(self, key: str) -> Any:
        """An entry of the metadata; `None` if there is none."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    @cached_property
    def _start(self) -> str:
        return str(self._field("general.architecture"))

    @cached_property
    def _entries(self) -> dict[str, Any]:
        """Metadata of the architecture, by keys without its name."""
        start = f"{self._start}."
        return {key.removeprefix(start): self._field(key) for key in self._reader.fields if key.startswith(start)}

    @cached_property
    def _family(self) -> GgufFamily:
        if self.written is not None:
            return self.written.family
        try:
            return family_in_file(self._start, self._entries)
        except InvalidInputError as error:
            raise InvalidInputError(f"{self.file} cannot be an input. {error}") from error

    @property
    def is_read(self) -> bool:
        """Whether the file can be an input: moetool writes files of more families than it reads."""
        try:
            return bool(self._family)
        except InvalidInputError:
            return False

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether the file has a tokenizer, without which only programs that bring token ids can run it."""
        return self._field(f"{OF_TOKENIZER}model") not in (None, "none", "no_vocab")

    @cached_property
    def _moe(self) -> Architecture | None:
        if self.written is not None:
            return self.written.moe
        return find_architecture(self.config) if self._family.is_moe else None

    @property
    def _layer(self) -> str:
        if self.written is not None:
            return self.written.layer
        return self._family.layer if self._moe is None else self._moe.layer

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the checkpoint that is made of the file: the file's own if that is a floating-point one, else
        bf16; fp32 where numbers are to stay exact."""
        if self.is_exact:
            return torch.float32
        types = {tensor.tensor_type.name for tensor in self.tensors.values() if len(tensor.shape) > 1} - {"I32"}
        types -= {"F32"} if len(types) > 1 else set()
        return {"F32": torch.float32, "F16": torch.float16}.get(types.pop() if len(types) == 1 else "", torch.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes that all weights take once they are decoded to the checkpoint's dtype."""
        return sum(tensor.n_elements for tensor in self.tensors.values()) * self.dtype.itemsize

    @cached_property
    def _said(self) -> GgufConfig:
        shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in self.tensors.items()}
        said = {kind: self._field(f"{OF_TOKENIZER}{name}_token_id") for kind, name in _SPECIAL.items()}
        tokens = {kind: int(token) for kind, token in said.items() if token is not None}
        return GgufConfig(self.file, self._family, self._entries, shapes, self._read, self.dtype, tokens)

    @cached_property
    def config(self) -> dict[str, object]:
        """`config.json`. Raises `InvalidInputError` for what moetool does not read."""
        return self._said.build()

    def write(self, directory: Path, *, weights: bool) -> None:
        """Write config, tokenizer and, one file for a layer, weights; the index last."""
        layers, total = self.layers, int(self._said.number("block_count"))
        found = {layer_of(name) for name in self.tensors} - {-1}
        if len(found) < layers or not {*range(layers)} <= found or max(found) >= total:
            raise InvalidInputError(
                f"{self.file} says that it has {total} layers, and has tensors of {len(found)}. Download it again."
            )
        (directory / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        if self.has_tokenizer:
            write_tokenizer(self.file, directory, self._field)
        if not weights:
            return
        total, written = 0, self.file.stat().st_mtime_ns
        located: dict[str, str] = {}
        for unit in range(-1, layers):
            tensors = {name: tensor.to(self.dtype).contiguous() for name, tensor in self.unit(unit)}
            shard = f"model-{unit + 2:05d}-of-{layers + 1:05d}.safetensors"
            save_file(tensors, directory / shard, metadata={"format": "pt"})
            open_to_readers(directory / shard)
            os.utime(directory / shard, ns=(written, written))  # as old as what it was made of, however often it is
            located |= dict.fromkeys(tensors, shard)
            total += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(located.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    @property
    def layers(self) -> int:
        """Number of decoder layers, by the metadata of the file, without those that predict further tokens."""
        return self._said.layers

    @cached_property
    def heads(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values, as the metadata has them."""
        of_queries, of_keys = (self._said.entry(f"attention.head_count{end}") for end in ("", "_kv"))
        heads = max(of_queries) if isinstance(of_queries, list) else int(self._said.number("attention.head_count"))
        return heads, max(of_keys) if isinstance(of_keys, list) else int(of_keys or heads)

    def unit(self, layer: int, *, known_alone: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a layer, or (-1) of what is outside, under a checkpoint's names. Of experts whole matrices.
        Raises `InvalidInputError` for missing tensors, and unless `known_alone` for those that moetool has no name of.
        """
        prefix = layer_in_file(layer, "")
        mine = {name for name in self.tensors if (name.startswith(prefix) if layer >= 0 else "blk." not in name)}
        of_layers = () if self.written is None else self.written.kinds
        template = self._layer
        names = {own: name for name, own in self._family.in_file(self.layers, self._moe, template, of_layers).items()}
        if layer >= 0:
            begin = f"{template.format(layer=layer)}."
            names |= {prefix + own: begin + name for own, name in self._family.former.items()}
            for absent, instead in self._family.without.items():
                if prefix + absent not in mine:
                    names |= {prefix + own: begin + name for name, own in instead.items()}
        changed = self._family.changed([layer] if layer >= 0 else [], template)
        changed = {name: (change, parts) for name, (change, parts) in changed.items() if mine.issuperset(parts)}
        others = {part for _, parts in changed.values() for part in parts}
        for own in sorted((mine & names.keys()) - others):
            heads = self._family.turned_heads(own, *self.heads)
            whole = self._read(own)
            if self.written is not None:
                whole = self._family.multiplied(own, self.written.config_of(layer), whole, power=-1)
            yield names[own], whole if heads is None else halved(whole, heads)
        for name, (key, shape) in self._family.numbers.items() if layer >= 0 else ():
            numbers = self._field(key)
            if not isinstance(numbers, list) or len(numbers) < self.layers:
                raise InvalidInputError(f"{self.file} lacks {key} in its metadata, a number for each layer.")
            yield f"{template.format(layer=layer)}.{name}", torch.tensor(numbers[layer]).view(shape)
        for name, (change, parts) in changed.items():
            yield name, change.together(self._settings(layer), [self._read(part) for part in parts])
        if self._moe is not None and layer in self._moe.moe_layers:
            kinds = (EXPERTS, EXPERT_BIASES) if self._moe.shape.biases else (EXPERTS,)
            others |= {layer_in_file(layer, kind[role]) for kind in kinds for role in self._moe.shape.roles}
            others.add(layer_in_file(layer, GATE_AND_UP))
            yield from self._experts(self._moe, layer)
            if self._family.has_shared and (
                shared := mine & {layer_in_file(layer, n) for n in self._family.shared.values()}
            ):
                others |= shared
                yield from self._shared(self._moe, layer)
        unknown = sorted(mine - names.keys() - others - _OF_ROPE)
        if unknown and not known_alone:
            raise InvalidInputError(
                f"{self.file} has a tensor {unknown[0]} ({len(unknown)} in all) that moetool does not know in a "
                f"{self._family.model_type}."
            )

    def matrices(self, name: str) -> Iterator[Tensor]:
        """A tensor in fp32; of a stack of experts one matrix after the other."""
        shape = self.tensors[name].shape
        for index in range(int(shape[-1])) if len(shape) > 2 else (None,):
            yield self._read(name, index)

    def _settings(self, layer: int) -> Mapping[str, object]:
        """Entries of the config that hold for a layer, by its number; -1 stands for what lies outside of layers."""
        if self.written is None:
            return self.config
        entries: dict[str, object] = self.written.config_of(layer).to_dict()
        return entries

    def _experts(self, moe: Architecture, layer: int) -> Iterator[tuple[str, Tensor]]:
        count, joined_here = int(self._said.number(EXPERT_COUNT)), layer_in_file(layer, GATE_AND_UP)

        def matrix(role: Role, expert: int) -> Tensor:
            if role != "down" and joined_here in self.tensors:
                return self._read(joined_here, expert).chunk(2)[role == "up"].to(self.dtype)
            return self._read(layer_in_file(layer, EXPERTS[role]), expert).to(self.dtype)

        for roles in by_name(moe.weights).values():
            if moe.is_fused:
                joined = [moe.on_disk.fused([matrix(role, expert) for role in roles]) for expert in range(count)]
                yield moe.weight_name(layer, 0, roles[0]), torch.stack(joined)
                if roles[0] in moe.shape.biases:
                    biases = [self._read(layer_in_file(layer, EXPERT_BIASES[role])) for role in roles]
                    yield moe.bias_name(layer, roles[0]), moe.on_disk.joined(biases)
                continue
            for expert in range(count):
                yield moe.weight_name(layer, expert, roles[0]), matrix(roles[0], expert)

    def _shared(self, moe: Architecture, layer: int) -> Iterator[tuple[str, Tensor]]:
        for name, roles in by_name(moe.shared_expert_names(layer)).items():
            found = dict.fromkeys(self._family.shared[role] for role in roles)
            yield name, torch.cat([self._read(layer_in_file(layer, own)) for own in found])

    def _read(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or one of the matrices it is made of, in fp32."""
        if (stored := self.tensors.get(name)) is None:
            raise InvalidInputError(f"{self.file} lacks the tensor {name}.")
        shape = tuple(reversed(stored.shape.tolist()))
        if name.endswith("ffn_gate_inp_shexp.weight"):
            shape = (1, math.prod(shape))
        data, shape = (stored.data, shape) if index is None else (stored.data[index], shape[1:])
        if stored.tensor_type.name == "I32":
            return torch.from_numpy(data.astype("int64")).view(shape)
        try:
            numbers = gguf_library().quants.dequantize(data, stored.tensor_type)
        except NotImplementedError as error:
            raise InvalidInputError(f"{self.file}: {name} is stored as {stored.tensor_type.name}: {error}.") from error
        return torch.from_numpy(numbers.astype("float32", copy=True)).view(shape)
