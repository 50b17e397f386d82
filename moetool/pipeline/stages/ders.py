"""DeRS compression in one pass: base, differences, and those in few bits or few numbers (arXiv:2503.01359)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moetool.pipeline.bases import LayerBase
from moetool.pipeline.encoding import (
    BaseOptions,
    CodeOptions,
    SparsityOptions,
    base_representations,
    decomposed_layouts,
    encoding_plan,
    quantised,
    run_encoding,
    sparse,
    with_text,
)
from moetool.pipeline.given_base import check_base_groups, check_groups, in_few_bits, kinship_warning, open_base
from moetool.pipeline.job import Job
from moetool.pipeline.options import CalibrationOptions, RunOptions
from moetool.pipeline.plan import Plan
from moetool.pipeline.stage import Stage
from moetool.representations.layout import LayerLayout

BASE_GROUP = 128  # inputs that share a scale in a base of few bits, where differences have no groups


class DersQuantizeOptions(RunOptions, BaseOptions, CodeOptions, CalibrationOptions):
    """Which base, and how few bits."""


class DersSparsifyOptions(RunOptions, BaseOptions, SparsityOptions):
    """Which base, and how few numbers."""


class DersQuantize(Stage[DersQuantizeOptions]):
    """`decompose` and `quantize-delta` in one pass."""

    name: ClassVar[str] = "ders-quantize"
    summary: ClassVar[str] = "one shared base per layer plus differences in few bits"
    options_type: ClassVar[type[RunOptions]] = DersQuantizeOptions
    is_method: ClassVar[bool] = True

    def _layouts(self) -> dict[int, LayerLayout]:
        options = self.options
        check_groups(options.group_size, self.source.experts)
        base = base_representations(options.base_bits, options.group_size)
        return decomposed_layouts(self.source, base, quantised(options.bits, options.group_size))

    def sources(self) -> Mapping[str, str]:
        return {**super().sources(), "base": open_base(self.options.base, self.source.experts).fingerprint}

    def plan(self) -> Plan:
        options = self.options
        open_base(options.base, self.source.experts)
        text = with_text(options)
        return encoding_plan(self.name, self.source, options, self._layouts(), text, bits=options.bits)

    def run(self, job: Job) -> dict[str, Any]:
        reader, options = self.source.experts, self.options
        given = open_base(options.base, reader)
        if warning := kinship_warning(given):
            job.progress.log(warning)

        def base(layer: int) -> LayerBase:
            return in_few_bits(given.layer(layer), options.base_bits, options.group_size)

        measured = {layer: own for layer in reader.moe_layers if (own := given.statistics(layer)) is not None}
        return run_encoding(job, self.name, self._layouts(), base, measured, options.seed, with_text(options))


class DersSparsify(Stage[DersSparsifyOptions]):
    """`decompose` and `sparsify-delta` in one pass."""

    name: ClassVar[str] = "ders-sparsify"
    summary: ClassVar[str] = "one shared base per layer plus few elements of the differences"
    options_type: ClassVar[type[RunOptions]] = DersSparsifyOptions
    is_method: ClassVar[bool] = True

    def _layouts(self) -> dict[int, LayerLayout]:
        options = self.options
        check_base_groups(options.base_bits, BASE_GROUP, self.source.experts)
        base = base_representations(options.base_bits, BASE_GROUP)
        return decomposed_layouts(self.source, base, sparse(options))

    def sources(self) -> Mapping[str, str]:
        return {**super().sources(), "base": open_base(self.options.base, self.source.experts).fingerprint}

    def plan(self) -> Plan:
        open_base(self.options.base, self.source.experts)
        return encoding_plan(self.name, self.source, self.options, self._layouts(), drop=self.options.drop)

    def run(self, job: Job) -> dict[str, Any]:
        reader, options = self.source.experts, self.options
        given = open_base(options.base, reader)
        if warning := kinship_warning(given):
            job.progress.log(warning)

        def base(layer: int) -> LayerBase:
            return in_few_bits(given.layer(layer), options.base_bits, BASE_GROUP)

        measured = {layer: own for layer in reader.moe_layers if (own := given.statistics(layer)) is not None}
        return run_encoding(job, self.name, self._layouts(), base, measured, options.seed)
