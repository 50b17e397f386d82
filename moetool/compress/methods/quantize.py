"""Quantization of every expert on its own, without a base: the baseline of methods with one, and often all that is
needed.

Codes are those of `representations.quantized`: a scale per group of inputs, and levels that suit normal weights. With a
text they are chosen one input after the other, each making good for the errors of those before it (GPTQ, Frantar et
al., arXiv:2210.17323; see `numerics.error_feedback`). With a ratio, bits go where they remove most loss.

What other engines can serve of it: 8 bits are symmetric whole numbers, W = s · q with q from −127 to 127, which is what
compressed-tensors' `pack-quantized` stores as q + 128. At 1 to 4 bits levels are not evenly spaced, and no symmetric
integer group W = s · (q − 2^(b−1)) expresses them: `export --format compressed-tensors` chooses those anew.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from moetool.architectures import Role
from moetool.bases.given import base_form
from moetool.bases.layer_base import LayerBase, no_base
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.sizes import Ratio
from moetool.compress.coding_text import NEAREST, CodingText
from moetool.compress.delta_encoding import encoding_plan, run_encoding
from moetool.compress.delta_forms import BaseBits, refuse_compressed
from moetool.compress.mixing.measuring import MixingOptions
from moetool.compress.mixing.schemes import Granularity, StorageScheme, codes_form, rotation_seeds, without_base
from moetool.compress.mixing.stage import MixingStage
from moetool.compress.results import LayersResult
from moetool.format.layout import NO_BASE, LayerLayout
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.result import Json
from moetool.representations import Representation

Rounding = Literal["nearest", "error-feedback"]


class QuantizeOptions(MixingOptions):
    """Options of `quantize`: the same bits for all experts, or a budget of bytes."""

    alternatives: ClassVar[tuple[str, ...]] = ("bits", "ratio", "size")

    bits: BaseBits | None = Field(
        None, description="Bits of every number: 1, 2, 3, 4, 5, 6, 8, or bitsandbytes' formats nf4 and int8."
    )
    ratio: Ratio | None = Field(
        None,
        description="Instead of --bits: share of the weight files' bytes to save (0.6 or 60%). Each matrix gets its "
        "own bits, so that the model loses least.",
    )
    rounding: Rounding | None = Field(
        None,
        description="nearest: round each number by itself. error-feedback: choose codes that cancel each other's "
        "errors on the calibration text (the default where one is given).",
    )
    scheme: Granularity = Field(
        "matrix",
        description="With a ratio: bits for each matrix by itself, or the same for all experts of a layer in one role, "
        "or in all roles, as engines with fused experts want it.",
    )
    rotate: bool = Field(
        False,
        description="Rotate inputs by a random Hadamard matrix before quantizing: less error in few bits, for a "
        "small product per token.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "QuantizeOptions":
        if (self.ratio or self.size) is not None and self.rounding == "nearest":
            raise ValueError("--ratio and --size choose bits by what error feedback loses: take --rounding out")
        if self.rotate and self.bits in ("nf4", "int8"):
            raise ValueError(f"--bits {self.bits} is bitsandbytes' format, which knows no rotation: use --bits 4 or 8")
        if self.trellis and self.bits not in ("1", "2", "3", "4", None):
            raise ValueError(f"--trellis is for codes of 1 to 4 bits, not for --bits {self.bits}")
        if self.refine and (self.rounding == "nearest" or self.bits in ("nf4", "int8")):
            raise ValueError("--refine goes on from codes with error feedback, in 1 to 8 bits")
        if self.rounding == "error-feedback" and self.bits in ("nf4", "int8"):
            raise ValueError(f"--bits {self.bits} has the nearest codes, as bitsandbytes does: use --bits 4 or 8")
        return self


class Quantize(MixingStage[QuantizeOptions]):
    """Quantization of each expert's own matrices without a base, at one width or within a budget."""

    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "every expert on its own in few bits, without a base"
    options_type: ClassVar[type[RunOptions]] = QuantizeOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    @property
    def needs_text(self) -> bool:
        return self._is_mixed or self.options.rounding == "error-feedback"

    def plan(self) -> Plan:
        source, options = self.source, self.options
        if self._is_mixed:
            return super().plan()
        refuse_compressed(source)
        note: dict[str, Json] = {"note": NEAREST} if self._wants_text else {}
        return encoding_plan(self.name, source, options, self._uniform(), self._text, **note)

    def run(self, job: Job) -> LayersResult:
        if self._is_mixed:
            return super().run(job)
        reader = self.source.experts
        if self._wants_text:
            job.progress.log(NEAREST)

        def base(layer: int, weights: Weights) -> LayerBase:
            return no_base(reader.shape, reader.dtype)

        return run_encoding(job, self.name, self._uniform(), base, {}, self._text)

    @property
    def _is_mixed(self) -> bool:
        """Whether bits differ by matrix, which needs gradients."""
        return self.options.ratio is not None or self.options.refine > 0

    @property
    def possible_forms(self) -> set[tuple[Representation, Role]]:
        if self._is_mixed:
            return super().possible_forms
        return {
            (form, role)
            for layout in self._uniform().values()
            for role, own in layout.weights.items()
            for form in own or ()
        }

    def shared_recipe(self) -> Mapping[str, object] | None:
        return super().shared_recipe() if self._is_mixed else None

    # The same bits for all.

    def _uniform(self) -> dict[int, LayerLayout]:
        """Layouts with the same form for all matrices of a role."""
        reader, options = self.source.experts, self.options
        assert options.bits is not None
        forms: dict[Role, Representation] = {}
        for role in reader.shape.roles:
            matrix = reader.shape.matrix(role)
            if options.bits.isdigit():
                forms[role] = codes_form(int(options.bits), options.group_size, matrix, options.trellis)
            else:
                forms[role] = base_form(options.bits, 0, matrix)
        weights = {role: (form,) * reader.shape.experts for role, form in forms.items()}

        def layout(layer: int) -> LayerLayout:
            rotation = rotation_seeds(reader.shape, layer, options.seed) if options.rotate else {}
            return LayerLayout(reader.shape, weights, reader.shape.intermediate, base=NO_BASE, rotation=rotation)

        return {layer: layout(layer) for layer in reader.moe_layers}

    @cached_property
    def _text(self) -> CodingText | None:
        """Return the text that codes are chosen on; `None` where they are the nearest ones."""
        options = self.options
        if options.rounding == "nearest" or (options.bits or "").startswith(("nf", "int")):
            return None
        return CodingText.of(self.source, options, in_turn=options.in_turn)

    @property
    def _wants_text(self) -> bool:
        """Whether codes are the nearest ones because nobody has named a text, and are so few that one would tell."""
        options, few = self.options, ("1", "2", "3", "4")
        return not {"calibration", "rounding"} & options.model_fields_set and options.bits in few

    # A budget, or codes that are refined: everything is measured.

    def schemes(self, delta_bits: float | None, matrix_bits: float | None) -> Sequence[StorageScheme]:
        options, shape = self.options, self.source.experts.shape
        rotated_by = options.seed if options.rotate else None
        exact = None if options.bits is None else int(options.bits)
        return [
            without_base(shape, matrix_bits, options.group_size, rotated_by, exact, options.trellis, options.scheme)
        ]

    @property
    def ratio(self) -> float | None:
        return self.options.ratio

    @property
    def granularity(self) -> Granularity:
        return self.options.scheme if self.options.bits is None else "matrix"
