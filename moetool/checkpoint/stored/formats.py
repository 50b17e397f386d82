"""Formats of other tools, one file each. A file in this directory that defines `FORMAT` is known."""

import importlib
import json
import math
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moetool.checkpoint.header import TensorInfo, read_numbers
from moetool.checkpoint.stored.matrix import DecodedMatrix
from moetool.errors import InvalidInputError
from moetool.format.entry import is_quantized_elsewhere
from moetool.format.marker import OWN, STORED, moetool_entry
from moetool.format.mlx import MLX

ABOUT_MODELOPT = "hf_quant_config.json"
# What other tools leave beside the weights about their format: it is not true of what is made of the decoded ones.
ABOUT_WEIGHTS = frozenset({ABOUT_MODELOPT, "quantize_config.json", "quant_config.json"})
_EXCEPTED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
_LEFT = re.compile(r"(embed|lm_head|\bgate\.weight|router|norm|bias$)")


@dataclass(frozen=True)
class QuantizedFiles:
    """Headers and `quantization_config` of a quantized checkpoint, which a format is found in.

    Attributes:
        path: where it lies.
        entry: `quantization_config` of its `config.json`.
        tensors: of its files, by name.
        dtype: of the model.
        config: its `config.json`.
    """

    path: Path
    entry: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    dtype: torch.dtype
    config: Mapping[str, object]

    def read(self, name: str) -> Tensor:
        """A small tensor, whole: notes on matrices that some formats keep outside of the headers. Raises
        `InvalidInputError` for a file that cannot be read."""
        return read_numbers(self.tensors[name], 0, self.tensors[name].shape)

    def refuse(self, what: str) -> InvalidInputError:
        """Make the error for a tensor, named at the beginning of `what`, whose parts do not fit together."""
        return InvalidInputError(f"{self.path}: {what}. Download or write it again.")


@dataclass(frozen=True)
class StoredTensors:
    """Matrices that a quantized checkpoint stands for, and the tensors that are not shown.

    Attributes:
        matrices: those that are stored in it.
        description: the format with its numbers, for people.
        unused: names of tensors that only its own engine needs, such as scales of activations.
    """

    matrices: Collection[DecodedMatrix]
    description: str
    unused: Collection[str] = ()


@dataclass(frozen=True)
class StoredFormat:
    """A format of quantized checkpoints that can be read: its names, its decoder, its bits per number.

    Attributes:
        methods: what `quantization_config.quant_method` says.
        find: the matrices of files. It raises `InvalidInputError` where parts are missing or do not fit each other, and
            where they are in a scheme that it does not decode.
        bits: per number of the matrix of a module (`model.layers.0.self_attn.q_proj.`), scales included.
    """

    methods: tuple[str, ...]
    find: Callable[[QuantizedFiles], StoredTensors]
    bits: Callable[[QuantizedFiles, str], float]


@cache
def formats() -> Mapping[str, StoredFormat]:
    """All formats that can be read, by the `quant_method` of `quantization_config`."""
    names = [info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return {method: own for own in found for method in own.methods}


def entry_of(config: Mapping[str, object], path: Path) -> Mapping[str, object] | None:
    """What a checkpoint says of the format that another tool has stored it in: `quantization_config` of its config, or
    the file beside it in which ModelOpt's first exports have that; of a result of moetool's, what its source said of
    the tensors that were passed on. `None` for any that is not quantized by another tool.

    Raises:
        InvalidInputError: that file cannot be read.
    """
    entry = config.get("quantization_config")
    if (own := moetool_entry(config)) is not None:
        held = own.get(STORED)
        return held if isinstance(held, Mapping) else None
    if entry is not None or not (path / ABOUT_MODELOPT).exists():
        return entry if is_quantized_elsewhere(config) and isinstance(entry, Mapping) else None
    try:
        held = json.loads((path / ABOUT_MODELOPT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"Cannot use {path / ABOUT_MODELOPT}: {error}. Download it again.") from error
    own = held.get("quantization") if isinstance(held, Mapping) else None
    return {**own, "quant_method": "modelopt"} if isinstance(own, Mapping) and own.get("quant_algo") else None


def matrices_of(config: Mapping[str, object], tensors: Mapping[str, TensorInfo], path: Path) -> StoredTensors | None:
    """What a checkpoint in another tool's format holds; `None` for one that is in none, or in one that is not known.

    Raises:
        InvalidInputError: parts of a matrix are missing or do not fit each other, or are in a scheme that is not known.
    """
    entry = entry_of(config, path)
    if entry is None or (known := formats().get(str(entry.get("quant_method")))) is None:
        return None
    others = {name: info for name, info in tensors.items() if OWN not in name}
    found = known.find(QuantizedFiles(path, entry, others, model_dtype(config, tensors), config))
    if not found.matrices and entry["quant_method"] != MLX:  # which may have other names alone
        raise InvalidInputError(
            f"{path} says that its weights are quantized (quant_method '{entry['quant_method']}'), and no tensor of "
            f"the files is. If they are not, remove quantization_config from config.json, and {ABOUT_MODELOPT} if it "
            "is there."
        )
    return found


def expected_bytes(
    config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, int] | None:
    """About how many bytes each matrix of a model takes that is in the format that the config names, by its name;
    `None` as `matrices_of`.

    Embeddings, heads and routers are not among them, which all makers leave in 16 bits, nor what the config excepts.
    Raises `InvalidInputError` for an entry that cannot be used.
    """
    entry = entry_of(config, path)
    if entry is None or (known := formats().get(str(entry.get("quant_method")))) is None:
        return None
    files = QuantizedFiles(path, entry, {}, model_dtype(config, {}), config)
    given = [entry.get(key) for key in _EXCEPTED]
    left = [_pattern(str(own)) for names in given if isinstance(names, list) for own in names]
    found = {}
    for name, shape in shapes.items():
        module = name.removesuffix("weight")
        excepted = any(own.match(module.removesuffix(".")) for own in left)
        if len(shape) >= 2 and not excepted and _LEFT.search(name) is None:
            bits = known.bits(files, module)
            if bits < 8 * files.dtype.itemsize:
                found[name] = round(math.prod(shape) * bits / 8)
    return found


def _pattern(name: str) -> re.Pattern[str]:
    """Of the modules that a config excepts by a name, its last parts, or a pattern (`re:` or with stars)."""
    own = name.removeprefix("re:") if name.startswith("re:") else re.escape(name).replace(r"\*", ".*")
    try:
        return re.compile(rf"(?:.*\.)?(?:{own})(?:\.|$)")
    except re.error as error:
        raise InvalidInputError(f"quantization_config excepts {name!r}, which is no pattern ({error}).") from error


def model_dtype(config: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The dtype of a model: what its config says; where that says nothing, that of its norms, and bf16 if those are in
    fp32, in which some tools leave them."""
    said = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    if isinstance(said, torch.dtype) and said.is_floating_point and said.itemsize > 1:
        return said
    norms = {info.dtype for name, info in tensors.items() if name.endswith("norm.weight")}
    return torch.float16 if norms == {torch.float16} else torch.bfloat16
