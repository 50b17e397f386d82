"""Export to llama.cpp: one GGUF file with weights, tokenizer and chat template.

On a text the codes of quantized types are chosen; of a file in 16 bits or more there is beside it what `llama-quantize`
wants to know of a model: an importance matrix, and types for tensors.
"""

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moetool.calibration.data import BUNDLED
from moetool.checkpoint.files import write_bytes
from moetool.checkpoint.sizes import format_bytes
from moetool.compress.coding_text import NEAREST
from moetool.costs.building_blocks import (
    ModelSize,
    calibration_backward,
    calibration_forward,
    decoding,
    dense_size,
    moe_size,
)
from moetool.costs.calibration_cost import CalibrationCost, baseline
from moetool.costs.layer_memory import Measuring
from moetool.costs.phases import BACKWARD, FORWARD, WRITE, Phase, Phases, rewriting_phases
from moetool.errors import UsageError, VerificationError
from moetool.export.blocks.coding import choosing_blocks, preparing_inputs
from moetool.export.choosing.ends import Ends
from moetool.export.choosing.losses import expected_coding, moments_between_rows, trying_types
from moetool.export.choosing.measuring import measure_types
from moetool.export.choosing.menu import Menu, counted_types
from moetool.export.gguf.checking import check_source
from moetool.export.gguf.coded_layers import CodedLayers
from moetool.export.gguf.file import BLOCK_ALIGNMENT, GgufTensor, data_bytes, head_bytes, write_gguf
from moetool.export.gguf.imatrix import write_imatrix
from moetool.export.gguf.measuring import TensorStatistics, measure_tensors, on_text
from moetool.export.gguf.metadata import describe_model, file_type
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.modelfile import generation_defaults, modelfile
from moetool.export.gguf.options import ExportGgufOptions, GgufDetails, layer_types
from moetool.export.gguf.own_types import own_menu
from moetool.export.gguf.proof import prove_file
from moetool.export.gguf.remarks import remarks
from moetool.export.gguf.tensor_types import FewBits, advisable, type_lines
from moetool.export.gguf.tokenizer import GgufTokenizer, has_tokenizer, read_tokenizer
from moetool.format.gguf.blocks import BLOCK_TYPES, MXFP4, BlockType, NumberType
from moetool.format.gguf.words import IMATRIX, MODEL, MODELFILE, TENSOR_TYPES, gguf_library, layer_of
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Input, Job, pick_compute_dtype, pick_device
from moetool.job.options import RunOptions, TextOptions, context_length
from moetool.job.plan import Plan, text_cost
from moetool.job.progress import phase
from moetool.job.result import Details, Sizes
from moetool.job.stage import Stage
from moetool.job.writing import record_origin
from moetool.numerics.work import Work, altogether

if TYPE_CHECKING:
    from gguf import GGUFWriter

_REQUANTIZED = ("f32", "f16", "bf16")  # what llama-quantize starts from
_HELD = 6  # parts of a tensor in fp32 that are in memory together while one is decoded and coded
_DIGEST = "digest"  # of the file so far, in what its units tell


class ExportGguf(Stage[ExportGgufOptions, GgufSource]):
    """Writes tensors in llama.cpp's order of rows, experts decoded one by one, whatever they were stored as."""

    name: ClassVar[str] = "gguf"
    summary: ClassVar[str] = "one file for llama.cpp, Ollama and LM Studio, quantized if you wish"
    options_type: ClassVar[type[RunOptions]] = ExportGgufOptions
    source_type: ClassVar[type[Input]] = GgufSource
    method_of: ClassVar[str | None] = "export"

    @property
    def _text(self) -> TextOptions | None:
        return None if self.options.calibration is None else self.options

    @property
    def needs_text(self) -> bool:
        return self.options.chooses_types

    @property
    def _common(self) -> NumberType:
        """Type of what is not a routed expert, until it is chosen."""
        return self.options.number_type or ("q8_0" if self.options.chooses_types else "f16")

    @property
    def _types(self) -> set[NumberType]:
        return {self._common, self.options.experts_type or self._common}

    @property
    def _coded(self) -> list[GgufTensor]:
        """Tensors in quantized types, whose codes are chosen on the calibration text: those of decoder layers, and
        where types are chosen embeddings and head, too."""
        if self._text is None:
            return []
        coded = [tensor for tensor in self._tensors if tensor.type in BLOCK_TYPES and tensor.has_inputs]
        return [tensor for tensor in coded if layer_of(tensor.name) >= 0 or self.options.chooses_types]

    @cached_property
    def _tensors(self) -> list[GgufTensor]:
        """Tensors of the GGUF file to write; refuses an input that llama.cpp cannot compute."""
        check_source(self.source)
        return self.source.tensors(self._common, self.options.experts_type or self._common)

    @cached_property
    def _own_menu(self) -> Menu[BlockType] | None:
        """Types on offer for each tensor, if moetool is to choose and code them."""
        return own_menu(self._tensors) if self.options.chooses_types else None

    @cached_property
    def _budget(self) -> int:
        """Bytes of all tensors, without padding, that the chosen types may take; raises where nothing is that small."""
        menu, size = self._own_menu, self.options.size
        assert menu is not None
        if size is None:
            assert self.options.bits_per_weight is not None
            return menu.budget(self.options.bits_per_weight, self.options.type)
        return menu.budget_within(size, self._most_around, has_experts=self.source.experts is not None)

    @cached_property
    def _head_bytes(self) -> int:
        """Bytes of the file before its first tensor: metadata and the list of tensors."""
        return head_bytes(self._metadata(), self._tensors)

    @property
    def _most_around(self) -> int:
        """Bytes of the file that are no tensors' numbers, at most: its head, and padding."""
        return self._head_bytes + len(self._tensors) * (BLOCK_ALIGNMENT - 1)

    @cached_property
    def _menu(self) -> Menu[FewBits] | None:
        """What llama-quantize can make of each tensor, if types are to be chosen."""
        if (target := self.options.target_bpw) is None or self.options.chooses_types:
            return None
        if self._text is None:
            raise UsageError("--target-bpw chooses types by what they lose on a text: --calibration FILE.")
        if odd := self._types - set(_REQUANTIZED):
            raise UsageError(
                f"--target-bpw is for llama-quantize, which makes nothing of {min(odd)} again: "
                f"--type {', '.join(_REQUANTIZED)}."
            )
        menu = advisable(self._tensors)
        menu.budget(target)
        return menu

    @cached_property
    def _tokenizer(self) -> GgufTokenizer | None:
        path = self.source.checkpoint.path
        if not has_tokenizer(path):
            return None
        vocabulary, family = int(self.source.config.vocab_size), self.source.family
        cut, usual = self.options.pre_tokenizer, family.cutting
        return read_tokenizer(path, vocabulary, cut=cut, usual=usual, pieces=family.pieces)

    def plan(self) -> Plan:
        source, tensors = self.source, self._tensors
        cost, back, menu = self._cost, self._has_gradients, self._own_menu
        if source.experts is not None:
            size, hidden = moe_size(source.experts), source.experts.architecture.hidden
            measuring = [Measuring.codes(source.experts.shape, in_turn=back)] if self._coded else []
            memory = baseline() + 4 * _HELD * source.most_at_once
            if self._text is not None:
                memory = cost.layer_memory(source.experts, *measuring, gradients=back).nbytes()
            work = decoding(size) if source.experts.layouts else Work()
        else:
            assert source.dense is not None
            size, hidden, work = dense_size(source.dense), source.dense.hidden, Work()
            memory = cost.dense_memory_bytes(source.dense, runs=self._text is not None, calibrated=True)
            memory += 4 * 10 * max((tensor.shape[-1] for tensor in self._coded), default=0) ** 2
        fixed = [tensor for tensor in tensors if menu is None or tensor.name not in menu.types]
        types = [f"{count} {number}" for number, count in Counter(tensor.type for tensor in fixed).most_common()]
        output = self._head_bytes + data_bytes(tensors)
        if menu is not None:
            output = self._most_around + min(self._budget, menu.nbytes(menu.largest))
            least, most = map(format_bytes, menu.sizes(self._most_around))
            types.append(f"{len(menu.types)} in types to be chosen, with which the file takes from {least} to {most}")
        moments = [] if menu is None else moments_between_rows(menu)
        if odd := self._fallen_back:
            types.append(f"no whole blocks: {odd}")
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=self._blocks_bytes
            + (4 * hidden**2 * size.moe_layers if menu is not None else 0)
            + 2 * sum(moments)
            + (cost.gradient_bytes(hidden, size.layers) if back else cost.forward_bytes(hidden)),
            memory_bytes=memory + 8 * max(moments, default=0),
            phases=self._phases(cost, size, output, work),
            details={"architecture": source.family.architecture, "tensors": ", ".join(types)},
        )

    @property
    def _has_gradients(self) -> bool:
        return self._menu is not None or self._own_menu is not None

    @property
    def _cost(self) -> CalibrationCost:
        """Cost of running the calibration text; nothing runs without one."""
        dtype, device = self.source.dtype, pick_device(self.options.device)
        if self._text is None:
            return CalibrationCost(0, 1, 4)
        gradients = self._has_gradients
        computed = pick_compute_dtype(self.options.compute_dtype, device, dtype, gradients=gradients)
        return text_cost(self._text, computed, dtype)

    @property
    def _blocks_bytes(self) -> int:
        """Most bytes of blocks that wait to be written: those of a layer."""
        layers = groupby(self._coded, key=lambda tensor: layer_of(tensor.name))
        return max((data_bytes(list(tensors)) for layer, tensors in layers if layer >= 0), default=0)

    def _phases(self, cost: CalibrationCost, size: ModelSize, output: int, decoded: Work) -> Phases:
        writes = rewriting_phases(size, output, decoded)
        if self._text is None:
            return writes
        forward = Phase(FORWARD, calibration_forward(cost, size))
        if self._coded:
            given = (preparing_inputs(tensor.shape, cost.samples * cost.length) for tensor in self._coded)
            works = (self._coding_work(tensor) for tensor in self._coded)
            write = Phase(WRITE, altogether([forward.work, writes[0].work, *given, *works]))
            if self._own_menu is None:
                return (write,)
            tokens = cost.gradient_samples * cost.length
            between_rows = Work(products={"float32": tokens * sum(moments_between_rows(self._own_menu)) / 2})
            tried = forward.work + calibration_backward(cost, size) + trying_types(self._own_menu) + between_rows
            return forward, Phase(BACKWARD, tried), write
        if self._menu is None:
            return forward, *writes
        return forward, Phase(BACKWARD, forward.work + calibration_backward(cost, size)), *writes

    def _coding_work(self, tensor: GgufTensor) -> Work:
        """The work of choosing the blocks of a tensor in its type, or in those that it may be given."""
        if self._own_menu is not None and tensor.name in self._own_menu.types:
            return expected_coding(self._own_menu, tensor)
        in_turn = self._own_menu is not None and layer_of(tensor.name) >= 0
        return choosing_blocks(tensor.shape, BLOCK_TYPES[tensor.type], in_turn=in_turn)

    def run(self, job: Job[GgufSource]) -> Details:
        source, files = self.source, [job.output / MODEL]
        for line in self._remarks():
            job.progress.log(line)
        facts, coded, ends, details = None, None, None, GgufDetails()
        if self._text is not None:
            calibrated = on_text(job, self._text, gradients=self._has_gradients)
            if self._own_menu is not None:
                ends = Ends(calibrated, source)
                details = self._choose(job, calibrated, self._own_menu, ends)
            if self._coded:
                coded = CodedLayers(job, calibrated, self._coded, ends)
            else:
                tensors = {tensor.name: tensor for tensor in self._tensors}
                files += self._write_advice(job, measure_tensors(job, calibrated, tensors, self._menu), calibrated)
            facts = calibrated.facts
        self._write(job, files[0], coded)
        files.append(job.output / MODELFILE)
        write_bytes(files[-1], self._modelfile().encode())
        if self.options.proof:
            types = {tensor.type for tensor in self._tensors if tensor.type != "i32"}
            job.loaded = prove_file(files[0], source, types, chosen=coded is not None)
        layers = layer_types({tensor.name: tensor.type for tensor in self._tensors})
        record_origin(job, files=files, calibration=facts, layers=layers)
        return replace(details, calibration=facts)

    def _choose(
        self, job: Job[GgufSource], calibrated: CalibratedJob, menu: Menu[BlockType], ends: Ends
    ) -> GgufDetails:
        """Choose the types of all tensors on the text, and tell which they are."""
        chosen = menu.choose(self._budget, measure_types(calibrated, self.source, ends, menu))
        self._tensors = [
            replace(tensor, type=chosen[tensor.name].name) if tensor.name in chosen else tensor
            for tensor in self._tensors
        ]
        bits = menu.bits_per_weight(chosen)
        job.progress.log(f"Types are chosen, {bits:.2f} bits per weight on average: {counted_types(chosen)}.")
        return GgufDetails(bits_per_weight=round(bits, 4), types={tensor.name: tensor.type for tensor in self._tensors})

    def _write_advice(self, job: Job[GgufSource], measured: TensorStatistics, calibrated: CalibratedJob) -> list[Path]:
        """Write files with the importance matrix and types for llama-quantize."""
        files, target = [job.output / IMATRIX], self.options.target_bpw
        windows, text, sources = calibrated.facts.windows, str(self.options.calibration), self.options.sources
        if sources is not None and sources.is_mixed:
            text += f",{BUNDLED}"
        write_imatrix(files[0], measured.importance, text, windows, self.options.sequence_length)
        if self._menu is not None and target is not None:
            chosen = self._menu.choose(self._menu.budget(target), measured.losses)
            files.append(job.output / TENSOR_TYPES)
            write_bytes(files[1], type_lines(chosen).encode())
            bits = self._menu.bits_per_weight(chosen)
            job.progress.log(f"{TENSOR_TYPES} has {bits:.2f} bits per weight: {counted_types(chosen)}.")
        options = zip(("--imatrix", "--tensor-type-file"), files, strict=False)
        words = ["llama-quantize", *(word for option, file in options for word in (option, str(file)))]
        job.progress.log(f"To use them: {shlex.join([*words, str(job.output / MODEL), 'SMALLER.gguf', 'Q4_K_M'])}")
        return files

    def _write(self, job: Job[GgufSource], file: Path, coded: CodedLayers | None) -> None:
        """The file itself, whose layers are units of the journal."""
        names = set() if coded is None else {tensor.name for tensor in self._coded}
        units = [
            [
                replace(tensor, parts=partial(coded.blocks, tensor.name))
                if coded is not None and tensor.name in names
                else tensor
                for tensor in unit
            ]
            for _, unit in self._units()
        ]
        writer = self._metadata()

        def note(number: int, digest: str) -> None:
            spent = [] if coded is None else coded.spent(layer_of(units[number][0].name))
            job.finish(f"write/{number}", spent=spent, told={_DIGEST: digest})
            job.interrupt.check()

        steps, unit = len(self._tensors), "tensors"
        if coded is not None:
            steps, unit = steps + coded.steps, "batches and tensors"
        with phase(job.progress, WRITE, steps, unit):
            if job.unit("write", len(self._tensors)):
                done = takewhile(job.workspace.is_done, (f"write/{number}" for number in range(len(units))))
                noted = [str(job.workspace.told(unit)[_DIGEST]) for unit in done]
                digest = write_gguf(file, writer, units, noted, job.progress, note)
                job.finish("write", made=[file], digests={file: digest})

    def _units(self) -> Iterator[tuple[int, list[GgufTensor]]]:
        """Tensors of the file by layer, what is in none first (-1)."""
        for layer, unit in groupby(self._tensors, key=lambda tensor: layer_of(tensor.name)):
            yield layer, list(unit)

    def _metadata(self) -> "GGUFWriter":
        """The library's writer with all that the file says of the model."""
        library, source = gguf_library(), self.source
        writer = library.GGUFWriter(None, source.family.architecture)
        name = source.checkpoint.path.resolve().name
        writer.add_name(name if self._tokenizer is None else self._tokenizer.name_of(name))
        writer.add_file_type(library.LlamaFileType[file_type(self._tensors)])
        writer.add_quantization_version(library.GGML_QUANT_VERSION)
        describe_model(writer, source)
        if self._tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            self._tokenizer.add_to(writer)
        return writer

    def _modelfile(self) -> str:
        """What Ollama is told of the file."""
        checkpoint = self.source.checkpoint
        has_template = self._tokenizer is not None and self._tokenizer.template is not None
        given = generation_defaults(checkpoint.path)
        return modelfile(MODEL, context_length(checkpoint.settings), given, has_template=has_template)

    def _remarks(self) -> list[str]:
        """Notes for the user, before anything is written."""
        found = remarks(self.source, self._types)
        options = self.options
        if not (options.type or options.experts_type or options.size or options.target_bpw):
            found.append("Weights are written in f16: --type Q4_K_M or --size makes a smaller file.")
        if self._tokenizer is None:
            found.append("There is no tokenizer: the file is of use to programs that bring token ids.")
        elif (remark := self._tokenizer.remark) is not None:
            found.append(remark)
        if odd := self._fallen_back:
            found.append(f"Rows of some tensors are no whole blocks of the type asked for: {odd}.")
        if self._text is None and not {*self._types} <= {*_REQUANTIZED, "q8_0", MXFP4}:
            found.append(NEAREST)
        return found

    @cached_property
    def _fallen_back(self) -> str:
        """Tensors whose rows are no whole blocks of the type that was asked for, by the type that they get."""
        odd = [tensor for tensor in self._tensors if tensor.is_fallback(self._types)]
        return "; ".join(
            f"{len(names)} are {number}, {names[0]} among them"
            for number in dict.fromkeys(tensor.type for tensor in odd)
            if (names := [tensor.name for tensor in odd if tensor.type == number])
        )

    def verify(self, output: Path) -> Sizes:
        found = {tensor.name: tensor for tensor in gguf_library().GGUFReader(output / MODEL).tensors}
        menu = {} if self._own_menu is None else self._own_menu.types
        for tensor in self._tensors:
            stored = found.get(tensor.name)
            shape = None if stored is None else tuple(reversed(stored.shape.tolist()))
            types = [tensor.type, *(own.name for own in menu.get(tensor.name, ()))]
            if stored is None or shape != tensor.shape or stored.tensor_type.name.lower() not in types:
                raise VerificationError(f"{output / MODEL} lacks {tensor.name} as it was planned.")
        return self.sizes(self.source, (output / MODEL).stat().st_size)
