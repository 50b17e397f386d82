"""One job: an input that was checked, an output that is being made, and what is needed on the way."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Generic, Protocol, Self

import torch
from torch import Tensor
from typing_extensions import TypeVar

from moetool.architectures import Architecture
from moetool.architectures.dense import DenseArchitecture
from moetool.calibration.peers import owners
from moetool.checkpoint.decoded import decoded
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.format.entry import check_unquantized
from moetool.format.families import architecture_of, dense_architecture_of
from moetool.job.blueprint import check_against_config, check_promised
from moetool.job.books import Books, Outcome, PartBooks
from moetool.job.interrupt import Interrupt
from moetool.job.options import RunOptions
from moetool.job.progress import SILENT, Progress
from moetool.job.ranks import Ranks
from moetool.job.result import LoadedLayer
from moetool.representations.quantized import QuantizedMatrix
from moetool.runtime.dense import DenseModel
from moetool.runtime.memory import return_heap


class Input(Protocol):
    """Protocol of the input of a stage: a checkpoint, and the dtype of its weights."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The opened checkpoint, whose headers are read and whose tensors are read lazily."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most weights of the model are stored in."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Open a checkpoint and check it by its headers. Raises `InvalidInputError`."""


@dataclass(frozen=True)
class Source:
    """An MoE model.

    Attributes:
        checkpoint: its files.
        architecture: where its parts lie.
        experts: reader of its experts.
        included: what is to be quantized beside its experts, by module.
        keeps_stored: whether what passes through stays in the bits of another tool's format that it is stored in.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    experts: ExpertReader
    included: Mapping[str, QuantizedMatrix] = field(default_factory=dict)
    keeps_stored: bool = False

    @classmethod
    def open(cls, path: str | Path) -> "Source":
        """Open and check an MoE model by its headers. Raises `InvalidInputError`."""
        return cls.of(Checkpoint.open(path))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        reader = ExpertReader(checkpoint, architecture_of(checkpoint.config))
        return cls(checkpoint, reader.architecture, reader)

    @property
    def dtype(self) -> torch.dtype:
        return self.experts.dtype

    @property
    def bytes_beside_experts(self) -> int:
        """Bytes of weight files, headers included, that are no experts' as a job passes them on: of what is in another
        tool's format those that it is stored in if it `keeps_stored`, else those in the model's dtype."""
        checkpoint, experts = self.checkpoint, self.experts.names
        kept = checkpoint.forms.keys() - experts if self.keeps_stored else ()
        return checkpoint.weight_bytes + checkpoint.growth(kept) - sum(checkpoint.info(name).nbytes for name in experts)


@dataclass(frozen=True)
class DecodedSource(Source):
    """An MoE model that shows matrices where it is quantized beside its experts."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        return super().of(decoded(checkpoint))


@dataclass(frozen=True)
class DenseSource:
    """Input of a stage that converts a dense model."""

    checkpoint: Checkpoint
    dense: DenseModel

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "DenseSource":
        dense = DenseModel(checkpoint)
        if not checkpoint.is_imagined:
            check_against_config(dense.checkpoint)
        return cls(dense.checkpoint, dense)

    @classmethod
    def if_known(cls, checkpoint: Checkpoint) -> "DenseSource | None":
        """The dense model, or the one within a model that sees or hears; `None` for a family or format that moetool
        does not convert. Raises `InvalidInputError` where files and config are not of one whole model."""
        config = checkpoint.config
        try:
            dense_architecture_of(config, may_lie_within=True)
            check_unquantized(config)
        except InvalidInputError:
            return None
        dense = DenseModel(checkpoint, may_lie_within=True)
        if not checkpoint.is_imagined and "text_config" not in config:
            check_promised(dense.checkpoint)
        return cls(dense.checkpoint, dense)

    @property
    def architecture(self) -> DenseArchitecture:
        return self.dense.architecture

    @property
    def dtype(self) -> torch.dtype:
        return self.dense.dtype


SourceT = TypeVar("SourceT", bound=Input, default=Source)


@dataclass
class Job(Generic[SourceT]):
    """One run of a stage: its input, its workspace, and what it does between units."""

    source: SourceT
    workspace: Books
    options: RunOptions
    recipe: Mapping[str, object]  # the options that decide the result, for the manifest
    progress: Progress = SILENT
    interrupt: Interrupt = field(default_factory=Interrupt)
    ranks: Ranks = field(default_factory=Ranks)
    named: str | None = None  # what the manifest calls the input, if not as it was opened
    loaded: LoadedLayer | None = None  # of the result, by transformers, when it has been written
    _is_sharing: bool = False
    _together: set[str] = field(default_factory=set)  # units that all processes are at

    @property
    def output(self) -> Path:
        """Path of the directory in which the result is written."""
        return self.workspace.output

    @property
    def work(self) -> Path:
        """Path of the work directory, which holds unfinished files and is deleted at the end."""
        return self.workspace.work

    def part(self, name: str) -> "Job[SourceT]":
        """A part of this job that writes a model of its own, without a proof, into `NAME` in the work directory; its
        units are kept in the journal of the whole."""
        options = self.options.model_copy(update={"proof": False})
        return replace(self, workspace=PartBooks(self.workspace, name), options=options, loaded=None, _together=set())

    def unit(self, name: str, steps: int = 0) -> bool:
        """Whether a unit is still to be done, by this process: of several by the first, unless they `share` it or do it
        `together`. Between units, a requested stop is obeyed. The `steps` of the phase that one has which is done
        already are left out of it."""
        if self.workspace.is_done(name):
            self.progress.skip(steps)
            return False
        if self._is_sharing:
            return True
        self.interrupt.check()
        return self.ranks.is_first

    def together(self, name: str, steps: int = 0) -> bool:
        """Whether a unit that all processes share is to be done. All come here, and to `finish` where it is due."""
        stops = self.ranks.is_stopping(self.interrupt.requested)
        is_done, stops = self.ranks.broadcast((self.workspace.is_done(name), stops))
        if is_done:
            self.progress.skip(steps)
            return False
        if stops:
            self.interrupt.stop()
        self._together.add(name)
        return True

    def share(
        self,
        kind: str,
        costs: Mapping[int, float],
        steps: Mapping[int, int] = MappingProxyType({}),
        *,
        together: bool = False,
    ) -> Iterator[int]:
        """The items whose units `KIND/ITEM` this process is to do, one after the other.

        Each process writes the files of its own, and says so by `finish(…, made=…)` with all their paths, of a unit or
        of others on the way to it; the first journals them as they come. After the last, all units are done and known
        to all processes. Every process has to come here, and to go through to the end. When one is asked to stop, all
        finish the unit in hand.

        Args:
            kind: the first part of the units' names.
            costs: by item, what it takes, in any measure: a unit is given to whom has least to do.
            together: give all units to all processes, who do others `together` on the way; the first finishes them.
            steps: by item, those of the phase that are left out of it where another process or an earlier run did it.
        """
        self.meet()
        items = {f"{kind}/{item}": item for item in costs}
        due = {unit: item for unit, item in items.items() if not self.workspace.is_done(unit)}
        for unit in items.keys() - due.keys():
            self.progress.skip(steps.get(items[unit], 0))

        def note() -> None:
            for posted in self.ranks.posted():
                made = Outcome(*posted)
                self.workspace.note(made)
                if made.unit in items:
                    self.progress.skip(steps.get(items[made.unit], 0))

        self._is_sharing = self.ranks.size > 1 and not together
        shares = owners([costs[item] for item in due.values()], self.ranks.size)
        for owner, item in zip(shares, due.values(), strict=True):
            if together:
                if not self.ranks.broadcast(self.ranks.is_stopping(self.interrupt.requested)):
                    yield item
            elif owner == self.ranks.rank and not self.ranks.is_stopping(self.interrupt.requested):
                yield item
                note()
        self.ranks.barrier(note)
        note()
        self._is_sharing = False
        self.meet()
        if self.ranks.is_stopping(self.interrupt.requested):
            self.interrupt.stop()

    def meet(self) -> None:
        """Wait for all processes of this job; what has been done by then, all know."""
        self.workspace.catch_up(self.ranks)

    def finish(
        self,
        name: str,
        *,
        made: Iterable[Path] = (),
        digests: Mapping[Path, str] | None = None,
        spent: Iterable[Path] = (),
        told: Mapping[str, object] | None = None,
    ) -> None:
        """A unit's files are in place; see `Books.done`. Of a unit that was done `together` all say so."""
        if name in self._together:
            self._together.remove(name)
            self.ranks.barrier()
            if not self.ranks.is_first:
                return return_heap()
        self.workspace.done(name, made=made, digests=digests, spent=spent, told=told, alone=not self._is_sharing)
        return_heap()

    @property
    def device(self) -> torch.device:
        """The torch device that `--device` picks."""
        return pick_device(self.options.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the model runs forwards, by `--compute-dtype` and the device."""
        return pick_compute_dtype(self.options.compute_dtype, self.device, self.source.dtype)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which the model runs when gradients are taken, by `--compute-dtype` and the device."""
        return pick_compute_dtype(self.options.compute_dtype, self.device, self.source.dtype, gradients=True)


def joined_names(source: Source) -> set[str]:
    """Native names that a checkpoint lacks because its shared experts are stored on the base of the routed ones."""
    reader = source.experts
    layers = [layer for layer in reader.moe_layers if reader.layout(layer).is_extended]
    return {name for layer in layers for name in source.architecture.shared_expert_names(layer).values()}


def refuse_shared_expert(source: Source, stage: str) -> None:
    """Raise `InvalidInputError` for a checkpoint whose shared experts are on the base, where a stage cannot do that."""
    if joined_names(source):
        raise InvalidInputError(
            f"{source.checkpoint.source} has its shared experts stored on the base; {stage} works on routed ones only. "
            "Decompose without --shared-expert, or use quantize-delta or sparsify-delta."
        )


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA when there is a card. Raises `UsageError` for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise UsageError(f"Device '{name}' cannot be used here: {reason}.") from error
    if device.type == "meta":
        raise UsageError("Device 'meta' holds no numbers: nothing can be computed there.")
    return device


def pick_compute_dtype(name: str, device: torch.device, stored: torch.dtype, *, gradients: bool = False) -> torch.dtype:
    """`auto` is fp32 on a CPU, so that a result does not depend on whether the processor multiplies in bf16, and the
    checkpoint's own dtype on a card.

    Where gradients are taken it is not fp16, whose range they leave on either side: bf16, or fp32 on a card without.
    fp16 that is asked for is used; what then keeps gradients in its range is `Sweep.loss_scale`.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    if gradients and stored == torch.float16:
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return stored


def has_bfloat16(device: torch.device) -> bool:
    """Whether a card has bf16 units (compute capability 8.0 or higher)."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def to_cpu(tensor: Tensor) -> Tensor:
    """Detach a tensor and return it contiguous on the CPU, without a copy if it is so already."""
    return tensor.detach().to("cpu").contiguous()
