"""Checkpoints that mlx-lm has written, under the names and in the shapes that their families have on the hub.

mlx-lm changes names and shapes before it saves a model (`sanitize` of its families): the matrices of all experts of a
layer are one tensor, some modules have other names, weights of convolutions end in their inputs, and of a model that
also sees the language model alone is there. Here tensors get the hub's names and shapes, from headers alone;
`checkpoint.stored.mlx` decodes, and makes what is one tensor on the hub of several.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from moetool.architectures import Architecture, find_architecture
from moetool.checkpoint.header import TensorInfo
from moetool.errors import InvalidInputError
from moetool.format.marker import without_stored
from moetool.format.mlx import (
    ADDS_ONE,
    CODES,
    CONVOLUTION,
    IN_PARTS,
    MLX,
    NORMS,
    NOT_UNDONE,
    PART_OF,
    PLUS_ONE,
    RENAMED,
    ROLE_OF,
    STACKED,
)

Tensors = dict[str, TensorInfo]

_LANGUAGE = "language_model."  # what names of a language model within another begin with
# What the config around that of a language model says of it.
_AROUND = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
# Language models within others that transformers has no class of, and the family that computes the same on text alone.
_ALONE: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_vl_text": "qwen2",
        "qwen2_5_vl_text": "qwen2",
        "qwen3_vl_text": "qwen3",
        "qwen3_vl_moe_text": "qwen3_moe",
    }
)


def as_on_the_hub(
    tensors: Tensors, config: Mapping[str, object], path: Path, *, is_marked: bool
) -> tuple[Tensors, dict[str, object]]:
    """Tensors and `config.json` of a checkpoint, those of mlx-lm as if its family's authors had written them.

    Args:
        tensors: of the files, by name.
        config: as it stands, with what it says of quantization where all say it.
        path: of the checkpoint.
        is_marked: whether the files say that MLX has written them.

    Raises:
        InvalidInputError: the family's tensors do not follow from mlx-lm's, or parts of them do not fit the config.
    """
    entry = config.get("quantization_config")
    is_coded = isinstance(entry, Mapping) and entry.get("quant_method") == MLX
    if not is_coded and (entry is not None or not is_marked):
        return tensors, dict(config)
    found, shown = _language_model(tensors, config)
    kind = str(shown.get("model_type"))
    if (why := NOT_UNDONE.get(kind)) is not None:
        raise InvalidInputError(
            f"{path} is a {kind} that mlx-lm has written. It {why}, which cannot be undone: take the checkpoint that "
            "it was made of."
        )
    renamed, adds_one = _renaming(kind), kind in ADDS_ONE and any(map(_is_turned, found.values()))
    infos = (replace(info, name=renamed(name)) for name, info in found.items())
    found = _by_name((_in_shape(info, kind, adds_one=adds_one) for info in infos), path)
    turn = _Experts(found, shown, path)
    split = _by_name((one for info in found.values() for one in turn.split(info)), path)
    if split == tensors and not is_coded and not any(IN_PARTS.search(name) for name in split):
        return tensors, dict(config)
    told: dict[str, object] = {"quant_method": MLX}
    if kind != config.get("model_type"):
        told[PART_OF] = config.get("model_type")
    if isinstance(entry, Mapping):
        told |= {_setting(key, own, turn, renamed): own for key, own in entry.items()}
    dtype = _dtype(split, shown)
    kept = {key: own for key, own in shown.items() if not dtype or key != "torch_dtype"}
    return split, {**kept, "quantization_config": told, **dtype}


def _by_name(infos: Iterable[TensorInfo], path: Path) -> Tensors:
    found: Tensors = {}
    for info in infos:
        if found.setdefault(info.name, info) is not info:
            raise InvalidInputError(
                f"{path} has {info.name} twice, under its name on the hub and under that of mlx-lm: which one counts? "
                "Download or write the checkpoint again."
            )
    return found


def _language_model(tensors: Tensors, config: Mapping[str, object]) -> tuple[Tensors, dict[str, object]]:
    """The tensors and the config of a language model, where they lie in those of a model that also sees or hears."""
    text = config.get("text_config")
    own = {name.removeprefix(_LANGUAGE): info for name, info in tensors.items() if name.startswith(_LANGUAGE)}
    if not own or not isinstance(text, Mapping) or not text.get("model_type"):
        return tensors, dict(config)
    kept = {key: config[key] for key in _AROUND if key in config}
    alone = {name: replace(info, name=name) for name, info in own.items()}
    return alone, _on_text_alone({**kept, **text})


def _on_text_alone(config: dict[str, object]) -> dict[str, object]:
    """The config of a family that transformers has by itself. Of text, all axes of its positions are the same."""
    if (kind := _ALONE.get(str(config["model_type"]))) is None:
        return config
    made = {**config, "model_type": kind, **({"norm_topk_prob": True} if kind == "qwen3_moe" else {})}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(own := made.get(key), Mapping):
            left = {name: value for name, value in own.items() if not name.startswith("mrope")}
            made[key] = {**left, **{name: "default" for name in ("type", "rope_type") if left.get(name) == "mrope"}}
    return made


def _renaming(kind: str) -> Callable[[str], str]:
    """Return the function from a tensor's name in mlx-lm to its name on the hub, for a family."""
    rules = [(re.compile(old), new) for old, new in RENAMED.get(kind, {}).items()]

    def renamed(name: str) -> str:
        name = name.removeprefix(_LANGUAGE)
        for old, new in rules:
            name = old.sub(new, name)
        return name

    return renamed


def _is_turned(info: TensorInfo) -> bool:
    """Whether it is the weight of a convolution of one input channel, which mlx-lm puts behind the kernel."""
    return CONVOLUTION.search(info.name) is not None and len(info.shape) == 3 and info.shape[2] == 1


def _in_shape(info: TensorInfo, kind: str, *, adds_one: bool) -> TensorInfo:
    """A tensor in the family's shape, which costs no byte; a norm that one was added to under a name that says so."""
    name, shape = info.name, info.shape
    if _is_turned(info):
        shape = shape[0], 1, shape[1]
    elif kind == "apertus" and name.endswith(("alpha_p", "alpha_n")):
        shape = (1,)
    elif adds_one and len(shape) == 1 and NORMS.search(name):
        name += PLUS_ONE
    return replace(info, name=name, shape=shape)


class _Experts:
    """Experts of the layers of a model, of whose matrices mlx-lm has one tensor for each role."""

    def __init__(self, tensors: Tensors, config: Mapping[str, object], path: Path) -> None:
        self._path = path
        stacked = any(STACKED.search(name) for name in tensors)
        self._family = find_architecture(without_stored(config)) if stacked else None

    def split(self, info: TensorInfo) -> Iterator[TensorInfo]:
        """The tensors of single experts that lie one behind the other in one tensor; any other as it is."""
        family, found = self._family, STACKED.search(info.name)
        if family is None or found is None or family.is_fused:
            yield info
            return
        count, layer = family.shape.experts, family.layer_of(info.name)
        if info.shape[:1] != (count,) or layer < 0:
            raise InvalidInputError(
                f"{self._path}: {info.name} has shape {list(info.shape)}; config.json says {count} experts in "
                f"{family.layers} layers. Download or write the checkpoint again."
            )
        nbytes = info.nbytes // count
        for expert in range(count):
            name = _native(family, layer, f"{expert}", found)
            at = info.offset + expert * nbytes
            yield replace(info, name=name, shape=info.shape[1:], nbytes=nbytes, offset=at)

    def module(self, name: str) -> str:
        """The name under which a module has its settings, from that of its weight: of experts without their numbers."""
        family, found = self._family, STACKED.search(name)
        if family is None or found is None or family.is_fused or (layer := family.layer_of(name)) < 0:
            return name.removesuffix(f".{CODES}")
        return _native(family, layer, "", found).removesuffix(f".{CODES}").replace("..", ".")


def _native(family: Architecture, layer: int, expert: str, found: re.Match[str]) -> str:
    template = family.block_prefix(layer) + family.weights[ROLE_OF[found["name"]]].format(expert=expert)
    return template.removesuffix(CODES) + found["part"]


def _setting(key: str, own: object, experts: _Experts, renamed: Callable[[str], str]) -> str:
    """The key of an entry of `quantization_config`; of one for a single module its name on the hub."""
    is_of_module = isinstance(own, Mapping | bool) and "." in key
    return experts.module(renamed(f"{key}.{CODES}")) if is_of_module else key


def _dtype(tensors: Tensors, config: Mapping[str, object]) -> dict[str, object]:
    """The entry for a model's dtype, where the config still has that of what mlx-lm has converted."""
    sizes: dict[torch.dtype, int] = {}
    for info in tensors.values():
        if info.dtype.is_floating_point and info.dtype.itemsize > 1:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    if not sizes:
        return {}
    found = str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
    return {} if found == str(config.get("dtype") or config.get("torch_dtype")) else {"dtype": found}
