"""MLX: numbers of 2 to 8 bits in words along the inputs, with a scale and a bias per group of these; or MXFP4, NVFP4
and MXFP8, with a scale of 8 bits.

What is decoded has the bits of `mx.dequantize` on a processor: `code · scale + bias` in the dtype of the scales,
rounded to it after the product and after the sum (`affine`), or `number · scale`, rounded once to the dtype of the
model (the others).

`checkpoint.mlx` has given tensors the names of the hub. What is one tensor there and several here is put together:
experts that share a tensor, and latent attention's `kv_b_proj`. Norms that mlx-lm has added one to lose it again.

Source: https://github.com/ml-explore/mlx (`ops.cpp`, `affine_dequantize`, `fp_dequantize`) and mlx-lm (`models/*.py`,
`sanitize`), 0.32.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moetool.architectures import Architecture, Role
from moetool.architectures.fused_layout import PLAIN, FusedLayout
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.stored.codes import integers
from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.fp8 import scales_in_fp32, small_floats
from moetool.checkpoint.stored.matrix import DecodedMatrix, Spans
from moetool.errors import InvalidInputError
from moetool.format.mlx import BIASES, CODES, LOWER, MLX, PART_OF, PLUS_ONE, ROLE_OF, SCALES, STACKED, TURNED, UPPER

_BITS, _GROUPS = (4, 8, 3, 6, 2, 5), (64, 32, 128)
_FLOATS = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # group and bits of the other modes
_NUMBER = re.compile(r"\.experts\.\d+\.")
_BIAS = "bias"
_LATENT, _KEYS, _VALUES = "kv_b_proj", "embed_q", "unembed_out"


@dataclass(frozen=True)
class HeldRows:
    """Rows of numbers that one tensor holds, or codes, scales and biases together.

    Attributes:
        parts: names of the tensors.
        shape: of the numbers, `[…, out, in]`.
        dtype: that they are rounded to.
        bits: of a code; 0 of plain numbers.
        group: inputs that share a scale.
        mode: what codes stand for, as mlx-lm calls it.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int = 0
    group: int = 0
    mode: str = "affine"

    def read(self, spans: Spans, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, counted over all dimensions but the last, `[stop - start, in]`, in `dtype`."""
        columns, count = self.shape[-1], stop - start
        if not self.bits:
            return spans(self.parts[0], start * columns, (count, columns))
        words, groups = columns * self.bits // 32, columns // self.group
        codes = spans(self.parts[0], start * words, (count, words)).view(torch.int32)
        scales = spans(self.parts[1], start * groups, (count, groups))
        if self.mode != "affine":
            held = codes.view(torch.uint8)
            numbers = small_floats(held if self.bits == 4 else held.view(torch.float8_e4m3fn))
            own = small_floats(scales.view(torch.float8_e4m3fn)) if self.mode == "nvfp4" else scales_in_fp32(scales)
            return numbers.unflatten(1, (groups, self.group)).mul_(own[:, :, None]).to(self.dtype).flatten(1)
        biases = spans(self.parts[2], start * groups, (count, groups)).float()[:, :, None]
        grouped = integers(codes, self.bits).unflatten(1, (groups, self.group)).mul_(scales.float()[:, :, None])
        return grouped.to(self.dtype).float().add_(biases).to(self.dtype).flatten(1)


@dataclass(frozen=True)
class MlxMatrix(DecodedMatrix):
    """A matrix `[out, in]`, or several of them, that lie as the family has them."""

    held: HeldRows

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        return self.held.read(spans, start, stop)


@dataclass(frozen=True)
class Joined(DecodedMatrix):
    """Several matrices in one, or those of all experts of a layer, of which mlx-lm has one tensor for each role.

    Attributes:
        matrices: `[out, in]`, or `[experts, out, in]` for each role.
        lies: how they lie in what is shown.
    """

    matrices: tuple[HeldRows, ...]
    lies: FusedLayout

    def rows(self, spans: Spans, start: int, stop: int) -> Tensor:
        each = self.shape[-2]
        found = [
            self._expert(spans, one, max(start - one * each, 0), min(stop - one * each, each))
            for one in range(start // each, -(-stop // each))
        ]
        return torch.cat(found)

    def _expert(self, spans: Spans, expert: int, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` of the matrix of one expert, `[stop - start, in]`."""
        outs = [own.shape[-2] for own in self.matrices]
        if self.lies == PLAIN:
            parts, before = [], 0
            for own, out in zip(self.matrices, outs, strict=True):
                low, high = max(start - before, 0), min(stop - before, out)
                if low < high:
                    parts.append(own.read(spans, expert * out + low, expert * out + high))
                before += out
            return torch.cat(parts)
        whole = [
            own.read(spans, expert * out, (expert + 1) * out) for own, out in zip(self.matrices, outs, strict=True)
        ]
        return self.lies.fused(whole)[start:stop]

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        return self.rows(spans, start, stop)


@dataclass(frozen=True)
class JoinedBiases(Joined):
    """Biases `[experts, outputs]` of matrices that lie in one tensor; `matrices` are `[experts, out]` for each role."""

    def rows(self, spans: Spans, start: int, stop: int) -> Tensor:
        return self.lies.joined([own.read(spans, start, stop) for own in self.matrices])


@dataclass(frozen=True)
class LatentMatrix(DecodedMatrix):
    """`kv_b_proj` `[heads · (keys + values), rank]`, of which mlx-lm has keys turned round `[heads, rank, keys]`, and
    values `[heads, values, rank]`."""

    keys: HeldRows
    values: HeldRows

    def rows(self, spans: Spans, start: int, stop: int) -> Tensor:
        (_, rank, keys), values = self.keys.shape, self.values.shape[1]
        each = keys + values
        found = []
        for head in range(start // each, -(-stop // each)):
            own = self.keys.read(spans, head * rank, (head + 1) * rank).T
            whole = torch.cat([own, self.values.read(spans, head * values, (head + 1) * values)])
            found.append(whole[max(start - head * each, 0) : stop - head * each])
        return torch.cat(found)

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        return self.rows(spans, start, stop)


@dataclass(frozen=True)
class LessOne(DecodedMatrix):
    """A norm's weights, to which mlx-lm has added the one that the family adds when it runs."""

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        columns = self.shape[-1]
        return spans(self.parts[0], start * columns, (stop - start, columns)).float() - 1


class _Files:
    """Tensors of a checkpoint of mlx-lm, with the settings of its modules."""

    def __init__(self, files: QuantizedFiles) -> None:
        self.files, self.entry, self.tensors = files, files.entry, files.tensors
        self.kinds: Counter[tuple[str, int, int]] = Counter()

    @cached_property
    def experts(self) -> Architecture | None:
        """The family, where experts in the files share a tensor on the hub."""
        if not any(STACKED.search(name) for name in self.tensors):
            return None
        from moetool.format.families import architecture_of

        return architecture_of(self.files.config)

    def held(self, module: str) -> HeldRows:
        """The numbers of a module's weight, from headers alone."""
        codes = self.tensors[f"{module}.{CODES}"]
        if (scales := self.tensors.get(f"{module}.{SCALES}")) is None:
            if codes.dtype == torch.uint32:
                raise self.files.refuse(f"{codes.name} is stored in words, and there is no {module}.{SCALES}")
            return HeldRows((codes.name,), codes.shape, codes.dtype)
        biases = self.tensors.get(f"{module}.{BIASES}")
        if f"{module}.global_scale" in self.tensors:
            raise InvalidInputError(
                f"{self.files.path}: {module} has a scale for all of an expert (global_scale), which moetool does not "
                "decode. Take the checkpoint in 16 bits."
            )
        unfit = self.files.refuse(
            f"{codes.name} is {list(codes.shape)} in {codes.dtype}, its scales {list(scales.shape)} in {scales.dtype}"
            + ("" if biases is None else f", its biases {list(biases.shape)} in {biases.dtype}")
            + ": these are not of one matrix"
        )
        alike = codes.shape[:-1] == scales.shape[:-1] and (
            biases is None or (biases.shape, biases.dtype) == (scales.shape, scales.dtype)
        )
        if not alike or len(codes.shape) < 2 or not math.prod(scales.shape) or codes.dtype != torch.uint32:
            raise unfit
        of_floats = biases is None
        if scales.dtype.is_floating_point == of_floats or (of_floats and scales.dtype != torch.uint8):
            raise unfit
        group, bits, mode = self._setting(module, codes, scales, unfit, of_floats=of_floats)
        self.kinds[mode, bits, group] += 1
        shape = (*codes.shape[:-1], scales.shape[-1] * group)
        parts = (codes.name, scales.name) + (() if biases is None else (biases.name,))
        return HeldRows(parts, shape, self.files.dtype if of_floats else scales.dtype, bits, group, mode)

    def _setting(
        self, module: str, codes: TensorInfo, scales: TensorInfo, unfit: InvalidInputError, *, of_floats: bool
    ) -> tuple[int, int, str]:
        """Group, bits and mode of a module: what the config says of it, or of all, if that fits, and else what alone
        fits."""
        bits_of_group = 32 * codes.shape[-1] / scales.shape[-1]
        if of_floats:
            fitting = [(*own, mode) for mode, own in _FLOATS.items() if math.prod(own) == bits_of_group]
        else:
            fitting = [(group, bits, "affine") for group in _GROUPS for bits in _BITS if group * bits == bits_of_group]
        own = self.entry.get(_NUMBER.sub(".experts.", module + ".").removesuffix("."))
        for said in (own, self.entry):
            if isinstance(said, Mapping):
                told = said.get("group_size"), said.get("bits"), said.get("mode", "affine")
                if told in fitting:
                    return next(one for one in fitting if one == told)
        if len(fitting) != 1:
            raise unfit
        return fitting[0]

    def matrices(self) -> Iterator[DecodedMatrix]:
        spent: set[str] = set()
        for matrix in [*self._joined(), *self._latent(), *self._beside()]:
            spent.update(matrix.parts)
            yield matrix
        for name, info in self.tensors.items():
            module, _, ending = name.rpartition(".")
            if name.endswith(PLUS_ONE):
                yield LessOne(name.removesuffix(PLUS_ONE), info.shape, info.dtype, (name,))
            elif ending in (SCALES, BIASES) and f"{module}.{CODES}" not in self.tensors:
                raise self.files.refuse(f"{module}.{CODES} is missing, of which there are {ending}")
            elif (
                ending == CODES
                and name not in spent
                and (info.dtype == torch.uint32 or f"{module}.{SCALES}" in self.tensors)
            ):
                held = self.held(module)
                yield MlxMatrix(name, held.shape, held.dtype, held.parts, held)

    def _latent(self) -> Iterator[DecodedMatrix]:
        """Yield `kv_b_proj` of every layer of latent attention, which mlx-lm has cut in keys and values."""
        for name in self.tensors:
            if not name.endswith(f".{_KEYS}.{CODES}"):
                continue
            attention = name.removesuffix(f"{_KEYS}.{CODES}")
            if f"{attention}{_VALUES}.{CODES}" not in self.tensors:
                raise self.files.refuse(f"{attention}{_VALUES}.{CODES} is missing, beside {name}")
            keys, values = self.held(f"{attention}{_KEYS}"), self.held(f"{attention}{_VALUES}")
            fits = len(keys.shape) == len(values.shape) == 3 and keys.shape[0] == values.shape[0]
            if not fits or keys.shape[1] != values.shape[2]:
                raise self.files.refuse(f"{name} stands for {list(keys.shape)}, {_VALUES} for {list(values.shape)}")
            shape = keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1]
            yield LatentMatrix(
                f"{attention}{_LATENT}.{CODES}", shape, values.dtype, keys.parts + values.parts, keys, values
            )

    def _beside(self) -> Iterator[DecodedMatrix]:
        """Matrices beside experts that lie turned round, or in two."""
        for name in self.tensors:
            for ending, others, lies in ((TURNED, (), FusedLayout(is_transposed=True)), (UPPER, (LOWER,), PLAIN)):
                if name.endswith(f"{ending}.{CODES}"):
                    module = name.removesuffix(f"{ending}.{CODES}")
                    if missing := [own for own in others if f"{module}{own}.{CODES}" not in self.tensors]:
                        raise self.files.refuse(f"{module}{missing[0]}.{CODES} is missing, beside {name}")
                    held = [self.held(f"{module}{own}") for own in (ending, *others)]
                    yield self._one_tensor(f"{module}.{CODES}", held, lies)

    def _joined(self) -> Iterator[DecodedMatrix]:
        """Yield the tensors that hold all experts of a layer on the hub, of which mlx-lm has one for each role."""
        if (family := self.experts) is None:
            return
        held: dict[tuple[int, str], dict[Role, str]] = {}
        for name in self.tensors:
            if (own := STACKED.search(name)) is not None and own["part"] in (CODES, _BIAS):
                module = name.removesuffix(f".{own['part']}")
                held.setdefault((family.layer_of(name), own["part"]), {})[ROLE_OF[own["name"]]] = module
        for (layer, part), found in held.items():
            for roles in family.together(family.shape.roles):
                if missing := [role for role in roles if role not in found]:
                    raise self.files.refuse(
                        f"{family.block_prefix(layer)} lacks {part} of experts' {missing[0]} matrices"
                    )
                if part == CODES:
                    name = family.weight_name(layer, 0, roles[0])
                    yield self._one_tensor(name, [self.held(found[role]) for role in roles], family.on_disk)
                else:
                    beside = [self.tensors[f"{found[role]}.{_BIAS}"] for role in roles]
                    yield _biases(family.bias_name(layer, roles[0]), beside, family.on_disk)

    def _one_tensor(self, name: str, matrices: Sequence[HeldRows], lies: FusedLayout) -> DecodedMatrix:
        """The tensor on the hub of matrices `[out, in]`, or `[experts, out, in]` for each role."""
        if len({(*own.shape[:-2], own.shape[-1]) for own in matrices}) > 1:
            raise self.files.refuse(f"{name} would be made of {[list(own.shape) for own in matrices]}")
        *experts, _, columns = matrices[0].shape
        shape = *experts, *lies.shape(sum(own.shape[-2] for own in matrices), columns)
        parts = tuple(part for own in matrices for part in own.parts)
        return Joined(name, shape, matrices[0].dtype, parts, tuple(matrices), lies)


def _biases(name: str, beside: Sequence[TensorInfo], lies: FusedLayout) -> DecodedMatrix:
    held = tuple(HeldRows((own.name,), own.shape, own.dtype) for own in beside)
    shape = held[0].shape[0], sum(own.shape[1] for own in held)
    return JoinedBiases(name, shape, held[0].dtype, tuple(own.name for own in beside), held, lies)


def _find(files: QuantizedFiles) -> StoredTensors:
    found = _Files(files)
    matrices = list(found.matrices())
    kinds = [own for own, _ in found.kinds.most_common()]
    told = [_told(*own) for own in kinds[:3]] + ["…"] * (len(kinds) > 3)
    whole = f", the language model of {own} alone" if (own := files.entry.get(PART_OF)) else ""
    return StoredTensors(matrices, (f"MLX ({', '.join(told)})" if told else "MLX, in 16 bits or more") + whole)


def _told(mode: str, bits: int, group: int) -> str:
    return f"{bits} bits in groups of {group}" if mode == "affine" else mode.upper()


def _bits(files: QuantizedFiles, module: str) -> float:
    own = files.entry.get(_NUMBER.sub(".experts.", module).removesuffix("."))
    said = {**files.entry, **(own if isinstance(own, Mapping) else {})}
    bits, group = said.get("bits"), said.get("group_size")
    if own is False or type(bits) is not int or type(group) is not int or not group:
        return 8 * files.dtype.itemsize
    return bits + (32 if said.get("mode", "affine") == "affine" else 8) / group


FORMAT = StoredFormat((MLX,), _find, _bits)
