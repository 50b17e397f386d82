"""To llama.cpp and everything that is built on it: one GGUF file with weights, tokenizer and chat template."""

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from moetool.errors import VerificationError
from moetool.export.gguf.file import GgufTensor, NumberType, data_bytes, write_gguf
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.tokenizer import GgufTokenizer, has_tokenizer, read_tokenizer
from moetool.format.gguf import gguf_library
from moetool.job.building_blocks import decoding, dense_size, moe_size
from moetool.job.job import Input, Job
from moetool.job.options import RunOptions
from moetool.job.phases import WRITE, rewriting_phases
from moetool.job.plan import CalibrationCost, Plan
from moetool.job.progress import phase
from moetool.job.result import Sizes, Told
from moetool.job.stage import Stage
from moetool.job.work import Work
from moetool.job.writing import record_origin

MODEL = "model.gguf"
_TOKENIZER_ROOM = 2  # bytes in the file for one of tokenizer.json, at most


class ExportGgufOptions(RunOptions):
    """The types of numbers, and what the tokenizer is called."""

    type: NumberType = Field(
        "f16", description="Of the weights; routers and norms are always fp32. llama-quantize makes further ones."
    )
    experts_type: NumberType | None = Field(None, description="Of the routed experts alone (default: as --type).")
    pre_tokenizer: str | None = Field(
        None,
        description="llama.cpp's name of how the tokenizer cuts a text, where moetool does not know it from its rules.",
    )


class ExportGguf(Stage[ExportGgufOptions, GgufSource]):
    """Writes tensors in llama.cpp's order of rows, experts decoded one by one, whatever they were stored as."""

    name: ClassVar[str] = "gguf"
    summary: ClassVar[str] = "one file for llama.cpp, with tokenizer and chat template"
    options_type: ClassVar[type[RunOptions]] = ExportGgufOptions
    source_type: ClassVar[type[Input]] = GgufSource
    method_of: ClassVar[str | None] = "export"

    @cached_property
    def _tensors(self) -> list[GgufTensor]:
        """What is written, of an input that can be."""
        self.source.check()
        return self.source.tensors(self.options.type, self.options.experts_type or self.options.type)

    @cached_property
    def _tokenizer(self) -> GgufTokenizer | None:
        path = self.source.checkpoint.path
        if not has_tokenizer(path):
            return None
        return read_tokenizer(path, int(self.source.config.vocab_size), self.options.pre_tokenizer)

    def plan(self) -> Plan:
        source, tensors = self.source, self._tensors
        path = source.checkpoint.path / "tokenizer.json"
        room = _TOKENIZER_ROOM * path.stat().st_size if path.exists() else 0
        output = data_bytes(tensors) + room + (1 << 16)
        cost = CalibrationCost(0, 1, 4)
        if source.experts is not None:
            size = moe_size(source.experts)
            memory = cost.memory_bytes(source.experts, gradients=False, factors=False)
            work = decoding(size) if source.experts.layouts else Work()
        else:
            assert source.dense is not None
            size, work = dense_size(source.dense), Work()
            memory = cost.dense_memory_bytes(source.dense, runs=False, calibrated=False)
        types = Counter(tensor.type for tensor in tensors)
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=0,
            memory_bytes=memory,
            phases=rewriting_phases(size, output, work),
            details={"architecture": source.family.architecture, "tensors": ", ".join(_counted(types))},
        )

    def run(self, job: Job[GgufSource]) -> Told:
        library = gguf_library()
        source, tensors, file = self.source, self._tensors, job.output / MODEL
        source.check_idle()
        for line in self._remarks():
            job.progress.log(line)
        writer = library.GGUFWriter(None, source.family.architecture)
        writer.add_name(source.checkpoint.path.resolve().name)
        writer.add_file_type(library.LlamaFileType[_file_type(self.options.type)])
        writer.add_quantization_version(library.GGML_QUANT_VERSION)
        source.describe(writer)
        if self._tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            self._tokenizer.add_to(writer)

        def wrote(_: GgufTensor) -> None:
            job.progress.advance()
            job.interrupt.check()

        with phase(job.progress, WRITE, len(tensors)):
            if job.unit("write", len(tensors)):
                write_gguf(file, writer, tensors, wrote)
                job.finish("write", made=[file])
        record_origin(job, seed=0, files=[file])
        return Told()

    def _remarks(self) -> list[str]:
        """What a user has to know of the result."""
        config, options, found = self.source.config, self.options, []
        window = getattr(config, "sliding_window", None)
        if window and getattr(config, "use_sliding_window", True):
            found.append(f"llama.cpp does not keep to this model's window of {window} tokens: longer texts differ.")
        if self._tokenizer is None:
            found.append("There is no tokenizer: the file is of use to programs that bring token ids.")
        wanted = {options.type, options.experts_type or options.type}
        if odd := [tensor for tensor in self._tensors if tensor.type == "f16" and "f16" not in wanted]:
            found.append(
                f"{len(odd)} tensors have rows that are no whole blocks of 32, {odd[0].name} among them: fp16."
            )
        return found

    def verify(self, output: Path) -> Sizes:
        found = {tensor.name: tensor for tensor in gguf_library().GGUFReader(output / MODEL).tensors}
        for tensor in self._tensors:
            stored = found.get(tensor.name)
            shape = None if stored is None else tuple(reversed(stored.shape.tolist()))
            if stored is None or shape != tensor.shape or stored.tensor_type.name.lower() != tensor.type:
                raise VerificationError(f"{output / MODEL} lacks {tensor.name} as it was planned.")
        before, after = self.source.checkpoint.weight_bytes, (output / MODEL).stat().st_size
        return Sizes(before, after, round(1 - after / before, 6))


def _file_type(number: NumberType) -> str:
    return "ALL_F32" if number == "f32" else f"MOSTLY_{number.upper()}"


def _counted(types: "Counter[NumberType]") -> list[str]:
    return [f"{count} {number}" for number, count in types.most_common()]
