"""DeRS compression in one pass: base and deltas, quantized or sparse (arXiv:2503.01359)."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypeVar

from moetool.bases.given import (
    GivenBase,
    in_few_bits,
    kinship_warning,
    open_base,
)
from moetool.bases.layer_base import LayerBase
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.reader import Checkpoint
from moetool.compress.coding_text import CodingText
from moetool.compress.delta_encoding import encoding_plan, run_encoding
from moetool.compress.delta_forms import (
    CodeOptions,
    ExtendedOptions,
    Form,
    SparsityOptions,
    base_representations,
    decomposed_layouts,
    quantized,
    sparse,
)
from moetool.compress.results import LayersResult
from moetool.format.layout import LayerLayout
from moetool.job.job import Job
from moetool.job.options import KeepOptions, RunOptions, TextOptions
from moetool.job.plan import Plan
from moetool.job.stage import Effect, Stage, found_here

BASE_GROUP = 128  # inputs that share a scale in a quantized base, where deltas have no groups


class DersQuantizeOptions(RunOptions, KeepOptions, ExtendedOptions, CodeOptions, TextOptions):
    """Options of `ders-quantize`: the base, and the bits of a delta."""


class DersSparsifyOptions(RunOptions, KeepOptions, ExtendedOptions, SparsityOptions):
    """Options of `ders-sparsify`: the base, and the share of a delta that is dropped."""


DersT = TypeVar("DersT", DersQuantizeOptions, DersSparsifyOptions)


class _Ders(Stage[DersT]):
    """Does in one pass what `decompose` and a stage that encodes deltas do."""

    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    @abstractmethod
    def _form(self) -> Form:
        """Return the function that gives the representation of a delta by layer, expert and role."""

    def _base_group(self) -> int:
        """Inputs that share a scale in a quantized base."""
        return BASE_GROUP

    @cached_property
    def _text(self) -> CodingText | None:
        """Return the text that codes are chosen on; `None` where they are not chosen on a text."""
        return CodingText.of(self.source, self.options)

    def _base(self) -> GivenBase:
        return open_base(self.options.base, self.source.experts, shared_expert=self.options.shared_expert)

    def _layouts(self) -> dict[int, LayerLayout]:
        options = self.options
        base = base_representations(self.source.experts.shape, options.base_bits, self._base_group())
        return decomposed_layouts(self.source, base, self._form(), shared_expert=options.shared_expert)

    def inputs(self) -> Mapping[str, Checkpoint]:
        return {**super().inputs(), **self._base().inputs()}

    def sources(self) -> Mapping[str, str]:
        return {**super().sources(), "base": self._base().fingerprint}

    def reads(self) -> list[Path]:
        return [*super().reads(), *found_here([self.options.base])]

    def plan(self) -> Plan:
        self._base()
        return encoding_plan(self.name, self.source, self.options, self._layouts(), self._text)

    def run(self, job: Job) -> LayersResult:
        reader, given, options = self.source.experts, self._base(), self.options
        if warning := kinship_warning(given):
            job.progress.log(warning)

        def base(layer: int, weights: Weights) -> LayerBase:
            return in_few_bits(given.layer(layer, weights), options.base_bits, self._base_group())

        measured = {layer: own for layer in reader.moe_layers if (own := given.statistics(layer)) is not None}
        return run_encoding(job, self.name, self._layouts(), base, measured, self._text)


class DersQuantize(_Ders[DersQuantizeOptions]):
    """Compression in one pass to a shared base per layer and quantized deltas, as `decompose` and then
    `quantize-delta`."""

    name: ClassVar[str] = "ders-quantize"
    summary: ClassVar[str] = "one shared base per layer plus quantized deltas"
    options_type: ClassVar[type[RunOptions]] = DersQuantizeOptions

    def _form(self) -> Form:
        return quantized(self.options.bits, self.options.group_size, self.source.experts.shape)

    def _base_group(self) -> int:
        return self.options.group_size


class DersSparsify(_Ders[DersSparsifyOptions]):
    """Compression in one pass to a shared base per layer and sparse deltas, as `decompose` and then
    `sparsify-delta`."""

    name: ClassVar[str] = "ders-sparsify"
    summary: ClassVar[str] = "one shared base per layer plus sparse deltas"
    options_type: ClassVar[type[RunOptions]] = DersSparsifyOptions
    effect: ClassVar[Effect] = "rescales"

    def _form(self) -> Form:
        return sparse(self.options)
