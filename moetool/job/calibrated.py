"""Forward and reverse sweeps of a job over its calibration text, journaled layer by layer."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from moetool.architectures.base import whole_number
from moetool.architectures.dense import is_encoder
from moetool.calibration.activations import ActivationFile
from moetool.calibration.masking import masked_windows
from moetool.calibration.opening import Bos, opening_text
from moetool.calibration.sweep import Sweep
from moetool.calibration.windows import check_vocabulary, load_tokenizer, sample_windows
from moetool.checkpoint.experts import Weights
from moetool.errors import UsageError
from moetool.job.job import DenseSource, Input, Job, Source
from moetool.job.options import CalibrationOptions, TextOptions
from moetool.job.progress import phase
from moetool.job.result import CalibrationFacts
from moetool.runtime.modules.fused import fused_matrix

Visit = Callable[[int, nn.Module], None]


def calibration_windows(source: Input, options: TextOptions) -> Tensor:
    """The calibration set `[samples, sequence_length]` of token ids.

    Raises:
        UsageError: no text given.
        InvalidInputError: text or tokenizer cannot be used.
    """
    if options.calibration is None:
        raise UsageError("Give a calibration text: --calibration FILE.")
    tokenizer = load_tokenizer(source.checkpoint.path)
    windows = sample_windows(
        options.calibration,
        tokenizer,
        samples=options.samples,
        sequence_length=options.sequence_length,
        seed=options.seed,
        bos=_bos(source, options),
    )
    check_vocabulary(windows, whole_number(source.checkpoint.config, "vocab_size"))
    return windows


def _bos(source: Input, options: TextOptions) -> Bos:
    return "never" if is_encoder(source.checkpoint.config) else options.bos


class CalibratedJob:
    """A job together with the model and the text it is calibrated on."""

    def __init__(
        self,
        job: Job[Source] | Job[DenseSource],
        options: TextOptions,
        *,
        encoder: bool = False,
        gradients: bool = False,
    ) -> None:
        """An `encoder` is to find what masks hide; with `gradients` there will be a reverse sweep."""
        from moetool.calibration.streaming import StreamedModel  # transformers: seconds, and not for --help

        self.job = job
        windows = calibration_windows(job.source, options)
        if len(windows) < options.samples:
            job.progress.log(
                f"The calibration text has only {len(windows)} windows of {options.sequence_length} tokens, "
                f"not {options.samples}: using them all."
            )
        self._windows = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
        if job.workspace.told("embed").get("windows", self._windows) != self._windows:
            # A resumed run must go on with the very text it began with, whatever the file of that name holds by now.
            raise UsageError("The calibration text has changed since this run began. Start again with --overwrite.")
        tokenizer = load_tokenizer(job.source.checkpoint.path)
        begin = opening_text(tokenizer, _bos(job.source, options))
        if begin is not None:
            job.progress.log(f"Every window begins with {begin}.")
        self.facts = CalibrationFacts(len(windows), windows.numel(), begin)
        self._takes_gradients = gradients
        dtype = job.gradient_dtype if gradients else job.compute_dtype
        model = StreamedModel(job.source.checkpoint, job.source.architecture, dtype, job.device)
        self.model = model
        sampled = isinstance(options, CalibrationOptions) and options.labels == "sampled"
        seed = options.seed if sampled else None
        masked = masked_windows(windows, tokenizer, options.seed) if encoder else None
        self.sweep = Sweep(model, windows, job.work, job.progress.advance, seed, masked)

    @property
    def source(self) -> Source:
        """The MoE model that the job works on; jobs on dense models have none to ask for."""
        assert isinstance(self.job.source, Source)
        return self.job.source

    @property
    def _layers(self) -> int:
        return self.model.layer_count

    def _embed(self) -> None:
        if self.job.unit("embed"):
            self.sweep.embed()
            self._finish("embed", windows=self._windows)

    def _finish(self, unit: str, *spent: ActivationFile, **told: str | float) -> None:
        self.job.finish(unit, digests=self.sweep.digests, spent=[file.path for file in spent], told=told)

    def forward(self) -> None:
        """Hidden states at every layer boundary, all kept for the way back."""
        job, sweep = self.job, self.sweep
        with phase(job.progress, "Forward", (self._layers + 1) * sweep.batch_count):
            self._embed()
            for index in range(self._layers):
                if job.unit(f"forward/{index}"):
                    with self.model.layer(index) as layer:
                        sweep.forward(index, layer)
                    self._finish(f"forward/{index}")

    def forward_visiting(self, visit: Visit, layers: Collection[int] | None = None) -> None:
        """One forward sweep in which `visit(index, layer)` sees each loaded layer of `layers` before it is left (by
        default each MoE layer).

        The visitor runs the layer itself (`sweep.forward`, writing the next boundary). Only two boundaries are on disk
        at a time.
        """
        job, sweep = self.job, self.sweep
        with phase(job.progress, "Forward", (self._layers + 1) * sweep.batch_count):
            self._embed()
            for index in range(self._layers):
                if not job.unit(f"forward/{index}"):
                    continue
                with self.model.layer(index) as layer:
                    if index in (self.source.experts.moe_layers if layers is None else layers):
                        visit(index, layer)
                    else:
                        sweep.forward(index, layer)
                self._finish(f"forward/{index}", sweep.hidden(index))

    def reverse(self, visit: Visit, passes: int, layers: Collection[int] | None = None) -> None:
        """From the loss back to the first of `layers`; `visit(index, layer)` sees each of them on the way, loaded (by
        default the MoE layers).

        The visitor runs the layer backwards itself (`sweep.backward`). `passes` is how many times it goes over the
        calibration set, for the progress bar.
        """
        assert self._takes_gradients, "the compute dtype was chosen without"
        job, sweep = self.job, self.sweep
        visited = set(self.source.experts.moe_layers if layers is None else layers)
        lowest = min(visited)
        with phase(job.progress, "Backward", (1 + passes * (self._layers - lowest)) * sweep.batch_count):
            if job.unit("head"):
                self._finish("head", loss=sweep.head())
            for index in range(self._layers - 1, lowest - 1, -1):
                if not job.unit(f"reverse/{index}"):
                    continue
                with self.model.layer(index) as layer:
                    if index in visited:
                        visit(index, layer)
                    else:
                        sweep.backward(index, layer)
                self._finish(f"reverse/{index}", sweep.gradient(index + 1), sweep.hidden(index + 1))

    @property
    def facts_with_loss(self) -> CalibrationFacts:
        """The same with the mean next-token loss, which is known after the head."""
        loss = self.job.workspace.told("head")["loss"]
        assert isinstance(loss, float)
        return replace(self.facts, loss=loss)

    def experts(self, layer: nn.Module) -> nn.Module:
        """The fused experts of a loaded layer."""
        return layer.get_submodule(self.source.architecture.experts_module)

    def weights(self, index: int, layer: nn.Module) -> Weights:
        """The matrices of a loaded layer's experts, each as exactly as it is stored: those of the layer itself, unless
        they were rounded when they were loaded. Then, and of a shared expert, they are read again."""
        reader, experts = self.source.experts, self.experts(layer)
        shape, read = reader.shape, partial(reader.dense, index)
        stored = reader.dtype if reader.layout(index).is_native else torch.float32
        if torch.promote_types(stored, self.model.dtype) != self.model.dtype:
            return read
        return lambda expert, role: (
            fused_matrix(shape, experts, expert, role) if expert < shape.experts else read(expert, role)
        )

    def tokens_routed(self) -> int:
        """Expert inputs per layer over the whole calibration set."""
        return int(self.sweep.windows.numel()) * self.source.experts.shape.top_k
