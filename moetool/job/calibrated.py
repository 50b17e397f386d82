"""Forward and reverse passes of a job over its calibration text, journaled layer by layer."""

import hashlib
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.calibration.activations import ActivationFile
from moetool.calibration.boundaries import kept_dtype, stretch
from moetool.calibration.masking import masked_windows
from moetool.calibration.mixing import ONE_KIND
from moetool.calibration.opening import opening_text
from moetool.calibration.output_gradients import OutputGradients, metric_path
from moetool.calibration.sweep import Sweep
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.files import save_tensors
from moetool.errors import InvalidInputError, UsageError
from moetool.job.included_codes import IncludedCodes, hand_on
from moetool.job.job import DenseSource, Job, Source
from moetool.job.options import CalibrationOptions, TextOptions
from moetool.job.own_text import own_text
from moetool.job.progress import BATCHES, phase
from moetool.job.result import CalibrationFacts
from moetool.job.windows import bos_of, drawn_for
from moetool.runtime.modules.fused import fused_matrix

Visit = Callable[[int, nn.Module], None]
MeasureLayer = Callable[[int, nn.Module], dict[str, Tensor]]

_TEXT = "text"  # the unit that notes which one it is


class CalibratedJob:
    """A job together with the model and the text it is calibrated on.

    Attributes:
        sweep: the whole text.
        gradient_sweep: the part of it that gradients are taken on.
        experts_at_once: of a layer, in memory; `None` for all.
    """

    def __init__(
        self,
        job: Job[Source] | Job[DenseSource],
        options: TextOptions,
        *,
        encoder: bool = False,
        gradients: bool = False,
        experts_at_once: int | None = None,
    ) -> None:
        """An `encoder` is to find what masks hide; with `gradients` there will be a way back. Of a layer all experts
        are in memory together, or so many `experts_at_once`."""
        from moetool.calibration.streaming import StreamedModel  # transformers: seconds, and not for --help

        self.job = job
        drawn = drawn_for(job.source, options, 0, own_text(job, options))
        windows, counts = drawn.windows, drawn.counts
        for remark in drawn.remarks:
            job.progress.log(remark)
        if len(windows) < options.samples:
            job.progress.log(
                f"The calibration text has only {len(windows)} windows of {options.sequence_length} tokens, "
                f"not {options.samples}: using them all."
            )
        job.progress.log(f"Calibration on {counts}.")
        if counts.is_of_one_kind:
            job.progress.log(ONE_KIND)
        digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
        if job.ranks.broadcast(digest) != digest:
            raise InvalidInputError("The calibration text is not the same in all processes: put it where all find it.")
        if job.workspace.told(_TEXT).get("windows", digest) != digest:
            # A resumed run must go on with the very text it began with, whatever the file of that name holds by now.
            raise UsageError("The calibration text has changed since this run began. Start again with --overwrite.")
        tokenizer = load_tokenizer(job.source.checkpoint.path)
        begin = opening_text(tokenizer, bos_of(job.source, options))
        if begin is not None:
            job.progress.log(f"Every window begins with {begin}.")
        dtype = job.gradient_dtype if gradients else job.compute_dtype
        model = StreamedModel(
            job.source.checkpoint, job.source.architecture, dtype, job.device, experts_at_once=experts_at_once
        )
        self.model, self.experts_at_once = model, experts_at_once
        self._digest = digest
        masked = masked_windows(windows, tokenizer, options.seed) if encoder else None
        kept, tick = kept_dtype(job.source.dtype, dtype), job.progress.advance
        kinds, of_kind, ranks = drawn.kinds, drawn.of_kind, job.ranks
        self.sweep = Sweep(model, windows, job.work, tick, None, masked, kept, ranks, kinds, of_kind)
        few, seed = len(windows), None
        if isinstance(options, CalibrationOptions):
            few = min(few, options.gradient_samples)
            seed = options.seed if options.labels == "sampled" else None
        masked, of_kind, directory = None if masked is None else masked[:few], of_kind[:few], job.work / "gradients"
        self.gradient_sweep = Sweep(model, windows[:few], directory, tick, seed, masked, kept, ranks, kinds, of_kind)
        self._facts = CalibrationFacts(len(windows), windows.numel(), begin, kinds=counts.by_kind, text=str(counts))
        if gradients:
            directory.mkdir(exist_ok=True)
            self._facts = replace(self._facts, gradient_windows=few)

    def within(self, part: Job) -> "CalibratedJob":
        """A copy for a `part` of the job, with its text and model; hidden states go to the part's work directory."""
        other = copy(self)
        other.job, other.sweep = part, self.sweep.within(part.work)
        hand_on(self.job.work, part.work)
        return other

    def note_text(self) -> None:
        """Note which text this is, before the first thing is made of it."""
        if self.job.together(_TEXT):
            self.job.finish(_TEXT, told={"windows": self._digest})

    @property
    def source(self) -> Source:
        """The MoE model that the job works on; jobs on dense models have none to ask for."""
        assert isinstance(self.job.source, Source)
        return self.job.source

    def _finish(
        self, unit: str, sweep: Sweep, *spent: ActivationFile, made: Iterable[Path] = (), **told: str | float
    ) -> None:
        self.job.finish(unit, made=made, digests=sweep.digests, spent=[file.path for file in spent], told=told)

    def on_fewer_windows(self) -> "CalibratedJob":
        """A copy whose whole text is the part that gradients are taken on, or would be."""
        self.gradient_sweep.directory.mkdir(exist_ok=True)
        other = copy(self)
        other.sweep = self.gradient_sweep
        return other

    def forward_pass(
        self, visit: Visit, layers: Collection[int] | None, *, name: str = "", passes: int = 1
    ) -> "ForwardPass":
        """The whole text on its way through the model, one layer after the other; `name` tells passes of a job apart.

        `visit(index, layer)` sees each of `layers` (`None`: each MoE layer), loaded, before it is left, and runs it
        itself (`sweep.forward`, which writes the next boundary). Only two boundaries are on disk at a time. `passes` is
        how many times a visit goes over the text, for the progress bar.
        """
        visited = set(self.source.experts.moe_layers if layers is None else layers)
        return ForwardPass(self, visit, visited, f"{name}/" if name else "", passes)

    def forward_visiting(
        self, visit: Visit, layers: Collection[int] | None = None, *, name: str = "", passes: int = 1
    ) -> None:
        """Take the whole text through all layers at once and visit each; see `forward_pass`."""
        passing = self.forward_pass(visit, layers, name=name, passes=passes)
        with phase(self.job.progress, "Forward", passing.steps, BATCHES):
            passing.through(self.model.layer_count - 1)

    def measured(
        self, what: str, measure: MeasureLayer, layers: Collection[int] | None = None
    ) -> dict[int, dict[str, Tensor]]:
        """Take the whole text through all layers at once, and return by layer what `measure(index, layer)` gives of
        each that it visits, as `visit` of `forward_pass` does; the first process keeps it in the work directory."""
        visited = self.source.experts.moe_layers if layers is None else layers
        files = {layer: self.job.work / f"{what}-{layer:05d}.safetensors" for layer in visited}

        def visit(index: int, layer: nn.Module) -> None:
            found = measure(index, layer)
            if self.job.ranks.is_first:
                save_tensors(files[index], found)

        self.forward_visiting(visit, layers)
        self.job.meet()
        return {layer: load_file(file) for layer, file in files.items()}

    def reverse(
        self,
        visit: Visit,
        passes: int,
        layers: Collection[int] | None = None,
        head: Callable[[], float] | None = None,
    ) -> None:
        """Take the text that gradients are taken on forward to the loss and back to the first of `layers`.

        On the way back `visit(index, layer)` sees each of `layers` (by default each MoE layer), loaded, and runs it
        backwards itself (`gradient_sweep.backward`). `passes` is how many times it goes over the text, for the progress
        bar. `head` stands in for `gradient_sweep.head`, which it calls, to see what comes and goes there. The codes of
        what the job includes beside its experts are chosen on the way.
        """
        job, sweep = self.job, self.gradient_sweep
        visited = set(self.source.experts.moe_layers if layers is None else layers)
        codes = IncludedCodes(job, sweep) if isinstance(job.source, Source) and job.source.included else None
        count, lowest = self.model.layer_count, 0 if codes and codes.sees_embeddings else min(visited)
        between = stretch(count)
        last = (count - 1) // between * between  # from here on all are still there when the way back begins
        self.note_text()
        with phase(job.progress, "Forward", (count + 1) * sweep.batch_count, BATCHES):
            if job.together("gradients/embed", sweep.batch_count):
                sweep.embed()
                self._finish("gradients/embed", sweep)
            for index in range(count):
                spent = [sweep.hidden(index)] if index % between and index < last else []
                self._run_forward(f"gradients/forward/{index}", index, *spent, codes=codes)
        again = {index - 1 for index in range(lowest - lowest % between, last) if index % between}
        with phase(job.progress, "Backward", (1 + len(again) + passes * (count - lowest)) * sweep.batch_count, BATCHES):
            if job.together("head", sweep.batch_count):
                head = head or (sweep.head if codes is None else codes.head)
                self._finish("head", sweep, sweep.hidden(count), loss=head())
            for index in range(count - 1, lowest - 1, -1):
                if not job.together(f"reverse/{index}", passes * sweep.batch_count):
                    continue
                for below in range(index - index % between, index if index < last else 0):
                    if below in again:  # the others of its stretch find it made again
                        again.remove(below)
                        self._run_forward(f"gradients/again/{below}", below)
                with self.model.layer(index) as layer:
                    if index in visited:
                        visit(index, layer)
                    else:
                        sweep.backward(index, layer)
                self._finish(f"reverse/{index}", sweep, sweep.gradient(index + 1), sweep.hidden(index))
            job.progress.skip(len(again) * sweep.batch_count)  # an earlier run went back through their stretches
            if codes and codes.sees_embeddings and job.together("gradients/tables"):
                self._finish("gradients/tables", sweep, made=codes.tables())
        job.meet()

    def measure_outputs(self) -> None:
        """Measure how errors at the output of each layer's experts count together, into `metric_path` of the work
        directory."""
        device, ranks = self.job.device, self.job.ranks

        def visit(index: int, layer: nn.Module) -> None:
            outputs = OutputGradients(self.gradient_sweep, device)
            self.gradient_sweep.backward(index, layer, [outputs])
            if ranks.is_first:
                outputs.save(metric_path(self.job.work, index))

        self.reverse(visit, 1)

    def _run_forward(self, unit: str, index: int, *spent: ActivationFile, codes: IncludedCodes | None = None) -> None:
        """Run one layer on the text that gradients are taken on, if that is not done, and choose `codes` of it."""
        if self.job.together(unit, self.gradient_sweep.batch_count):
            made: list[Path] = []
            with self.model.layer(index) as layer:
                if codes is None:
                    self.gradient_sweep.forward(index, layer)
                else:
                    made = codes.forward(index, layer)
            self._finish(unit, self.gradient_sweep, *spent, made=made)

    @property
    def facts(self) -> CalibrationFacts:
        """Which text it is, and, once gradients went through the head, its mean next-token loss."""
        loss = self.job.workspace.told("head").get("loss")
        return replace(self._facts, loss=loss) if isinstance(loss, float) else self._facts

    def experts(self, layer: nn.Module) -> nn.Module:
        """The module of a loaded decoder layer that holds its fused experts."""
        return layer.get_submodule(self.source.architecture.experts_module)

    def weights(self, index: int, layer: nn.Module) -> Weights:
        """The matrices of a loaded layer's experts, each as exactly as it is stored: those of the layer itself, unless
        it holds none, or they were rounded when they were loaded. Then, and of a shared expert, they are read again."""
        reader, experts = self.source.experts, self.experts(layer)
        shape, read = reader.shape, partial(reader.dense, index)
        stored = reader.dtype if reader.layout(index).is_native else torch.float32
        if len(self.model.working_sets) > 1 or torch.promote_types(stored, self.model.dtype) != self.model.dtype:
            return read
        return lambda expert, role: (
            fused_matrix(shape, experts, expert, role) if expert < shape.experts else read(expert, role)
        )


class ForwardPass:
    """One pass over the calibration text, which goes as far through the layers as it is asked to.

    Attributes:
        steps: batches in all layers, for a progress bar.
    """

    def __init__(
        self, calibrated: CalibratedJob, visit: Visit, visited: Collection[int], name: str, passes: int
    ) -> None:
        self._calibrated, self._visit, self._visited, self._name = calibrated, visit, visited, name
        self._passes = passes
        self._next = -1  # the embeddings
        self.steps = sum(map(self._steps, range(-1, calibrated.model.layer_count)))

    def through(self, last: int) -> None:
        """Run the text through all layers up to `last`, each of which is visited and then left."""
        for index in range(self._next, last + 1):
            self._step(index)
        self._next = max(self._next, last + 1)

    def _steps(self, index: int) -> int:
        return (self._passes if index in self._visited else 1) * self._calibrated.sweep.batch_count

    def _step(self, index: int) -> None:
        job, sweep, finish = self._calibrated.job, self._calibrated.sweep, self._calibrated._finish
        unit = f"{self._name}embed" if index < 0 else f"{self._name}forward/{index}"
        if index < 0:
            self._calibrated.note_text()
        if not job.together(unit, self._steps(index)):
            return
        if index < 0:
            sweep.embed()
            return finish(unit, sweep)
        with self._calibrated.model.layer(index) as layer:
            if index in self._visited:
                self._visit(index, layer)
            else:
                sweep.forward(index, layer)
        finish(unit, sweep, sweep.hidden(index))
