"""Export for mlx-lm, which runs models on Apple silicon: experts in few bits, all other matrices in 8 unless asked."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from moetool.architectures import Role
from moetool.checkpoint.writer import TensorSpec
from moetool.compress.encoded_layers import Named
from moetool.errors import InvalidInputError
from moetool.export.coded_experts import CodedExperts, CodedExpertsOptions
from moetool.export.packing import Packing, part_name
from moetool.format.blocks import BlockLayout, affine
from moetool.format.mlx import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    BIASES,
    CODES,
    EXPERTS_IN,
    SCALES,
    packed_entry,
    packed_tensors,
    stacked_name,
    told_outright,
)
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.numerics.words import pack_words

_AS_THEY_ARE = 16


class ExportMlxOptions(CodedExpertsOptions):
    """Options of the export to MLX: bits of experts and of all else, and the text that codes are chosen on, if any."""

    bits: int = Field(4, description=f"Bits of every number of an expert: {', '.join(map(str, AFFINE_BITS))}.")
    group_size: Literal[32, 64, 128] = Field(64, description="Inputs that share a scale and a bias.")
    other_bits: Literal[4, 5, 6, 8, 16] = Field(
        8,
        description="Bits of attention, dense FFNs, shared experts, embeddings and head, whose codes are the nearest; "
        "16 leaves them as they are.",
    )

    @field_validator("bits")
    @classmethod
    def _packed(cls, bits: int) -> int:
        if bits not in AFFINE_BITS:
            raise ValueError(f"there are {', '.join(map(str, AFFINE_BITS))}, not {bits}")
        return bits


class ExportMlx(CodedExperts[ExportMlxOptions]):
    """Codes every expert anew on an even grid, whatever it was stored as, and all other matrices, too; norms,
    routers and vectors pass through."""

    name: ClassVar[str] = "mlx"
    summary: ClassVar[str] = "experts in 2 to 8 bits as mlx-lm runs them on Apple silicon"
    options_type: ClassVar[type[RunOptions]] = ExportMlxOptions
    kernels: ClassVar[str] = "MLX's kernels"

    @cached_property
    def packing(self) -> "_Affine":
        return self._packing(self.options.bits)

    def _packing(self, bits: int) -> "_Affine":
        return _Affine(self.source.architecture, bits, self.options.group_size, self.source.experts.dtype)

    def check(self) -> None:
        if self._kind not in EXPERTS_IN:
            raise InvalidInputError(
                f"'{self._kind}' is not among the families whose exports were compared in mlx-lm: "
                f"{', '.join(sorted(EXPERTS_IN))}. Take {self.instead}."
            )
        self.check_groups(AFFINE_GROUPS)

    def other_groups(self, common: int) -> list[int]:
        return []

    @property
    def _kind(self) -> str:
        return str(self.source.checkpoint.config.get("model_type"))

    def _stacked(self, layer: int, role: Role) -> str:
        return stacked_name(self.source.architecture.block_prefix(layer), self._kind, role)

    def layer_specs(self, layer: int) -> list[TensorSpec]:
        shape = self.source.experts.shape
        found = []
        for role in shape.roles:
            name = self._stacked(layer, role)
            for own in self.packing.specs(name, shape.matrix(role)):
                found.append(TensorSpec(own.name, own.dtype, (shape.experts, *own.shape)))
        return found

    def as_written(self, layer: int, experts: Named) -> Named:
        found = dict(experts)
        reader, packing = self.source.experts, self.packing
        for role in reader.shape.roles:
            names = [packing.name(layer, expert, role) for expert in range(reader.shape.experts)]
            for part in (CODES, SCALES, BIASES):
                whole = torch.stack([found.pop(part_name(name, part)) for name in names])
                yield part_name(self._stacked(layer, role), part), whole

    def passing(self, spec: TensorSpec) -> list[TensorSpec]:
        if not self._is_coded(spec):
            return [spec]
        return self._packing(self.options.other_bits).specs(spec.name, (spec.shape[0], spec.shape[1]))

    def passed(self, job: Job, specs: Iterable[TensorSpec], read: Callable[[str], Tensor]) -> Named:
        for name in _coded(specs):
            yield from self._packing(self.options.other_bits).nearest(name, read(name).to(job.device))

    def _is_coded(self, spec: TensorSpec) -> bool:
        """Whether it is a matrix that mlx-lm may hold in codes: of a linear layer, or an embedding."""
        architecture, group = self.source.architecture, self.options.group_size
        return (
            self.options.other_bits != _AS_THEY_ARE
            and len(spec.shape) == 2
            and spec.name.endswith(f".{CODES}")
            and spec.dtype.is_floating_point
            and spec.shape[0] >= AFFINE_GROUPS[0]
            and spec.shape[1] % group == 0
            and not any(architecture.is_router(layer, spec.name) for layer in architecture.moe_layers)
        )

    def entries(self) -> Mapping[str, object]:
        options = self.options
        entry = packed_entry(options.bits, options.group_size, _coded(self.matrices), options.other_bits)
        return {**told_outright(self.source.checkpoint.settings), "quantization": entry, "quantization_config": entry}


def _coded(specs: Iterable[TensorSpec]) -> list[str]:
    """Names of the matrices in codes among these tensors, those of experts left out."""
    return [spec.name for spec in specs if spec.dtype == torch.uint32 and len(spec.shape) == 2]


class _Affine(Packing):
    """Matrices that are stacked, expert by expert, when they are written."""

    @property
    def layout(self) -> BlockLayout:
        return affine(self.bits, self.group, self.dtype)

    def name(self, layer: int, expert: int, role: Role) -> str:
        return f"{self.architecture.block_prefix(layer)}switch_mlp.{expert}.{role}_proj.{CODES}"

    def parts(self, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return packed_tensors(shape, self.bits, self.group, self.dtype)

    def packed(self, codes: Tensor, scales: Tensor, minima: Tensor) -> dict[str, Tensor]:
        return {CODES: pack_words(codes, self.bits).view(torch.uint32), SCALES: scales, BIASES: -minima}
