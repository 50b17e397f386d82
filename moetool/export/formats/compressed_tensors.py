"""Export of experts in few bits to compressed-tensors' `pack-quantized`, which vLLM and transformers run.

Codes are the nearest ones, or on a text chosen as `quantize` chooses its own: one input after the other, each making
good for the errors of those before it, on what each expert is given.
"""

import math
from collections.abc import Callable
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from moetool.checkpoint.files import patch_config
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import TensorSpec
from moetool.compress.coding_text import NEAREST, CodingText
from moetool.compress.encoded_layers import Named, encoded_bytes
from moetool.costs.building_blocks import (
    ModelSize,
    calibration_forward,
    decoding,
    input_grams,
    moe_size,
    weights_again,
    writing,
)
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.phases import ENCODE, Phase, output_phases, rewriting_phases
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.export.packing import PackedLayers, nearest_layer
from moetool.format.compressed_tensors import (
    KERNEL_BITS,
    KERNEL_GROUPS,
    packed_entry,
    packed_name,
    packed_tensors,
)
from moetool.format.gguf.families import gguf_family
from moetool.format.kinds import custom_module
from moetool.format.layout import native_layout
from moetool.job.job import DecodedSource, Input, Job
from moetool.job.options import RunOptions, TextOptions
from moetool.job.plan import Plan
from moetool.job.result import Details, Json, Sizes
from moetool.job.shards import OutputPlan, ShardPlan
from moetool.job.stage import Stage
from moetool.job.writing import with_the_rest, write_checkpoint
from moetool.numerics.whole_codes import WHOLE_BITS
from moetool.numerics.work import Work, altogether
from moetool.representations.quantized import Quantized


class ExportCompressedTensorsOptions(RunOptions, TextOptions):
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
        if bits not in WHOLE_BITS:
            raise ValueError(
                f"there are {', '.join(map(str, WHOLE_BITS))}, not {bits}; vLLM's kernels for experts read "
                f"{' and '.join(map(str, KERNEL_BITS))}, transformers all of them"
            )
        return bits


class ExportCompressedTensors(Stage[ExportCompressedTensorsOptions]):
    """Codes every expert anew on an even grid, whatever it was stored as; everything else passes through."""

    name: ClassVar[str] = "compressed-tensors"
    summary: ClassVar[str] = "experts in 2 to 8 bits as vLLM and transformers read them (pack-quantized)"
    options_type: ClassVar[type[RunOptions]] = ExportCompressedTensorsOptions
    source_type: ClassVar[type[Input]] = DecodedSource
    method_of: ClassVar[str | None] = "export"
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    @cached_property
    def _shards(self) -> ShardPlan:
        """Plan of the shards to write. Raises `InvalidInputError` where the format cannot hold the input."""
        source, reader = self.source, self.source.experts
        self._check_family()
        self._check_groups()
        native = dict.fromkeys(reader.moe_layers, native_layout(reader.shape))
        whole = OutputPlan(source, native, self.options.shard_size)
        packed = self._packed
        units = []
        for layer, specs in whole.units:
            kept = [spec for spec in specs if spec.name not in packed]
            units.append((layer, [*kept, *(part for spec in specs for part in packed.get(spec.name, []))]))
        return ShardPlan(units, self.options.shard_size)

    @cached_property
    def _packed(self) -> dict[str, list[TensorSpec]]:
        """The tensors in the place of each matrix of an expert, by the name of that."""
        reader, options = self.source.experts, self.options
        found = {}
        for role in reader.shape.roles:
            parts = packed_tensors(reader.shape.matrix(role), options.bits, options.group_size, reader.dtype)
            for layer, expert in product(reader.moe_layers, range(reader.shape.experts)):
                name = self.source.architecture.weight_name(layer, expert, role)
                found[name] = [TensorSpec(packed_name(name, part), *parts[part]) for part in parts]
        return found

    def _check_family(self) -> None:
        architecture, shape, config = self.source.architecture, self.source.experts.shape, self.source.checkpoint.config
        if (spec := custom_module(config)) is not None:
            raise InvalidInputError(
                f"This model has modules that only moetool runs ('{spec.key}' in its quantization_config): no engine "
                "that reads compressed-tensors knows them."
            )
        if architecture.is_fused:
            raise InvalidInputError(
                f"{architecture.name} has all experts of a layer in one tensor, {architecture.weights['down']}; "
                "pack-quantized stores, and engines look for, a matrix for each expert. Take "
                f"{'--format gguf, or ' if self._has_gguf else ''}--format dense-experts in the original's size."
            )
        if shape.biases:
            raise InvalidInputError("These experts have biases, which engines that read packed experts leave out.")

    @property
    def _has_gguf(self) -> bool:
        try:
            gguf_family(self.source.checkpoint.settings)
        except InvalidInputError:
            return False
        return True

    def _check_groups(self) -> None:
        shape, group, cards = self.source.experts.shape, self.options.group_size, self.options.tensor_parallel
        if shape.intermediate % cards:
            raise UsageError(f"--tensor-parallel {cards} does not divide the experts' width of {shape.intermediate}.")
        width = shape.intermediate // cards
        common = math.gcd(shape.hidden, width)
        if common % group == 0:
            return
        share = f"{width}" if cards == 1 else f"{width} ({shape.intermediate} over {cards} cards)"
        served = [size for size in KERNEL_GROUPS if common % size == 0]
        fitting = served or [size for size in range(2, common + 1) if common % size == 0]
        problem = f"Groups of {group} do not divide both a hidden size of {shape.hidden} and experts {share} wide."
        if not fitting:
            raise UsageError(f"{problem} No others do, and a scale for every number takes more than codes save.")
        nearest = min(fitting, key=lambda size: (abs(size - group), -size))
        raise UsageError(f"{problem} The nearest that do: --group-size {nearest}.")

    def _unserved(self) -> list[str]:
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
        return found

    @cached_property
    def _text(self) -> CodingText | None:
        return CodingText.of(self.source, self.options)

    def plan(self) -> Plan:
        source, text, output = self.source, self._text, self._shards.nbytes
        reader, options, unserved = source.experts, self.options, self._unserved()
        size, details = moe_size(reader), dict[str, Json]()
        if unserved:
            details["vllm_kernels_want"] = "; ".join(unserved)
        if text is None:
            if options.bits < 8:
                details["note"] = NEAREST
            work = self._coding(size) + (decoding(size) if reader.layouts else Work())
            scratch, memory = 0, CalibrationCost(0, 1, 4).layer_memory(reader).nbytes()
            phases = rewriting_phases(size, output, work)
        else:
            cost, details["experts_at_once"] = text.cost, text.experts_at_once
            size, memory = moe_size(reader, text.experts_at_once), text.memory.nbytes(text.experts_at_once)
            scratch = encoded_bytes(reader, output, options.shard_size) + text.scratch(self.source)
            measured = calibration_forward(cost, size) + input_grams(cost, size) + weights_again(size)
            made = measured + self._coding(size) + writing(size.nbytes, output, size.tensors)
            phases = (*output_phases(cost, size), Phase(ENCODE, made))
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=scratch,
            memory_bytes=memory,
            phases=phases,
            details=details,
        )

    def _coding(self, size: ModelSize) -> Work:
        shape, form = self.source.experts.shape, Quantized(self.options.bits, self.options.group_size)
        on_text, matrices = self._text is not None, [shape.matrix(role) for role in shape.roles]
        works = [form.work(matrix, fed_back=on_text) for matrix in matrices]
        works += [form.in_turn_work(matrix) for matrix in matrices if on_text]
        return altogether(works) * size.experts

    def run(self, job: Job) -> Details:
        reader, plan, options = self.source.experts, self._shards, self.options
        if unserved := self._unserved():
            job.progress.log(
                f"vLLM's Marlin kernels for experts want {'; '.join(unserved)}: it may refuse this checkpoint, or take "
                "slower ones."
            )
        if (text := self._text) is None and options.bits < 8:
            job.progress.log(NEAREST)
        packed: Callable[[int], Named] = partial(nearest_layer, job, bits=options.bits, group=options.group_size)
        making, facts = None, None
        if text is not None:
            calibrated = text.opened(job)
            making = PackedLayers(job, text, calibrated, self._packed, options.bits, options.group_size)
            packed, facts = making.encoded, calibrated.facts

        def experts(layer: int) -> Named:
            if layer not in reader.moe_layers:
                return
            yield from packed(layer)
            if reader.layout(layer).is_extended:
                last = reader.shape.experts
                yield from reader.shared_expert_tensors(
                    layer, lambda role: reader.dense(layer, last, role).to(reader.dtype)
                )

        def tensors(layer: int) -> Named:
            return with_the_rest(self.source.checkpoint.read, plan.unit(layer), experts(layer))

        write_checkpoint(job, plan, tensors, config=self._config, calibration=facts, making=making)
        return Details(calibration=facts)

    @property
    def _config(self) -> dict[str, object]:
        reader, options = self.source.experts, self.options
        specs = [spec for _, unit in self._shards.units for spec in unit]
        others = [spec.name for spec in specs if len(spec.shape) == 2 and spec.name.endswith(".weight")]
        entry = packed_entry(
            self.source.architecture, reader.moe_layers, reader.shape.roles, others, options.bits, options.group_size
        )
        return patch_config(self.source.checkpoint.config, {"quantization_config": entry})

    def verify(self, output: Path) -> Sizes:
        made, plan = Checkpoint.open(output), self._shards
        held = made.on_disk
        due = {spec.name: spec for _, unit in plan.units for spec in unit}
        wrong = [name for name, spec in due.items() if name not in held or held[name].shape != spec.shape]
        if wrong:
            raise VerificationError(f"The output lacks {len(wrong)} tensors, the first {min(wrong)}.")
        return self.sizes(self.source, made.weight_bytes)
