"""Export of experts in codes on even grids: what all engines' formats of that kind have in common.

Codes are the nearest ones, or chosen on what a text gives to each expert (`export.blocks.coding`).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, product
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from moetool.architectures import Role
from moetool.checkpoint.files import patch_config
from moetool.checkpoint.weight_files import read_weight_files
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
from moetool.costs.phases import ENCODE, Phase, Phases, output_phases, rewriting_phases
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.export.blocks.coding import choosing_blocks, nearest_blocks_work, preparing_inputs
from moetool.export.packing import PackedBeside, PackedLayers, Packing
from moetool.format.gguf.families import gguf_family
from moetool.format.kinds import custom_module
from moetool.format.layout import native_layout
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import DecodedSource, Input, Job
from moetool.job.options import RunOptions, TextOptions
from moetool.job.plan import Plan
from moetool.job.result import CalibrationFacts, Details, Json, Printed, Sizes
from moetool.job.shards import OutputPlan, ShardPlan
from moetool.job.stage import Stage
from moetool.job.writing import with_the_rest, write_checkpoint
from moetool.numerics.work import Work, altogether


class CodedExpertsOptions(RunOptions, TextOptions):
    """Groups of the codes, and the text that these are chosen on, if any."""

    group_size: int = Field(128, ge=1, description="Inputs that share a scale.")


CodedT = TypeVar("CodedT", bound=CodedExpertsOptions, default=CodedExpertsOptions)


class CodedExperts(Stage[CodedT]):
    """Codes every expert anew on an even grid, whatever it was stored as.

    Attributes:
        kernels: what runs the result, in words.
        has_biases: whether experts may have biases, which `layer_specs` then lists.
    """

    source_type: ClassVar[type[Input]] = DecodedSource
    method_of: ClassVar[str | None] = "export"
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    kernels: ClassVar[str]
    has_biases: ClassVar[bool] = False

    @abstractmethod
    def packing(self, layer: int, role: Role) -> Packing:
        """The names and tensors in which the engine stores the codes of the experts of a layer in a role."""

    @abstractmethod
    def check(self) -> None:
        """Raise `InvalidInputError` or `UsageError` where the format cannot hold the input, or no engine reads it."""

    @abstractmethod
    def layer_specs(self, layer: int) -> list[TensorSpec]:
        """The tensors of all experts of a layer, as they are written."""

    @abstractmethod
    def entries(self) -> Mapping[str, object]:
        """Entries of the result's `config.json` by which the engine knows the format."""

    def as_written(self, layer: int, experts: Named) -> Named:
        """The tensors of `layer_specs`, from those of each expert's matrices."""
        yield from experts

    def passing(self, spec: TensorSpec) -> list[TensorSpec]:
        """The tensors that stand for one that is none of an expert's."""
        return [spec]

    def passed(self, job: Job, layer: int, read: Callable[[str], Tensor]) -> Named:
        """Tensors of a layer, −1 for none, that stand for others among its `rest`, which `read` gives by name."""
        return iter(())

    @property
    def beside(self) -> PackedBeside | None:
        """The matrices beside the experts whose codes are chosen on a text, too."""
        return None

    def measured(self, job: Job, text: CodingText) -> CalibratedJob:
        """Open the model with its text, and measure what codes are chosen by."""
        return text.opened(job)

    def told(self, facts: CalibrationFacts | None) -> Details:
        """Return the fields that the job's result has beside sizes and time."""
        return Details(calibration=facts)

    def told_of_layers(self) -> Mapping[int, Printed]:
        """Return what `moetool.json` says of each layer, by its number."""
        return {}

    def lacking(self) -> dict[str, str]:
        """What engines want and the input does not have, by the name of a plan's field."""
        return {}

    @cached_property
    def _shards(self) -> ShardPlan:
        """Plan of the shards to write. Raises `InvalidInputError` where the format cannot hold the input."""
        reader, units = self.source.experts, []
        for layer, specs in self.rest.items():
            kept = [spec for own in specs for spec in self.passing(own)]
            units.append((layer, kept + (self.layer_specs(layer) if reader.has(layer) else [])))
        return ShardPlan(units, self.options.shard_size)

    @cached_property
    def rest(self) -> dict[int, list[TensorSpec]]:
        """By layer, −1 for none, the tensors of the input that are no experts'. Raises `InvalidInputError` where the
        format cannot hold the input."""
        reader, found = self.source.experts, dict[int, list[TensorSpec]]()
        self.check_family()
        self.check()
        native = dict.fromkeys(reader.moe_layers, native_layout(reader.shape))
        for layer, specs in OutputPlan(self.source, native, self.options.shard_size).units:
            coded = {spec.name for spec in reader.specs(layer, native[layer])} if layer in native else set()
            found[layer] = [spec for spec in specs if spec.name not in coded | reader.biases]
        return found

    def check_family(self) -> None:
        """Raise `InvalidInputError` for models that no engine but moetool runs."""
        shape, config = self.source.experts.shape, self.source.checkpoint.config
        if (spec := custom_module(config)) is not None:
            raise InvalidInputError(
                f"This model has modules that only moetool runs ('{spec.key}' in its quantization_config): no engine "
                f"that reads {self.name} knows them."
            )
        if shape.biases and not self.has_biases:
            raise InvalidInputError("These experts have biases, which engines that read packed experts leave out.")

    @property
    def instead(self) -> str:
        """Formats that take the input where this one does not, as typed."""
        try:
            gguf_family(self.source.checkpoint.settings)
        except InvalidInputError:
            return "--format dense-experts in the original's size"
        return "--format gguf, or --format dense-experts in the original's size"

    def check_groups(self, served: Sequence[int], cards: int = 1) -> None:
        """Raise `UsageError` unless groups divide the inputs of all matrices, on each of so many cards.

        Args:
            served: groups that the engine's kernels take, of which the nearest is named.
            cards: that share every expert.
        """
        shape, group = self.source.experts.shape, self.options.group_size
        width = shape.intermediate // cards
        common = math.gcd(shape.hidden, width)
        if common % group == 0:
            return
        share = f"{width}" if cards == 1 else f"{width} ({shape.intermediate} over {cards} cards)"
        fitting = [size for size in served if common % size == 0] or self.other_groups(common)
        problem = f"Groups of {group} do not divide both a hidden size of {shape.hidden} and experts {share} wide."
        if not fitting:
            raise UsageError(f"{problem} No others do, and a scale for every number takes more than codes save.")
        nearest = min(fitting, key=lambda size: (abs(size - group), -size))
        raise UsageError(f"{problem} The nearest that do: --group-size {nearest}.")

    def other_groups(self, common: int) -> list[int]:
        """Groups besides those of kernels that divide a `common` number of inputs and can be stored."""
        return [size for size in range(2, common + 1) if common % size == 0]

    @cached_property
    def text(self) -> CodingText | None:
        """The text that codes are chosen on; `None` for the nearest."""
        return CodingText.of(self.source, self.options)

    def remarks(self) -> list[str]:
        """Return sentences about the result that the plan and the log say before it is made."""
        return [NEAREST] if self.text is None and self._fewest_bits < 8 else []

    @property
    def _fewest_bits(self) -> int:
        shape = self.source.experts.shape
        return min(self.packing(layer, role).bits for layer in self.source.experts.moe_layers for role in shape.roles)

    def plan(self) -> Plan:
        source, text, output = self.source, self.text, self.output_bytes
        reader, options = source.experts, self.options
        size, details = moe_size(reader), dict[str, Json](self.lacking())
        if notes := self.remarks():
            details["note"] = " ".join(notes)
        if text is None:
            work = self.coding + (decoding(size) if reader.layouts else Work())
            scratch, memory = 0, CalibrationCost(0, 1, 4).layer_memory(reader).nbytes()
            phases = rewriting_phases(size, output, work)
        else:
            cost, details["experts_at_once"] = text.cost, text.experts_at_once
            size, memory = moe_size(reader, text.experts_at_once), text.memory.nbytes(text.experts_at_once)
            scratch = encoded_bytes(reader, output, options.shard_size) + text.scratch(self.source) + self.moments_bytes
            measured = calibration_forward(cost, size) + input_grams(cost, size) + weights_again(size)
            made = measured + self.coding + writing(size.nbytes, output, size.tensors)
            phases = (*self.measuring(cost, size), Phase(ENCODE, made))
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=scratch,
            memory_bytes=memory,
            phases=phases,
            details=details,
        )

    @property
    def output_bytes(self) -> int:
        """Bytes of the weight files, at most."""
        return self._shards.nbytes

    @property
    def moments_bytes(self) -> int:
        """Bytes of the work directory by which rows of matrices beside the experts make good for each other."""
        return 0

    def measuring(self, cost: CalibrationCost, size: ModelSize) -> Phases:
        """The phases in which what codes are chosen by is measured."""
        return output_phases(cost, size)

    @property
    def coding(self) -> Work:
        """The work of finding all codes."""
        return altogether(self.coding_experts(layer) for layer in self.source.experts.moe_layers)

    def coding_experts(self, layer: int) -> Work:
        """The work of finding the codes of a layer's experts."""
        shape = self.source.experts.shape
        matrices = [(shape.matrix(role), self.packing(layer, role).layout) for role in shape.roles]
        if self.text is None:
            return altogether(nearest_blocks_work(*matrix) for matrix in matrices) * shape.experts
        given = (preparing_inputs(shape.matrix(roles[0]), tokens=0) for roles in shape.groups)
        works = (choosing_blocks(matrix, layout, in_turn=True) for matrix, layout in matrices)
        return altogether([*given, *works]) * shape.experts

    def run(self, job: Job) -> Details:
        reader = self.source.experts
        for wanted in self.lacking().values():
            job.progress.log(f"{self.kernels} want {wanted}: they may refuse this checkpoint, or run it slower.")
        for note in self.remarks():
            job.progress.log(note)
        text = self.text
        packed: Callable[[int], Named] = partial(self._nearest, job)
        making, facts = None, None
        if text is not None:
            calibrated = self.measured(job, text)
            making = PackedLayers(job, text, calibrated, self.packing, self.beside)
            packed, facts = making.encoded, calibrated.facts
        plan = self._shards

        def tensors(layer: int) -> Named:
            shared, specs = dict[str, Tensor](), plan.unit(layer)
            coded = self.as_written(layer, packed(layer))
            if reader.has(layer) and reader.layout(layer).is_extended:
                last = reader.shape.experts
                own = reader.shared_expert_tensors(layer, lambda role: reader.dense(layer, last, role).to(reader.dtype))
                shared = dict(own)

            def read(name: str) -> Tensor:
                return shared[name] if name in shared else self.source.checkpoint.read(name)

            return with_the_rest(read, specs, chain(coded, self.passed(job, layer, read)))

        config = patch_config(self.source.checkpoint.config, self.entries())
        layers = self.told_of_layers
        write_checkpoint(job, plan, tensors, config=config, calibration=facts, layers=layers, making=making)
        return self.told(facts)

    def _nearest(self, job: Job, layer: int) -> Named:
        """Yield the tensors of all experts of a layer, with the codes nearest to their matrices."""
        reader = self.source.experts
        if reader.has(layer):
            for expert, role in product(range(reader.shape.experts), reader.shape.roles):
                packing, matrix = self.packing(layer, role), reader.dense(layer, expert, role)
                yield from packing.nearest(packing.name(layer, expert, role), matrix.to(job.device))

    @property
    def matrices(self) -> list[TensorSpec]:
        """The matrices that pass through, as they are written."""
        specs = [spec for _, unit in self._shards.units for spec in unit]
        return [spec for spec in specs if len(spec.shape) == 2 and spec.name.endswith(".weight")]

    def verify(self, output: Path) -> Sizes:
        headers, held = read_weight_files(output)
        due = {spec.name: spec for _, unit in self._shards.units for spec in unit}
        wrong = [name for name, spec in due.items() if name not in held or held[name].shape != spec.shape]
        if wrong:
            raise VerificationError(f"The output lacks {len(wrong)} tensors, the first {min(wrong)}.")
        return self.sizes(self.source, sum(header.file_bytes for header in headers.values()))
