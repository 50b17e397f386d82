"""Stage that trains the small tensors of a compressed model towards the original's predictions, at no byte more."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from moetool.architectures.base import experts_told, whole_number
from moetool.calibration.comparable import check_comparable
from moetool.calibration.data import parse_data
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.files import save_tensors
from moetool.checkpoint.manifest import manifest_of, noted_in
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.costs.phases import Phases
from moetool.errors import InvalidInputError, UsageError
from moetool.job.blueprint import open_for_planning
from moetool.job.job import Job, Source
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.progress import BATCHES, phase
from moetool.job.result import Json, Sizes
from moetool.job.stage import Effect, Stage, found_here
from moetool.repair.costs import (
    NOTE,
    StreamedOriginal,
    TrainedModel,
    noted_bytes,
    repair_phases,
)
from moetool.repair.gguf_student import GgufStudent
from moetool.repair.options import RATE, RATE_IN_FULL, RATE_LAYERS, RepairOptions
from moetool.repair.results import RepairResult
from moetool.repair.sources import GgufInput, MoefiedSource, RepairedSource, repaired_source
from moetool.repair.students import CheckpointStudent, MoefiedStudent, MoEStudent, Student
from moetool.repair.teaching import Teaching
from moetool.repair.texts import Texts, draw_texts

_RESULT = TypeAdapter(RepairResult)
_LOGITS = 4  # copies of a window's logits while they are noted
# What a model and the one that it was made of have in common, whatever became of its experts.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_FROM_DENSE = "`moetool tune --teacher` lets it learn from its dense model."


class _Memory(NamedTuple):
    """Bytes of memory that a repair takes. Plan and run go by one answer.

    Attributes:
        original: while the original predicts.
        training: while the model is trained.
        holds_decoded: whether codes are held decoded meanwhile. They round otherwise if they are.
        streams: whether weights that are not trained are read in every pass.
    """

    original: int
    training: int
    holds_decoded: bool
    streams: bool


class Repair(Stage[RepairOptions, RepairedSource]):
    """Distillation of the original into what costs no byte of a compressed or moefied model, or of a GGUF file."""

    name: ClassVar[str] = "repair"
    summary: ClassVar[str] = "train what costs no byte of a compressed model or a GGUF file towards its original"
    options_type: ClassVar[type[RunOptions]] = RepairOptions
    effect: ClassVar[Effect] = "trains"

    @property
    def needs_text(self) -> bool:
        return True

    @cached_property
    def _original(self) -> Checkpoint:
        return open_for_planning(self.options.to)

    @cached_property
    def _student(self) -> Student:
        source, original, options = self.source, self._original, self.options
        if isinstance(source, GgufInput):
            return GgufStudent(source, original, options)
        if isinstance(source, MoefiedSource):
            return MoefiedStudent(source, original, options)
        return MoEStudent(source, original, options)

    @property
    def _teaching(self) -> Teaching:
        return self._student.teaching

    @classmethod
    def opened(cls, checkpoint: Checkpoint) -> RepairedSource:
        return repaired_source(checkpoint)

    @property
    def gguf_bytes(self) -> int | None:
        return None if isinstance(self.source, GgufInput) else super().gguf_bytes

    def inputs(self) -> Mapping[str, Checkpoint]:
        return {**super().inputs(), "original": self._original}

    def reads(self) -> list[Path]:
        return [*super().reads(), *found_here([self.options.to])]

    def in_bfloat16(self) -> RunOptions | None:
        return None

    @property
    def _windows(self) -> int:
        return self.options.samples + 2 * self.options.held_out

    @property
    def _vocabulary(self) -> int:
        return whole_number(self.source.checkpoint.settings, "vocab_size") or 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes on the disk: of hidden states while the original predicts, of its predictions, and of the model that is
        trained where that lies there in fp32."""
        return max(self._teacher.scratch, self._student.scratch_bytes) + self._noted_bytes

    @property
    def _noted_bytes(self) -> int:
        """Bytes of the original's predictions of all windows."""
        options = self.options
        k = min(options.top_logits, self._vocabulary)
        return noted_bytes(self._windows, options.sequence_length, k, self._teaching.routed)

    @cached_property
    def _teacher(self) -> StreamedOriginal:
        """Memory and scratch of the original as it predicts all windows, a layer at a time."""
        logits = 4 * self.options.sequence_length * self._vocabulary
        return self._teaching.teacher(self._windows, self._noted_bytes + _LOGITS * logits)

    @cached_property
    def _rate(self) -> float:
        default = RATE_IN_FULL if self._student.trains in ("lora", "all") else RATE
        default *= RATE_LAYERS / max(RATE_LAYERS, self._teaching.size.layers)
        return self.options.learning_rate or float(f"{default:.2g}")

    @cached_property
    def _memory(self) -> "_Memory":
        return self._needed(self._student.trained)

    def _needed(self, whole: TrainedModel, *, may_stream: bool = True) -> "_Memory":
        """The memory of a repair whose model is `whole` in memory, or where that takes more than there is, streamed."""
        student, original = self._student, self._teacher.memory
        if may_stream and not student.fits(whole) and (streamed := student.streamed) is not None:
            return _Memory(original, student.training_bytes(streamed), holds_decoded=False, streams=True)
        decoded = replace(whole, loaded=whole.loaded + whole.decoded)
        holds = student.fits(decoded)
        needed = student.training_bytes(decoded if holds else whole)
        return _Memory(original, needed, holds_decoded=holds, streams=False)

    def memory_before(self, nbytes: int, share: float) -> tuple[int, int]:
        """Bytes of memory that the repair takes of what the input is compressed to, `nbytes` of weight files, a `share`
        of whose experts are numbers of floating point: the least, while the original predicts, and the most."""
        assert isinstance(self._student, CheckpointStudent)
        needed = self._needed(self._student.most(nbytes, share), may_stream=share == 1)
        return needed.original, max(needed.original, needed.training)

    def phases(self, nbytes: int) -> Phases:
        """The phases of the repair of a model that takes `nbytes` of weight files."""
        tensors = len(self.source.checkpoint.tensors)
        again = self._student.reading if self._memory.streams else None
        return repair_phases(self._teaching.size, self.options, self._windows, nbytes, tensors, again)

    def plan(self) -> Plan:
        options, source = self.options, self.source.checkpoint
        if options.compute_dtype not in ("auto", "float32"):
            raise UsageError(
                f"--compute-dtype {options.compute_dtype}: repair holds weights in float32 and computes in it, since "
                "what it moves is smaller than what 16 bits tell apart."
            )
        # A file is read as a Llama where the model computes what one does.
        is_from_file, has_routers = isinstance(self.source, GgufInput), self._teaching.has_routers
        _check_kin(self._original, source, _SIZES if is_from_file else ("model_type", *_SIZES))
        if is_from_file and has_routers and experts_told(self._original.settings) is None:
            raise InvalidInputError(
                f"{source.source} has experts, and --to {self._original.source} has none: name the model with experts "
                f"that it was made of. {_FROM_DENSE}"
            )
        kind = "a GGUF file" if is_from_file else "a moefied model"
        if not isinstance(self.source, Source) and any(spec.is_self for spec in parse_data(options.calibration or "")):
            raise UsageError(f"--calibration self: {kind} is repaired on a text. Name one, or bundled.")
        if not has_routers and options.routing is not None:
            kind = "a dense model" if is_from_file else kind
            raise UsageError(f"--routing: {kind} has no routers. Leave it out.")
        first, second = self._memory.original, self._memory.training
        details: dict[str, Json] = {
            "original": options.to,
            "trains": self._student.trains,
            "original_memory_bytes": first,
            "training_memory_bytes": second,
            "learning_rate": self._rate,
        }
        if has_routers:
            details["experts_at_once"] = self._teacher.experts_at_once
            details["routing"] = self._teaching.routing if self._teaching.target else 0.0
        details["weights"] = self._told_of_weights
        less = "A smaller --batch-size needs less."
        if first > second:
            less = "Fewer or shorter windows (--samples, --held-out, --sequence-length) need less."
        elif self._student.trains == "all":
            less = "--train lora needs less."
        elif self._memory.holds_decoded:
            less = "A --memory in which codes cannot be held decoded, or a smaller --batch-size, needs less."
        return Plan(
            stage=self.name,
            input_bytes=self._student.input_bytes + self._original.weight_bytes,
            output_bytes=self._student.output_bytes,
            scratch_bytes=self.scratch_bytes,
            memory_bytes=max(first, second),
            phases=self.phases(self._student.input_bytes),
            details=details,
            advice=f"{options.to} predicts with a layer at a time in memory, which takes {format_bytes(first)}; then "
            f"the model is trained in float32, which takes {format_bytes(second)}. {less}",
        )

    @property
    def _told_of_weights(self) -> str:
        """How the model is held while it is trained, in words."""
        if self._memory.streams:
            return self._student.told_of_reading
        if not self._student.trained.decoded:
            return "in memory"
        decoded = "once" if self._memory.holds_decoded else "in every step, since decoded they take more memory"
        return f"in memory, codes decoded {decoded}"

    def run(self, job: Job[RepairedSource]) -> RepairResult:
        from moetool.repair.teacher import NotedFile
        from moetool.repair.training import Distilling
        from moetool.representations.decoded_once import decoded_once

        trained = job.workspace.told("train").get("trains", self._student.trains)
        if trained != self._student.trains:  # by a run with other memory, which is gone on with
            return Repair(self.source, self.options.model_copy(update={"train": trained})).run(job)
        source, options = self.source.checkpoint, self.options
        check_comparable(self._original, source, load_tokenizer(source.path))
        self._say_of_origin(job)
        texts = draw_texts(job, options)
        noted, learnt = job.work / "original.safetensors", job.work / "repaired.safetensors"
        if job.unit("original"):
            self._note(job, noted, texts)
            job.finish("original", made=[noted])
        trainee = self._student.trainee(job, streams=self._memory.streams)
        if job.unit("train"):
            with ExitStack() as stack:
                if self._memory.holds_decoded:
                    stack.enter_context(decoded_once(trainee.model))
                settled = options.model_copy(update={"learning_rate": self._rate, "routing": self._teaching.routing})
                slows = options.learning_rate is None
                training = Distilling(trainee, texts, NotedFile(noted), settled, slows=slows)
                outcome = training.run(job.progress, job.interrupt)
            save_tensors(learnt, {name: value.cpu() for name, value in outcome.values.items()})
            told = RepairResult(
                trains=self._student.trains,
                trained_parameters=sum(master.numbers.numel() for master in trainee.masters.values()),
                kept_step=outcome.step,
                kl_before=outcome.before,
                kl_after=outcome.after,
                stopped=outcome.stopped,
                learning_rate=outcome.rate,
                training_seconds=outcome.seconds,
                curve=outcome.curve,
                calibration=texts.facts,
            )
            job.finish("train", made=[learnt], spent=[noted], told=_told(told))
        result = job.workspace.told("train")
        values = load_file(learnt)
        for name, master in trainee.masters.items():
            master.set(values[name].to(job.device))
        self._student.write(job, trainee, texts.facts)
        return replace(_RESULT.validate_python(result), calibration=texts.facts)

    def verify(self, output: Path) -> Sizes:
        return self._student.verify(output) or super().verify(output)

    def _note(self, job: Job[RepairedSource], file: Path, texts: Texts) -> None:
        """Let the original predict all windows, a layer at a time, and note what it says."""
        from moetool.calibration.streaming import StreamedModel
        from moetool.calibration.sweep import Sweep
        from moetool.repair.teacher import note, predictions

        teacher, k = self._teacher, self.options.top_logits
        model = StreamedModel(
            teacher.checkpoint,
            teacher.architecture,
            torch.float32,
            job.device,
            experts_at_once=teacher.experts_at_once,
        )
        sweep = Sweep(model, texts.whole, job.work, job.progress.advance, kept=torch.float32)
        with phase(job.progress, NOTE, (model.layer_count + 2) * sweep.batch_count, BATCHES):
            found = predictions(sweep, k, self._teaching.target, job.progress, job.interrupt)
        sweep.hidden(model.layer_count).path.unlink()
        note(file, found)

    def _say_of_origin(self, job: Job[RepairedSource]) -> None:
        """Say so if the model is the original, or its record names others than this one."""
        source, fingerprint = self.source.checkpoint, self._original.fingerprint()
        if fingerprint == source.fingerprint():
            job.progress.log(
                f"{source.source} and --to {self._original.source} are the same model: there is nothing to learn."
            )
            return
        if (manifest := manifest_of(noted_in(source))) is None:
            return
        if fingerprint not in {origin.source_fingerprint for origin in manifest.origins}:
            job.progress.log(
                f"{self._original.source} is not what {source.source} was made of, by its {len(manifest.origins)} "
                "recorded steps: it is repaired towards another model of the same shape."
            )


def _told(result: RepairResult) -> dict[str, object]:
    """The fields of a result that a resumed job is told."""
    return {name: value for name, value in vars(result).items() if name != "calibration"}


def _check_kin(original: Checkpoint, model: Checkpoint, keys: Sequence[str]) -> None:
    """Raise `InvalidInputError` unless a model can have been made of an original, by what these entries of its config
    tell."""
    ours, theirs = model.settings, original.settings
    for key in keys:
        mine, other = ours.get(key), theirs.get(key)
        if mine is not None and other is not None and mine != other:
            upcycled = f" Has it been upcycled from that? {_FROM_DENSE}" if key == "model_type" else ""
            raise InvalidInputError(
                f"{model.source} has {key} {mine}, and --to {original.source} has {other}: it was not compressed or "
                f"moefied from that. Name the model that it was.{upcycled}"
            )
