"""Export for mlx-lm, which runs models on Apple silicon: every matrix in bits that are given, or chosen on a text."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from moetool.architectures import Architecture, Role
from moetool.checkpoint.names import CONFIG
from moetool.checkpoint.sizes import format_bytes
from moetool.checkpoint.writer import TensorSpec
from moetool.compress.coding_text import CodingText
from moetool.compress.encoded_layers import Named
from moetool.costs.building_blocks import ModelSize
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import Phases
from moetool.errors import InvalidInputError
from moetool.export.blocks.blocked import Blocked
from moetool.export.blocks.coding import choosing_blocks, nearest_blocks_work, preparing_inputs
from moetool.export.choosing.ends import Ends
from moetool.export.choosing.losses import expected_coding, moments_between_rows, trying_types
from moetool.export.choosing.measuring import measure_types
from moetool.export.choosing.menu import Menu, counted_types
from moetool.export.coded_experts import CodedExperts
from moetool.export.mlx.model import MlxModel
from moetool.export.mlx.options import ExportMlxOptions, MatrixBits, MlxDetails
from moetool.export.packing import PackedBeside, Packing, part_name
from moetool.format.beside import weight_of
from moetool.format.blocks import AffineCodes
from moetool.format.mlx import (
    AFFINE_GROUPS,
    BIASES,
    CODES,
    EXPERTS_IN,
    SCALES,
    bits_of,
    is_added_to,
    is_turned_round,
    packed_entry,
    packed_tensors,
    said_by_mlx,
    stacked_biases,
    told_of_head,
    told_outright,
    written_name,
)
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.result import CalibrationFacts, Details, Printed, Sizes
from moetool.numerics.words import pack_words
from moetool.numerics.work import Work, altogether

_AS_THEY_ARE = 16
_BITS, _OTHER_BITS = 4, 8  # unless they are given, or chosen
_AROUND = 256  # bytes by which headers of weight files may differ beyond what is counted


class ExportMlx(CodedExperts[ExportMlxOptions]):
    """Codes every expert anew on an even grid, whatever it was stored as, and all other matrices, too; norms,
    routers and vectors pass through."""

    name: ClassVar[str] = "mlx"
    summary: ClassVar[str] = "experts in 2 to 8 bits as mlx-lm runs them on Apple silicon"
    options_type: ClassVar[type[RunOptions]] = ExportMlxOptions
    kernels: ClassVar[str] = "MLX's kernels"
    has_biases: ClassVar[bool] = True

    _ends: Ends | None = None

    @property
    def needs_text(self) -> bool:
        return self.options.chooses_bits

    @cached_property
    def _model(self) -> MlxModel:
        return MlxModel(self.source, self.options.group_size, self.rest)

    @cached_property
    def _bits(self) -> Mapping[str, int]:
        """Bits of every matrix in codes, by the name of its codes; the most on offer where they are still to be
        chosen."""
        options, model = self.options, self._model
        if options.chooses_bits:
            return model.with_fixed(model.menu.largest)
        experts = {tensor.name: options.bits or _BITS for tensor in model.tensors if tensor.is_experts}
        others = [] if self._leaves_others else model.all_coded
        return experts | dict.fromkeys(others, options.other_bits or _OTHER_BITS)

    @property
    def _leaves_others(self) -> bool:
        return self.options.other_bits == _AS_THEY_ARE

    @property
    def _menu(self) -> Menu[AffineCodes] | None:
        """Bits on offer, if they are to be chosen."""
        return self._model.menu if self.options.chooses_bits else None

    def _in(self, chosen: Mapping[str, AffineCodes]) -> Self:
        """The same export in these bits."""
        other = copy(self)
        other._choose(self._model.with_fixed(chosen))
        return other

    def _choose(self, bits: Mapping[str, int]) -> None:
        self._bits = bits
        vars(self).pop("_shards", None)

    @cached_property
    def _around(self) -> int:
        """Bytes of the weight files that are no tensors', at most."""
        menu = self._model.menu
        ends = menu.smallest, menu.largest
        return max(self._in(chosen)._shards.nbytes - menu.nbytes(chosen) for chosen in ends) + _AROUND

    @cached_property
    def _budget(self) -> int:
        """Bytes of all tensors that the chosen bits may take. Raises `UsageError` where nothing is that small."""
        menu, size = self._model.menu, self.options.size
        if size is not None:
            return menu.budget_within(size, self._around, has_experts=True)
        assert self.options.target_bpw is not None
        return menu.budget(self.options.target_bpw)

    def packing(self, layer: int, role: Role) -> "_Affine":
        return self._packed(self._model.expert_tensor(layer, role))

    def _packed(self, name: str) -> "_Affine":
        source = self.source
        group, dtype = self.options.group_size, source.experts.dtype
        return _Affine(self._kind, source.architecture, self._bits[name], group, dtype)

    def check(self) -> None:
        if self._kind not in EXPERTS_IN:
            raise InvalidInputError(
                f"'{self._kind}' is not among the families whose exports were compared in mlx-lm: "
                f"{', '.join(sorted(EXPERTS_IN))}. Take {self.instead}."
            )
        self._told()
        self.check_groups(AFFINE_GROUPS)

    def other_groups(self, common: int) -> list[int]:
        return []

    def _told(self) -> dict[str, object]:
        """What `config.json` says in words of mlx-lm's. Raises `InvalidInputError` where it has none."""
        checkpoint, head = self.source.checkpoint, weight_of(self.source.architecture.embeddings[1])
        tied = checkpoint.settings.get("tie_word_embeddings")
        has_head = not tied if checkpoint.is_imagined else head in checkpoint.tensors
        return told_outright(checkpoint.settings) | told_of_head(self._kind, has_head=has_head)

    @property
    def _kind(self) -> str:
        return str(self.source.checkpoint.config.get("model_type"))

    def layer_specs(self, layer: int) -> list[TensorSpec]:
        shape = self.source.experts.shape
        found = []
        for role in shape.roles:
            name = self._model.expert_tensor(layer, role)
            for own in self.packing(layer, role).specs(name, shape.matrix(role)):
                found.append(TensorSpec(own.name, own.dtype, (shape.experts, *own.shape)))
        return found + [
            TensorSpec(self._biases(layer, role), self.source.experts.dtype, (shape.experts, shape.matrix(role)[0]))
            for role in shape.biases
        ]

    def _biases(self, layer: int, role: Role) -> str:
        return stacked_biases(self.source.architecture.block_prefix(layer), self._kind, role)

    def as_written(self, layer: int, experts: Named) -> Named:
        found, reader = dict(experts), self.source.experts
        for role in reader.shape.roles if reader.has(layer) else ():
            packing, stacked = self.packing(layer, role), self._model.expert_tensor(layer, role)
            names = [packing.name(layer, expert, role) for expert in range(reader.shape.experts)]
            for part in (CODES, SCALES, BIASES):
                yield part_name(stacked, part), torch.stack([found.pop(part_name(name, part)) for name in names])
        for role in reader.shape.biases if reader.has(layer) else ():
            biases = [reader.bias(layer, expert, role) for expert in range(reader.shape.experts)]
            yield self._biases(layer, role), torch.stack(biases).to(reader.dtype)
        yield from found.items()

    def passing(self, spec: TensorSpec) -> list[TensorSpec]:
        if spec.name in self._bits:
            return self._packed(spec.name).specs(spec.name, (spec.shape[0], spec.shape[1]))
        channels, *_ = shape = spec.shape
        shape = (channels, shape[2], 1) if is_turned_round(spec.name, shape) else shape
        return [TensorSpec(written_name(self._kind, spec.name), spec.dtype, shape)]

    def passed(self, job: Job, layer: int, read: Callable[[str], Tensor]) -> Named:
        on_text = self.beside is not None
        seen = set(self._model.seen(layer)) if on_text and layer >= 0 else ()
        for spec in self.rest[layer]:
            name, written = spec.name, written_name(self._kind, spec.name)
            if name in seen:
                continue  # among the layer's codes
            if name not in self._bits:
                if is_turned_round(name, spec.shape):
                    yield written, read(name).transpose(1, 2).contiguous()
                elif is_added_to(self._kind, name):
                    yield written, (read(name).float() + 1).to(spec.dtype)
                elif name != written:
                    yield written, read(name)
            elif self._ends is not None and name in self._model.tables:
                coded = self._ends.coded(self._model.by_name[name], self._packed(name).layout)
                yield from self._packed(name).named(name, Blocked.joined(list(coded)))
            else:
                yield from self._packed(name).nearest(name, read(name).to(job.device))

    @property
    def beside(self) -> "PackedBeside | None":
        return None if self.text is None or self._leaves_others else _Beside(self._model, self._packed)

    @cached_property
    def text(self) -> CodingText | None:
        shapes = [self._model.shapes(layer) for layer in range(self._model.layers)]
        text = CodingText.of(self.source, self.options, beside=[] if self._leaves_others else shapes)
        if text is None or self._menu is None:
            return text
        return replace(text, experts_at_once=self.source.experts.shape.experts)  # whose losses are told together

    def measured(self, job: Job, text: CodingText) -> CalibratedJob:
        if self._leaves_others:
            return super().measured(job, text)
        calibrated, menu = text.calibrated(job), self._menu
        self._ends = Ends(calibrated, self._model)
        losses = measure_types(calibrated, self._model, self._ends, menu)
        if menu is not None:
            chosen = menu.choose(self._budget, losses)
            self._choose(self._model.with_fixed(chosen))
            bits = menu.bits_per_weight(chosen)
            job.progress.log(f"Bits are chosen, {bits:.2f} per weight on average: {counted_types(chosen)}.")
        return calibrated

    def plan(self) -> Plan:
        plan, menu = super().plan(), self._menu
        if menu is not None:
            least, most = map(format_bytes, menu.sizes(self._around))
            told = f"{len(menu.types)} in bits to be chosen, with which the weight files take from {least} to {most}"
            plan = replace(plan, details={**plan.details, "tensors": told})
        if self.beside is None:
            return plan
        return replace(
            plan, memory_bytes=plan.memory_bytes + 8 * max(moments_between_rows(self._model.menu), default=0)
        )

    @property
    def output_bytes(self) -> int:
        if (menu := self._menu) is None:
            return super().output_bytes
        return self._around + min(self._budget, menu.nbytes(menu.largest))

    @property
    def moments_bytes(self) -> int:
        return 0 if self.beside is None else 2 * sum(moments_between_rows(self._model.menu))

    def measuring(self, cost: CalibrationCost, size: ModelSize) -> Phases:
        *first, back = super().measuring(cost, size)
        if self.beside is None:
            return *first, back
        tokens, menu = cost.gradient_samples * cost.length, self._model.menu
        work = back.work + Work(products={"float32": tokens * sum(moments_between_rows(menu)) / 2})
        return *first, replace(back, work=work if self._menu is None else work + trying_types(menu))

    @property
    def coding(self) -> Work:
        model, text = self._model, self.text
        if text is None:
            works = (nearest_blocks_work(model.matrix(name), self._packed(name).layout) for name in model.all_coded)
            return super().coding + (Work() if self._leaves_others else altogether(works))
        if self._leaves_others:
            return super().coding
        tokens = text.cost.samples * text.cost.length
        given = altogether(preparing_inputs(model.matrix(name), tokens) for name in model.all_coded)
        if (menu := self._menu) is not None:
            return given + altogether(expected_coding(menu, model.by_name[name]) for name in menu.types)
        chosen = partial(choosing_blocks, in_turn=True)
        return (
            super().coding
            + given
            + altogether(chosen(model.matrix(name), self._packed(name).layout) for name in model.all_coded)
        )

    def entries(self) -> Mapping[str, object]:
        model = self._model
        most = Counter(bits for name, bits in self._bits.items() if model.by_name[name].is_experts).most_common(1)
        named = {self._module(name): bits for name, bits in self._bits.items()}
        entry = packed_entry(most[0][0], self.options.group_size, named)
        return {**self._told(), "quantization": entry, "quantization_config": entry}

    def _module(self, name: str) -> str:
        """mlx-lm's module of a matrix, by the name of its codes."""
        return written_name(self._kind, name).removesuffix(f".{CODES}")

    def told(self, facts: CalibrationFacts | None) -> Details:
        if (menu := self._menu) is None:
            return super().told(facts)
        bits = {self._module(name): bits for name, bits in self._bits.items()}
        per_weight = menu.bits_per_weight({name: self._model.kind(self._bits[name]) for name in menu.types})
        return MlxDetails(calibration=facts, bits_per_weight=round(per_weight, 4), bits=bits)

    def told_of_layers(self) -> Mapping[int, Printed]:
        if self._menu is None:
            return {}
        model, found = self._model, dict[int, dict[str, str]]()
        for name, bits in self._bits.items():
            if (layer := model.by_name[name].layer) >= 0:
                module = self._module(name).removeprefix(self.source.architecture.layer_prefix(layer))
                found.setdefault(layer, {})[module] = model.kind(bits).name
        return {layer: MatrixBits(types) for layer, types in sorted(found.items())}

    def verify(self, output: Path) -> Sizes:
        if self._menu is not None:  # a job that is found done has chosen nothing
            said = said_by_mlx(json.loads((output / CONFIG).read_bytes()))
            self._choose({name: bits_of(said or {}, self._module(name)) for name in self._bits})
        return super().verify(output)


class _Beside:
    """The matrices beside the experts as `PackedLayers` codes them."""

    def __init__(self, model: MlxModel, packing: Callable[[str], Packing]) -> None:
        self.seen, self.watched, self.read, self.packing = model.seen, model.watched, model.read, packing


class _Affine(Packing):
    """Matrices of experts, which are stacked when they are written, and others, under mlx-lm's names.

    Attributes:
        kind: the family's `model_type`.
    """

    def __init__(self, kind: str, architecture: Architecture, bits: int, group: int, dtype: torch.dtype) -> None:
        super().__init__(architecture, bits, group, dtype)
        self.kind = kind

    def specs(self, name: str, shape: tuple[int, int]) -> list[TensorSpec]:
        return super().specs(written_name(self.kind, name), shape)

    def named(self, name: str, blocked: Blocked) -> Named:
        return super().named(written_name(self.kind, name), blocked)

    @property
    def layout(self) -> AffineCodes:
        return AffineCodes.of(self.bits, self.group, self.dtype)

    def name(self, layer: int, expert: int, role: Role) -> str:
        return f"{self.architecture.block_prefix(layer)}switch_mlp.{expert}.{role}_proj.{CODES}"

    def parts(self, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return packed_tensors(shape, self.bits, self.group, self.dtype)

    def packed(self, codes: Tensor, scales: Tensor, minima: Tensor) -> dict[str, Tensor]:
        return {CODES: pack_words(codes, self.bits).view(torch.uint32), SCALES: scales, BIASES: -minima}
