"""Export of experts in few bits to compressed-tensors' `pack-quantized`, which vLLM and transformers run."""

import re
from collections.abc import Mapping
from itertools import product
from typing import ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from moetool.architectures import Role
from moetool.checkpoint.writer import TensorSpec
from moetool.errors import InvalidInputError, UsageError
from moetool.export.coded_experts import CodedExperts, CodedExpertsOptions
from moetool.export.packing import Packing
from moetool.format.blocks import BlockLayout, symmetric
from moetool.format.compressed_tensors import (
    KERNEL_BITS,
    KERNEL_GROUPS,
    PACKED,
    PACKED_BITS,
    SCALE,
    SHAPE,
    packed_entry,
    packed_tensors,
)
from moetool.job.options import RunOptions
from moetool.numerics.words import pack_words

_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


class ExportCompressedTensorsOptions(CodedExpertsOptions):
    """Options of the export to compressed-tensors: bits, engine, and the text that codes are fitted on, if any."""

    bits: int = Field(
        4,
        description="Bits of every number of an expert: 2, 3, 4 or 8. transformers reads all, vLLM's kernels for "
        "experts 4 and 8.",
    )
    group_size: int = Field(128, ge=1, description="Inputs that share a scale; vLLM's kernels take 32, 64 and 128.")
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Cards that will share every expert (vLLM's --tensor-parallel-size): whole groups each.",
    )

    @field_validator("bits")
    @classmethod
    def _served(cls, bits: int) -> int:
        if bits not in PACKED_BITS:
            raise ValueError(
                f"there are {', '.join(map(str, PACKED_BITS))}, not {bits}; vLLM's kernels for experts read "
                f"{' and '.join(map(str, KERNEL_BITS))}, transformers all of them"
            )
        return bits


class ExportCompressedTensors(CodedExperts[ExportCompressedTensorsOptions]):
    """Codes every expert anew on an even grid, whatever it was stored as; everything else passes through."""

    name: ClassVar[str] = "compressed-tensors"
    summary: ClassVar[str] = "experts in 2 to 8 bits as vLLM and transformers read them (pack-quantized)"
    options_type: ClassVar[type[RunOptions]] = ExportCompressedTensorsOptions
    kernels: ClassVar[str] = "vLLM's Marlin kernels for experts"

    def packing(self, layer: int, role: Role) -> Packing:
        options = self.options
        return _PackQuantized(self.source.architecture, options.bits, options.group_size, self.source.experts.dtype)

    def check(self) -> None:
        architecture, width, cards = (
            self.source.architecture,
            self.source.experts.shape.intermediate,
            self.options.tensor_parallel,
        )
        if architecture.is_fused:
            raise InvalidInputError(
                f"{architecture.name} has all experts of a layer in one tensor, {architecture.weights['down']}; "
                f"pack-quantized stores, and engines look for, a matrix for each expert. Take {self.instead}."
            )
        if width % cards:
            raise UsageError(f"--tensor-parallel {cards} does not divide the experts' width of {width}.")
        self.check_groups(KERNEL_GROUPS, cards)

    def layer_specs(self, layer: int) -> list[TensorSpec]:
        shape, found = self.source.experts.shape, list[TensorSpec]()
        for expert, role in product(range(shape.experts), shape.roles):
            packing = self.packing(layer, role)
            found += packing.specs(packing.name(layer, expert, role), shape.matrix(role))
        return found

    def lacking(self) -> dict[str, str]:
        """What vLLM's Marlin kernels for experts want and this model does not have (vLLM, `marlin_utils.py`)."""
        shape, group, cards = self.source.experts.shape, self.options.group_size, self.options.tensor_parallel
        width, least = shape.intermediate // cards, max(64, group)
        found = []
        if self.options.bits not in KERNEL_BITS:
            found.append(f"{' or '.join(map(str, KERNEL_BITS))} bits (here {self.options.bits})")
        if group not in KERNEL_GROUPS:
            found.append(f"groups of {', '.join(map(str, KERNEL_GROUPS))} (here {group})")
        if shape.hidden % 128:
            found.append(f"a hidden size that 128 divides (here {shape.hidden})")
        if width % least:
            found.append(f"experts whose width on a card {least} divides (here {width})")
        return {"vllm_kernels_want": "; ".join(found)} if found else {}

    def remarks(self) -> list[str]:
        layers = self.source.architecture.layer.format(layer="")
        plain = [spec.name for spec in self.matrices if _OF_EXPERT.search(spec.name)]
        if not (outside := [name for name in plain if not name.startswith(layers)]):
            return super().remarks()
        return [
            *super().remarks(),
            f"Experts outside of the language model ({outside[0]}) stay as they are, and transformers takes all "
            "experts for packed: AutoModelForCausalLM loads the language model alone, and "
            "AutoModelForImageTextToText fails. What moetool compress makes is loaded by both.",
        ]

    def entries(self) -> Mapping[str, object]:
        reader, options, others = self.source.experts, self.options, [spec.name for spec in self.matrices]
        entry = packed_entry(
            self.source.architecture, reader.moe_layers, reader.shape.roles, others, options.bits, options.group_size
        )
        return {"quantization_config": entry}


class _PackQuantized(Packing):
    """A matrix for each expert, under its name in the model."""

    @property
    def layout(self) -> BlockLayout:
        return symmetric(self.bits, self.group, self.dtype)

    def name(self, layer: int, expert: int, role: Role) -> str:
        return self.architecture.weight_name(layer, expert, role)

    def parts(self, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return packed_tensors(shape, self.bits, self.group, self.dtype)

    def packed(self, codes: Tensor, scales: Tensor, minima: Tensor) -> dict[str, Tensor]:
        return {PACKED: pack_words(codes, self.bits), SCALE: scales, SHAPE: torch.tensor(codes.shape)}
