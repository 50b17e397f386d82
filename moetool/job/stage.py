"""Base class of stages: options, a plan from headers alone, and the work."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from moetool.calibration.data import parse_data
from moetool.calibration.mixing import TextCounts
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import local_path
from moetool.errors import VerificationError
from moetool.job.including import including, keeping
from moetool.job.job import Input, Job, Source, SourceT, joined_names
from moetool.job.options import RunOptions, TextOptions, fit_context, with_ratio, with_text
from moetool.job.plan import Plan
from moetool.job.result import Details, Sizes
from moetool.job.writing import original_bytes

StageOptionsT = TypeVar("StageOptionsT", bound=RunOptions)

# What a stage does to the matrices of experts: leaves them as they are, stores them in other forms, drops numbers at
# random and scales up the rest, adds the deltas it was given to another base, or trains them.
Effect: TypeAlias = Literal["preserves", "encodes", "rescales", "rebases", "trains"]

# Options that say where and how a job runs; the result does not depend on them.
_INCIDENTAL = {"device", "memory", "disk", "proof"}


class Stage(ABC, Generic[StageOptionsT, SourceT]):
    """One step from a checkpoint to a checkpoint; a file that defines a subclass adds one.

    Attributes:
        name, summary: for the command line and the manifest.
        options_type: its options.
        source_type: what it works on: an MoE model, unless it says otherwise.
        writes_model: whether its output is a model.
        is_parallel: whether several processes, as `torchrun` or `accelerate launch` start them, share the work.
        has_trainer: whether they do so by transformers' Trainer, which connects them itself.
        method_of: the command that offers it as one of its methods, if it is not a command of its own.
        bfloat16_option: what a user types to have it compute in bfloat16.
        continues: whether its input is always the output of another stage, so that without a manifest nobody knows what
            that was made from.
        effect: what it does to the matrices of experts, by which `verify --against` judges their errors.
        next_command: command that most users run after it, if that does not depend on the machine, with `{input}`,
            `{output}` and, for a free path beside the output, `{new}-SUFFIX`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options_type: ClassVar[type[RunOptions]]
    writes_model: ClassVar[bool] = True
    source_type: ClassVar[type[Input]] = Source
    method_of: ClassVar[str | None] = None
    is_parallel: ClassVar[bool] = False
    has_trainer: ClassVar[bool] = False
    bfloat16_option: ClassVar[str] = "--compute-dtype bfloat16"
    continues: ClassVar[bool] = False
    effect: ClassVar[Effect] = "encodes"
    next_command: ClassVar[str | None] = None

    def __init__(self, source: SourceT, options: StageOptionsT) -> None:
        source = keeping(source, options)
        if isinstance(source, Source):
            options = with_ratio(options, original_bytes(source))
            if getattr(options, "include", ()) is None:
                options = options.model_copy(update={"include": self.include_by_default(source, options)})
        self.source = including(source, options)
        self.options = fit_context(options, source.checkpoint.settings)
        self.options = with_text(self.options, needed=self.needs_text, compresses=self.method_of == "compress")

    def include_by_default(self, source: Source, options: StageOptionsT) -> tuple[str, ...]:
        """Kinds of matrices to quantize beside the experts where `--include` is left to the stage."""
        return ()

    @classmethod
    def opened(cls, checkpoint: Checkpoint) -> SourceT:
        """Check a checkpoint as the stage's input. Raises `InvalidInputError` for one that it does not take."""
        found: SourceT = cls.source_type.of(checkpoint)  # type: ignore[assignment]
        return found

    @property
    def needs_text(self) -> bool:
        """Whether the stage cannot do without a calibration text: then it takes the bundled one where none is given."""
        return False

    @property
    def due_windows(self) -> TextCounts | None:
        """Number of windows of each text that the stage measures on; `None` if it measures on none."""
        sources = self.options.sources if isinstance(self.options, TextOptions) else None
        return None if sources is None else sources.counts

    @property
    def gguf_bytes(self) -> int | None:
        """Bytes of the GGUF file that the input was read from, where sizes are counted from what it is read as."""
        return self.source.checkpoint.gguf_bytes

    @property
    def share_in_numbers(self) -> float:
        """The largest share of the bytes of the output's experts that are numbers of floating point, not codes or
        positions: those that `repair` can train."""
        return 1.0

    @abstractmethod
    def plan(self) -> Plan:
        """Plan the job from headers and config. Raises for options that this input cannot satisfy."""

    @abstractmethod
    def run(self, job: Job[SourceT]) -> Details:
        """Do the work. Returns what is worth telling beyond sizes and time."""

    def shared_recipe(self) -> Mapping[str, object] | None:
        """The options that decide what is measured before a budget is spent: jobs on the same input in which they are
        equal can share that (`measure`). `None` where there is nothing to share."""
        return None

    def measure(self, job: Job[SourceT], beside: Sequence["AnyStage"]) -> None:
        """Do what `run` begins with, up to where the budget is spent, for this stage and those `beside` it, which have
        the same `shared_recipe`."""
        raise NotImplementedError(f"{self.name} shares nothing")

    def verify(self, output: Path) -> Sizes:
        """Open what was written as a reader would, and compare sizes. Raises if something is wrong."""
        before = self.source
        assert isinstance(before, Source), "stages of other inputs verify their output themselves"
        after = Source.open(output)
        lost = set(before.checkpoint.tensors) - set(after.checkpoint.tensors)
        refuse_lost(lost - before.experts.names - joined_names(after))
        return self.sizes(before, after.checkpoint.weight_bytes)

    @staticmethod
    def sizes(before: Input, written: int) -> Sizes:
        """Bytes of the input's weight files, and of those of the model before anything was done to it, beside what
        was `written`."""
        original, given = original_bytes(before), before.checkpoint.weight_bytes
        return Sizes(original, written, round(1 - written / original, 6), None if given == original else given)

    def inputs(self) -> Mapping[str, Checkpoint]:
        """Every checkpoint that the stage reads, by the name of its part: `input`, `base` and others."""
        return {"input": self.source.checkpoint}

    def sources(self) -> Mapping[str, str]:
        """Fingerprints of all checkpoints that the stage reads, by the name of their part."""
        return {name: checkpoint.fingerprint() for name, checkpoint in self.inputs().items()}

    def texts(self) -> list[str]:
        """The DATA arguments of all texts that the job reads, as typed."""
        text = getattr(self.options, "calibration", None)
        return [text] if text else []

    def files(self) -> list[Path]:
        """Files and folders beside checkpoints whose content decides the result: texts on this machine."""
        return found_here(spec.source for text in self.texts() for spec in parse_data(text))

    def reads(self) -> list[Path]:
        """Files and directories that the job reads beside its input, and that an output must not overwrite."""
        return self.files()

    def in_bfloat16(self) -> RunOptions | None:
        """Options of the same job with bfloat16 where these leave the choice; `None` where they leave none."""
        if self.options.compute_dtype != "auto":
            return None
        return self.options.model_copy(update={"compute_dtype": "bfloat16"})

    def recipe(self) -> dict[str, object]:
        """The options that decide the result as JSON values, for fingerprint and manifest; device and the like are left
        out."""
        return {"stage": self.name, **self.options.model_dump(mode="json", exclude=_INCIDENTAL)}


# Of any options and source, which a kind of stage alone brings together.
AnyStage: TypeAlias = Stage[Any, Any]


def refuse_lost(names: Collection[str]) -> None:
    """Raise `VerificationError` if there are names of the input's tensors that the output lacks."""
    if names:
        raise VerificationError(f"The output lacks {len(names)} tensors of the input, the first {min(names)}.")


def found_here(names: Iterable[str]) -> list[Path]:
    """Local paths of those named sources that exist on this machine; hub ids are left out."""
    return [path for name in names if (path := local_path(name)).exists()]
