"""DeRS compression in one pass: base and deltas, quantized or sparse (arXiv:2503.01359)."""

from abc import abstractmethod
from functools import cached_property
from typing import ClassVar, TypeVar

from moetool.compress.coding_text import CodingText
from moetool.compress.delta_encoding import encoding_plan, run_encoding
from moetool.compress.delta_forms import (
    CodeOptions,
    Form,
    SparsityOptions,
    base_representations,
    decomposed_layouts,
    quantized,
    sparse,
)
from moetool.compress.given_base import GivenBaseOptions, OnGivenBase
from moetool.compress.results import LayersResult
from moetool.format.layout import LayerLayout
from moetool.job.job import Job
from moetool.job.options import RunOptions, TextOptions
from moetool.job.plan import Plan
from moetool.job.stage import Effect


class DersQuantizeOptions(GivenBaseOptions, CodeOptions, TextOptions):
    """Options of `ders-quantize`: the base, and the bits of a delta."""


class DersSparsifyOptions(GivenBaseOptions, SparsityOptions):
    """Options of `ders-sparsify`: the base, and the share of a delta that is dropped."""


DersT = TypeVar("DersT", DersQuantizeOptions, DersSparsifyOptions)


class _Ders(OnGivenBase[DersT]):
    """Does in one pass what `decompose` and a stage that encodes deltas do."""

    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    @abstractmethod
    def _form(self) -> Form:
        """Return the function that gives the representation of a delta by layer, expert and role."""

    @cached_property
    def _text(self) -> CodingText | None:
        """Return the text that codes are chosen on; `None` where they are not chosen on a text."""
        return CodingText.of(self.source, self.options)

    def _layouts(self) -> dict[int, LayerLayout]:
        options = self.options
        base = base_representations(self.source.experts.shape, options.base_bits, self._base_group)
        return decomposed_layouts(self.source, base, self._form(), shared_expert=options.shared_expert)

    def plan(self) -> Plan:
        self._base()
        return encoding_plan(self.name, self.source, self.options, self._layouts(), self._text)

    def run(self, job: Job) -> LayersResult:
        given = self._opened(job)
        return run_encoding(job, self.name, self._layouts(), self._loading(given), given.statistics(), self._text)


class DersQuantize(_Ders[DersQuantizeOptions]):
    """Compression in one pass to a shared base per layer and quantized deltas, as `decompose` and then
    `quantize-delta`."""

    name: ClassVar[str] = "ders-quantize"
    summary: ClassVar[str] = "one shared base per layer plus quantized deltas"
    options_type: ClassVar[type[RunOptions]] = DersQuantizeOptions

    def _form(self) -> Form:
        return quantized(self.options.bits, self.options.group_size, self.source.experts.shape)

    @property
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
