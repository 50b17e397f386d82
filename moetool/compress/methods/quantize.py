"""Every expert on its own, in few bits: what deltas to a base are measured against, and often all that is needed.

Codes are those of `representations.quantized`: a scale per group of inputs, and levels that suit normal weights. With a
text they are chosen one input after the other, each making good for the errors of those before it (GPTQ, Frantar et
al., arXiv:2210.17323; see `numerics.error_feedback`). With a ratio, bits go where they remove most loss.

What other engines can serve of it: 8 bits are symmetric whole numbers, W = s · q with q from −127 to 127, which is what
compressed-tensors' `pack-quantized` stores as q + 128. At 1 to 4 bits levels are not evenly spaced, and no symmetric
integer group W = s · (q − 2^(b−1)) expresses them: those would have to be chosen anew.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.calibration.peers import Owned
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.sizes import format_bytes
from moetool.compress.base.given import base_form
from moetool.compress.base.layer_base import LayerBase, agreed, base_path, measured_base, no_base
from moetool.compress.budget.items import Group, Key, offered
from moetool.compress.budget.spending import fit
from moetool.compress.choices import Sensitivity
from moetool.compress.encoded import Encoding, encoded_bytes
from moetool.compress.encoding import BaseBits, encoding_memory, encoding_plan, in_groups, run_encoding, with_text
from moetool.compress.methods.hybrid import cook, encoded, losses_path, summed
from moetool.compress.rotated import RotatedDeltas, RotatedGrams, seeds
from moetool.compress.told import LayersTold, MixedLayer, MixedTold
from moetool.errors import UsageError
from moetool.format.layout import NO_BASE, LayerLayout
from moetool.job.building_blocks import moe_size
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, pick_compute_dtype, pick_device
from moetool.job.layer_memory import LayerMemory, Measuring
from moetool.job.options import CalibrationOptions, RunOptions, TextOptions
from moetool.job.phases import menu_phases
from moetool.job.plan import CalibrationCost, Plan
from moetool.job.stage import Stage
from moetool.job.writing import OutputPlan, entry_for, original_bytes, write_model
from moetool.numerics.quantization import BITS
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.quantized import Quantized

Rounding = Literal["nearest", "error-feedback"]
Scheme = Literal["matrix", "role", "layer"]

_REACH = 3.0  # bits are offered from a third to three times those that every number can have on average


class QuantizeOptions(RunOptions, CalibrationOptions):
    """Bits for all, or a budget of bytes."""

    alternatives: ClassVar[tuple[str, ...]] = ("bits", "ratio")  # one typed replaces the other of a preset

    bits: BaseBits | None = Field(
        None, description="Bits of every number: 1, 2, 3, 4, 8, or bitsandbytes' formats nf4 and int8."
    )
    ratio: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Instead of bits: share of the weight files' bytes that disappears. Every matrix gets the bits "
        "that lose least in all.",
    )
    group_size: int = Field(
        128, ge=1, description="Inputs that share a scale; the largest divisor below if it does not divide a row."
    )
    rounding: Rounding | None = Field(
        None,
        description="The nearest codes, or codes that make good for each other's errors on the calibration text "
        "(by default if there is one).",
    )
    scheme: Scheme = Field(
        "matrix",
        description="With a ratio: bits for each matrix by itself, or the same for all experts of a layer in one role, "
        "or in all roles, as engines with fused experts want it.",
    )
    rotate: bool = Field(
        False,
        description="Rotate inputs by blocks of a Hadamard matrix with random signs, and store matrices accordingly: "
        "loses less at 2 bits, for a small product per token.",
    )
    sensitivity: Sensitivity = Field(
        "channel",
        description="With a ratio: weigh errors by what they cost in loss, by output channel, by matrix, or not at "
        "all.",
    )

    @model_validator(mode="after")
    def _one_target(self) -> "QuantizeOptions":
        if (self.bits is None) == (self.ratio is None):
            raise ValueError("give --bits or --ratio, one of them")
        if self.ratio is not None and self.rounding == "nearest":
            raise ValueError("--ratio chooses bits by what codes with error feedback lose: take --rounding out")
        if self.rotate and self.bits in ("nf4", "int8"):
            raise ValueError(f"--bits {self.bits} is bitsandbytes' format, which knows no rotation: use --bits 4 or 8")
        if self.rounding == "error-feedback" and self.bits in ("nf4", "int8"):
            raise ValueError(f"--bits {self.bits} has the nearest codes, as bitsandbytes does: use --bits 4 or 8")
        return self


class Quantize(Stage[QuantizeOptions]):
    """Codes of each expert's own matrices; no base."""

    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "every expert on its own in few bits, without a base"
    options_type: ClassVar[type[RunOptions]] = QuantizeOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    def plan(self) -> Plan:
        source, options = self.source, self.options
        if source.experts.layouts:
            raise UsageError(f"{source.checkpoint.path} is already a moetool checkpoint: start from an ordinary one.")
        if options.calibration is None and options.rounding == "error-feedback":
            raise UsageError("--rounding error-feedback measures inputs: give --calibration.")
        if options.ratio is not None:
            return self._menu_plan(options.ratio)
        return encoding_plan(self.name, source, options, self._alike(), self._text, self._experts_at_once)

    def run(self, job: Job) -> LayersTold:
        reader, options = self.source.experts, self.options
        if options.ratio is not None:
            return self._buy(job, options.ratio)

        def base(layer: int, weights: Weights) -> LayerBase:
            return no_base(reader.shape, reader.dtype)

        return run_encoding(job, self.name, self._alike(), base, {}, options.seed, self._text, self._experts_at_once)

    # The same bits for all.

    def _alike(self) -> dict[int, LayerLayout]:
        reader, options = self.source.experts, self.options
        assert options.bits is not None
        forms: dict[Role, Representation] = {}
        for role in reader.shape.roles:
            matrix = reader.shape.matrix(role)
            own = Quantized(int(options.bits), options.group_size) if options.bits.isdigit() else None
            forms[role] = in_groups(own, matrix, options.group_size) if own else base_form(options.bits, 0, matrix)
        weights = {role: (form,) * reader.shape.experts for role, form in forms.items()}
        return {layer: self._layout(layer, weights) for layer in reader.moe_layers}

    def _layout(self, layer: int, weights: Mapping[Role, tuple[Representation, ...]]) -> LayerLayout:
        shape, options = self.source.experts.shape, self.options
        rotation = seeds(shape, layer, options.seed) if options.rotate else {}
        return LayerLayout(shape, weights, shape.intermediate, base=NO_BASE, rotation=rotation)

    @property
    def _text(self) -> TextOptions | None:
        """The calibration options, if codes are chosen on a text."""
        options = self.options
        nearest = options.rounding == "nearest" or (options.bits or "").startswith(("nf", "int"))
        return None if nearest else with_text(options)

    @cached_property
    def _experts_at_once(self) -> int:
        memory = encoding_memory(self.source, self.options, self._text)
        return (memory if self.options.ratio is None else self._memory).at_once(self.options.memory)

    # A budget.

    def _menu_plan(self, ratio: float) -> Plan:
        source, options, reader = self.source, self.options, self.source.experts
        if options.calibration is None:
            raise UsageError("--ratio chooses bits by what each loses: give --calibration, or --bits without a text.")
        original, shape, at_once = original_bytes(source), reader.shape, self._experts_at_once
        if ratio > (highest := 1 - self._smallest / original):
            raise UsageError(
                f"--ratio {ratio:g} is not possible here: of {format_bytes(original)}, {format_bytes(self._smallest)} "
                f"are left with one bit for every number of an expert, so the ratio can be at most "
                f"{int(highest * 1000) / 1000:g}."
            )
        cost, output = self._cost, round(original * (1 - ratio))
        forms = {role: [self._fitted(form, role) for form in self._menu] for role in shape.roles}
        forward = cost.forward_bytes(shape.hidden) + encoded_bytes(reader, output, options.shard_size)
        backward = cost.gradient_bytes(shape.hidden, source.architecture.layers(source.checkpoint.config))
        if at_once < shape.experts:
            forward += cost.recorded_bytes(shape, gradients=False, sums=False)
            backward += cost.recorded_bytes(shape, gradients=True, sums=True)
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=max(backward, forward),
            memory_bytes=self._memory.nbytes(at_once),
            phases=menu_phases(cost, moe_size(reader), output, forms, NO_BASE),
            details={
                "original_bytes": original,
                "smallest_possible_bytes": self._smallest,
                "moe_layers": len(reader.moe_layers),
                "experts": shape.experts,
                "experts_at_once": at_once,
                "bits_per_number": round(self._average_bits, 2),
                "bits_offered": [form.bits for form in self._menu if isinstance(form, Quantized)],
            },
        )

    @cached_property
    def _cost(self) -> CalibrationCost:
        options, dtype = self.options, self.source.experts.dtype
        device = pick_device(options.device)
        computed = pick_compute_dtype(options.compute_dtype, device, dtype, gradients=True)
        return CalibrationCost.of(options, computed, dtype)

    @cached_property
    def _memory(self) -> LayerMemory:
        reader = self.source.experts
        measured = Measuring.fisher(reader.shape), Measuring.codes(reader.shape)
        return self._cost.layer_memory(reader, *measured, gradients=True)

    @cached_property
    def _average_bits(self) -> float:
        """Bits that the budget leaves for every number beside its share of a scale."""
        reader, options = self.source.experts, self.options
        left = original_bytes(self.source) * (1 - (options.ratio or 0)) - self._smallest
        return 1 + 8 * left / (reader.shape.expert_parameters * reader.shape.experts * len(reader.moe_layers))

    @cached_property
    def _smallest(self) -> int:
        """Bytes of the result with one bit for every number."""
        return self._planned(dict.fromkeys(self._units, Quantized(1, self.options.group_size)))

    @cached_property
    def _menu(self) -> list[Representation]:
        """What every matrix is offered, with groups that may not fit it yet."""
        bits, group = self._average_bits, self.options.group_size
        near: list[Representation] = [Quantized(b, group) for b in BITS if bits / _REACH <= b <= bits * _REACH]
        near = near or [Quantized(8, group)]
        return [*near, Dense()] if bits * _REACH >= 16 and not self.options.rotate else near

    def _fitted(self, form: Representation, role: Role) -> Representation:
        return in_groups(form, self.source.experts.shape.matrix(role), self.options.group_size)

    @cached_property
    def _units(self) -> dict[Key, list[Key]]:
        """The matrices that get the same bits, by the first of them."""
        reader, scheme = self.source.experts, self.options.scheme
        units: dict[Key, list[Key]] = {}
        for layer in reader.moe_layers:
            for role in reader.shape.roles:
                for expert in range(reader.shape.experts):
                    first = layer, "down" if scheme == "layer" else role, expert if scheme == "matrix" else 0
                    units.setdefault(first, []).append((layer, role, expert))
        return units

    def _layouts(self, chosen: Mapping[Key, Representation]) -> dict[int, LayerLayout]:
        """With the form of every unit."""
        reader = self.source.experts
        forms = {key: self._fitted(chosen[first], key[1]) for first, keys in self._units.items() for key in keys}
        experts = range(reader.shape.experts)
        return {
            layer: self._layout(
                layer, {role: tuple(forms[layer, role, expert] for expert in experts) for role in reader.shape.roles}
            )
            for layer in reader.moe_layers
        }

    def _planned(self, chosen: Mapping[Key, Representation]) -> int:
        return OutputPlan(self.source, self._layouts(chosen), self.options.shard_size).nbytes

    def _buy(self, job: Job, ratio: float) -> MixedTold:
        options, reader = self.options, self.source.experts
        calibrated = CalibratedJob(job, options, gradients=True, experts_at_once=self._experts_at_once)
        forms = {role: [self._fitted(form, role) for form in self._menu] for role in reader.shape.roles}

        smallest = self._layouts(dict.fromkeys(self._units, self._menu[0]))

        def deltas_of(index: int, layer: nn.Module) -> RotatedDeltas:
            base = LayerBase.load(base_path(job.work, index))
            return RotatedDeltas(calibrated.weights(index, layer), base, job.device, smallest[index])

        def visit(index: int, layer: nn.Module) -> None:
            measured = measured_base(calibrated, index, layer, "mean").statistics
            agreed(job.ranks, base_path(job.work, index), no_base(reader.shape, reader.dtype, measured))
            owned = Owned(reader.shape, job.ranks)
            grams = RotatedGrams(smallest[index], job.device, owned, calibrated.experts_at_once)
            calibrated.gradient_sweep.forward(index, layer, [grams], keep=False)
            path = losses_path(job.work, index)
            cook(reader, deltas_of(index, layer), forms, grams, options.sensitivity, path, owned)

        def encode(index: int, layer: nn.Module, layout: LayerLayout, owned: Owned) -> Iterator[tuple[str, Tensor]]:
            grams = RotatedGrams(layout, job.device, owned, calibrated.experts_at_once)
            calibrated.sweep.forward(index, layer, [grams], keep=True)
            return encoded(reader, deltas_of(index, layer), layout, grams, options.sensitivity, owned)

        calibrated.reverse(visit, passes=2)
        layouts, lost = job.ranks.broadcast(self._choose(job, ratio))
        encoding = Encoding(job, layouts, encode, calibrated)
        bases = {layer: LayerBase.load(base_path(job.work, layer)).statistics for layer in reader.moe_layers}
        write_model(
            job,
            OutputPlan(self.source, layouts, options.shard_size),
            encoding.tensors,
            entry=entry_for(layouts, self.source, method=self.name),
            statistics={layer: own for layer, own in bases.items() if own is not None},
            calibration=calibrated.facts_with_loss,
            layers=lambda: lost,
            seed=options.seed,
            making=encoding,
        )
        return MixedTold(calibration=calibrated.facts_with_loss, ratio=ratio, layers=lost)

    def _choose(self, job: Job, ratio: float) -> tuple[dict[int, LayerLayout], dict[int, MixedLayer]]:
        """Layouts within the budget, and what their forms lose."""
        reader, menu = self.source.experts, self._menu
        measured = {layer: load_file(losses_path(job.work, layer)) for layer in reader.moe_layers}
        losses = {
            (layer, role, expert): measured[layer][f"{role}.{expert}"].tolist()
            for keys in self._units.values()
            for layer, role, expert in keys
        }
        items = {}
        for first, keys in self._units.items():
            sizes = [
                sum(self._fitted(form, key[1]).nbytes(reader.shape.matrix(key[1]), reader.dtype) for key in keys)
                for form in menu
            ]
            items[first] = offered(menu, sizes, [sum(own) for own in zip(*(losses[key] for key in keys), strict=True)])
        target = round(original_bytes(self.source) * (1 - ratio))
        chosen = fit("water-filling", [Group(items)], target, self._planned)
        lost = summed(
            (key, losses[key][menu.index(chosen[first])]) for first, keys in self._units.items() for key in keys
        )
        return self._layouts(chosen), {layer: MixedLayer(by_role) for layer, by_role in lost.items()}
