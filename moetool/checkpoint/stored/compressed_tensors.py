"""compressed-tensors: whole numbers packed in words, or numbers of 4 or 8 bits, with scales.

The library's own functions decode; headers are read without it.

Source: https://github.com/vllm-project/compressed-tensors.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.fp8 import BlockScaled
from moetool.checkpoint.stored.matrix import DecodedMatrix, GroupScales, Spans, check_groups
from moetool.errors import InvalidInputError, in_one_line

_PACKED, _NVFP4, _MXFP4, _MXFP8 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
_IN_WORDS = (_PACKED, _NVFP4, _MXFP4)
_BY_ITSELF = ("int-quantized", "float-quantized", "naive-quantized", _MXFP8)
_CODED_SCALES = (_NVFP4, _MXFP4, _MXFP8)  # scales are codes themselves
_NVFP4_GROUP = 16  # numbers that share a scale
_SHAPE, _ZERO, _ORDER = "weight_shape", "weight_zero_point", "weight_g_idx"
_PARTS = ("weight_scale", _ZERO, "weight_global_scale", _SHAPE, _ORDER)
_OF_ACTIVATIONS = re.compile(r"\.((input|output)_(scale|zero_point|global_scale)|[kvq]_scale)$")


@dataclass(frozen=True)
class StoredScheme:
    """One `config_group` of compressed-tensors: how the modules that it targets are stored.

    Attributes:
        format: of the tensors.
        weights: arguments of the quantization, as `config.json` has them.
        targets: names of modules, patterns after `re:`, or classes.
    """

    format: str
    weights: Mapping[str, object]
    targets: tuple[str, ...]

    def names(self, module: str) -> bool:
        """Whether a target is a pattern of the module's name, or the name itself."""
        return any(
            re.match(target[3:], module) is not None if target.startswith("re:") else target == module
            for target in self.targets
        )

    @property
    def has_classes(self) -> bool:
        """Whether some targets are classes (`Linear`), which modules of any name are."""
        return any(target.isidentifier() and target[:1].isupper() for target in self.targets)

    @property
    def bits(self) -> int:
        """Number of bits of one stored weight, 8 unless the scheme says otherwise."""
        bits = self.weights.get("num_bits", 8)
        if type(bits) is not int or not 1 <= bits <= 8:
            raise InvalidInputError(f"quantization_config: num_bits must be 1 to 8, not {bits!r}.")
        return bits


@dataclass(frozen=True)
class LibraryMatrix(DecodedMatrix):
    """A matrix that the library decodes, rows of it at a time. `parts` begins with the numbers.

    Attributes:
        held: shape of each part in the files, by what its name ends with.
        format: of the tensors.
        weights: arguments of the quantization, in JSON.
    """

    held: tuple[tuple[str, tuple[int, ...]], ...]
    format: str
    weights: str

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        count, columns, state = stop - start, self.shape[-1], {}
        for name, (ending, shape) in zip(self.parts, self.held, strict=True):
            if ending == _SHAPE:
                state[ending] = torch.tensor([count, columns])
            elif ending == _ORDER:
                continue
            elif len(shape) > 1 and math.prod(shape[:-1]) == math.prod(self.shape[:-1]):
                state[ending] = spans(name, start * shape[-1], (count, shape[-1]))
            else:
                state[ending] = spans(name, 0, shape)
        compressor, scheme = _library(self.format, self.weights)
        order = self._order(spans)
        if self.format == _PACKED and (_ZERO in state or order is not None):
            return self._unpacked(state, order, scheme.weights, start, stop).to(self.dtype)
        return compressor.decompress(state, scheme)["weight"].to(self.dtype)

    def scales(self, spans: Spans) -> GroupScales | None:
        (name, (_, shape)), columns = (self.parts[1], self.held[1]), self.shape[-1]
        is_grouped = len(self.shape) == len(shape) == 2 and shape[0] == self.shape[0] and columns % shape[1] == 0
        if not is_grouped or self.format in _CODED_SCALES or self._order(spans) is not None:
            return None
        return GroupScales(name, columns // shape[1])

    def _order(self, spans: Spans) -> Tensor | None:
        """The group of each input; `None` if groups follow each other. Raises `InvalidInputError`."""
        names = {ending: name for name, (ending, _) in zip(self.parts, self.held, strict=True)}
        if _ORDER not in names:
            return None
        order = spans(names[_ORDER], 0, (self.shape[-1],))
        if bool((order < 0).any()):  # as the library initializes it, and understands it
            return None
        check_groups(names[_ORDER], order, self.held[1][1][-1])
        return order

    def _unpacked(
        self, state: Mapping[str, Tensor], order: Tensor | None, arguments: Any, start: int, stop: int
    ) -> Tensor:
        """As the library's compressor does it, but for two things: zero points are packed along rows, all of which it
        would have, and orders of inputs are known to its versions before 0.20 alone."""
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        rows, columns = self.shape
        scales, zeros = state["weight_scale"], state.get(_ZERO)
        if zeros is not None and zeros.dtype == torch.int32:  # the library's versions before 0.9.4 did not pack them
            whole = torch.Size((rows, scales.shape[-1]))
            zeros = unpack_from_int32(zeros, arguments.num_bits, whole, packed_dim=0)[start:stop]
        shape = torch.Size((stop - start, columns))
        codes = unpack_from_int32(state["weight_packed"], arguments.num_bits, shape)
        if order is not None:
            scales, zeros = scales[:, order], None if zeros is None else zeros[:, order]
            arguments = arguments.model_copy(update={"group_size": 1})
        return dequantize(codes, scales, zeros, arguments)


@cache
def _library(form: str, weights: str) -> tuple[Any, Any]:
    """The library's compressor of a format, and a scheme that it takes. Raises `InvalidInputError`."""
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme
    except ImportError as error:
        raise InvalidInputError(
            "Weights in the format of compressed-tensors are decoded by that library: "
            "pip install 'compressed-tensors>=0.15'."
        ) from error
    try:
        scheme = QuantizationScheme(targets=["Linear"], weights=json.loads(weights), format=form)
    except ValueError as error:
        reason = in_one_line(error, 200)
        raise InvalidInputError(f"quantization_config: compressed-tensors refuses its weights: {reason}.") from error
    return BaseCompressor.get_value_from_registry(form), scheme


def _find(files: QuantizedFiles) -> StoredTensors:
    for key in ("sparsity_config", "transform_config"):
        own = files.entry.get(key)
        if isinstance(own, Mapping) and own and own.get("format") != "dense":
            raise InvalidInputError(
                f"{files.path}: its weights have a {key}, which moetool does not decode. Have the tool that wrote it "
                "dequantize it first."
            )
    schemes = _schemes(files)
    tensors = files.tensors
    matrices = [_matrix(files, module, _scheme_of(files, schemes, module)) for module in _modules(files)]
    unused = [name for name in tensors if _OF_ACTIVATIONS.search(name)]
    kinds = dict.fromkeys(f"{scheme.format} with {scheme.bits} bits" for scheme in schemes)
    return StoredTensors(matrices, f"compressed-tensors ({', '.join(kinds)})", unused)


def _schemes(files: QuantizedFiles) -> list[StoredScheme]:
    groups = files.entry.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InvalidInputError(f"quantization_config of {files.path} has no config_groups.")
    found = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
            raise InvalidInputError(f"quantization_config of {files.path}: config_groups.{name} has no weights.")
        form, targets = group.get("format") or files.entry.get("format"), group.get("targets")
        if form not in (*_IN_WORDS, *_BY_ITSELF):
            known = ", ".join((*_IN_WORDS, *_BY_ITSELF))
            raise InvalidInputError(
                f"{files.path} is in the format '{form}' of compressed-tensors; moetool decodes {known}."
            )
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise InvalidInputError(f"quantization_config of {files.path}: config_groups.{name} has no targets.")
        found.append(StoredScheme(str(form), weights, tuple(targets)))
    return found


def _modules(files: QuantizedFiles) -> Iterator[str]:
    """Names of the modules that are stored in a scheme, with a dot behind them."""
    for name, info in files.tensors.items():
        if name.endswith(".weight_packed"):
            yield name.removesuffix("weight_packed")
        elif name.endswith(".weight"):
            module = name.removesuffix("weight")
            if f"{module}weight_scale" in files.tensors:
                yield module
            elif info.dtype.itemsize == 1:
                raise files.refuse(f"{name} is stored in {info.dtype}, and there is no {module}weight_scale")


def _scheme_of(files: QuantizedFiles, schemes: list[StoredScheme], module: str) -> StoredScheme:
    """Of several, that which has the module's name or a pattern of it, else the first of a class."""
    path = module.removesuffix(".")
    named = [scheme for scheme in schemes if scheme.names(path)] or [one for one in schemes if one.has_classes]
    if not named:
        raise InvalidInputError(
            f"{files.path}: {path} is quantized, and no group of quantization_config.config_groups has it as a target."
        )
    return named[0]


def _matrix(files: QuantizedFiles, module: str, scheme: StoredScheme) -> DecodedMatrix:
    """What the tensors of a module make, by their headers."""
    first = "weight_packed" if scheme.format in _IN_WORDS else "weight"
    endings = [first, *(ending for ending in _PARTS if f"{module}{ending}" in files.tensors)]
    if missing := [ending for ending in (first, "weight_scale") if f"{module}{ending}" not in files.tensors]:
        raise files.refuse(f"{module}{missing[0]} is missing, of a module in the format '{scheme.format}'")
    infos = [files.tensors[f"{module}{ending}"] for ending in endings]
    numbers, scales = infos[0], infos[1]
    shape, strategy = _shape(files, scheme, numbers, scales), scheme.weights.get("strategy")
    if strategy == "block":
        return _in_blocks(files, scheme, numbers, scales, module)
    rows = math.prod(shape[:-1])
    is_whole = math.prod(scales.shape) == 1 and strategy in ("tensor", None)
    if not is_whole and math.prod(scales.shape[:-1]) != rows:
        raise files.refuse(
            f"{numbers.name} stands for a matrix {list(shape)}, its scales {scales.name} are {list(scales.shape)}: "
            f"these are not those of the strategy '{strategy}'"
        )
    if not is_whole and strategy == "channel" and scales.shape[-1:] != (1,):
        raise files.refuse(f"{scales.name} is {list(scales.shape)}, of one scale per row")
    if scheme.weights.get("symmetric", True) is False and _ZERO not in endings:
        raise files.refuse(f"{module}{_ZERO} is missing, of a module whose numbers are not symmetric")
    if scheme.format == _NVFP4 and "weight_global_scale" not in endings:
        raise files.refuse(f"{module}weight_global_scale is missing")
    _check_beside_scales(files, scheme, module, shape, scales)
    held = tuple((ending, info.shape) for ending, info in zip(endings, infos, strict=True))
    parts = tuple(info.name for info in infos)
    said = {key: own for key, own in scheme.weights.items() if key != "actorder"}  # which the files have
    weights = json.dumps(said, sort_keys=True)
    return LibraryMatrix(f"{module}weight", shape, files.dtype, parts, held, scheme.format, weights)


def _check_beside_scales(
    files: QuantizedFiles, scheme: StoredScheme, module: str, shape: tuple[int, ...], scales: TensorInfo
) -> None:
    """Raise `InvalidInputError` where zero points or the groups of inputs do not fit a matrix."""
    zeros, order = (files.tensors.get(f"{module}{ending}") for ending in (_ZERO, _ORDER))
    in_words = -(-shape[0] * scheme.bits // 32), *scales.shape[-1:]
    is_packed = scheme.format == _PACKED and zeros is not None and zeros.dtype == torch.int32
    if zeros is not None and zeros.shape != (in_words if is_packed else scales.shape):
        raise files.refuse(
            f"{zeros.name} is {list(zeros.shape)} in {zeros.dtype}, and {scales.name} {list(scales.shape)}: these are "
            "not zero points of such scales"
        )
    if order is not None and (scheme.format != _PACKED or scheme.weights.get("strategy") != "group"):
        raise InvalidInputError(
            f"{order.name} of {files.path} is an order of inputs (actorder), which moetool decodes for groups in "
            f"'{_PACKED}' alone. Have the tool that wrote it dequantize it first."
        )
    if order is not None and (order.shape != shape[1:] or order.dtype not in (torch.int32, torch.int64)):
        raise files.refuse(f"{order.name} is {list(order.shape)} in {order.dtype}, expected the group of each input")


def _shape(files: QuantizedFiles, scheme: StoredScheme, numbers: TensorInfo, scales: TensorInfo) -> tuple[int, ...]:
    """Of the matrix: by the scales where these are of groups, else by the words, all bits of which are used then."""
    wanted = {_PACKED: torch.int32, _NVFP4: torch.uint8, _MXFP4: torch.uint8}.get(scheme.format)
    if wanted is not None and numbers.dtype != wanted:
        raise files.refuse(f"{numbers.name} is stored in {numbers.dtype}, expected {wanted}")
    if wanted is None and numbers.dtype not in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        raise files.refuse(f"{numbers.name} is stored in {numbers.dtype}, and has scales: it is quantized or not")
    if len(numbers.shape) != 2 or not math.prod(numbers.shape):
        raise files.refuse(f"{numbers.name} has shape {list(numbers.shape)}, expected a matrix")
    rows, width = numbers.shape
    group = _NVFP4_GROUP if scheme.format == _NVFP4 else scheme.weights.get("group_size")
    columns = width * {_PACKED: 32, _NVFP4: 8, _MXFP4: 8}.get(scheme.format, scheme.bits) // scheme.bits
    if scheme.weights.get("strategy") in ("group", "tensor_group") and len(scales.shape) == 2:
        if type(group) is not int or group < 1:
            raise InvalidInputError(f"quantization_config of {files.path}: group_size must be above 0, not {group!r}.")
        grouped = scales.shape[1] * group
        if -(-grouped * scheme.bits // 32) != width if scheme.format == _PACKED else grouped != columns:
            raise files.refuse(
                f"{numbers.name} has shape {list(numbers.shape)}, its scales {scales.name} {list(scales.shape)}: these "
                f"are not those of groups of {group}"
            )
        columns = grouped
    return rows, columns


def _in_blocks(
    files: QuantizedFiles, scheme: StoredScheme, numbers: TensorInfo, scales: TensorInfo, module: str
) -> BlockScaled:
    block = scheme.weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise InvalidInputError(f"quantization_config of {files.path}: block_structure must be two numbers above 0.")
    rows, columns = numbers.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    if scheme.weights.get("type") != "float" or f"{module}{_ZERO}" in files.tensors or scales.shape != grid:
        raise files.refuse(
            f"{numbers.name} has shape {list(numbers.shape)}, its scales {scales.name} {list(scales.shape)}: these are "
            f"not FP8 in blocks of {block[0]} × {block[1]}"
        )
    parts, own = (numbers.name, scales.name), (block[0], block[1])
    return BlockScaled(numbers.name, numbers.shape, files.dtype, parts, grid, own)


def _bits(files: QuantizedFiles, module: str) -> float:
    schemes = _schemes(files)
    scheme = _scheme_of(files, schemes, module)
    group = scheme.weights.get("group_size")
    return scheme.bits + (16 / group if isinstance(group, int) and group > 0 else 0)


FORMAT = StoredFormat(("compressed-tensors",), _find, _bits)
