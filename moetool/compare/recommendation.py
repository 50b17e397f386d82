"""Advice on what to type so that an MoE model fits into a memory, from its config or its file headers alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field

from moetool.calibration.data import BUNDLED
from moetool.checkpoint.counting import parameter_counts
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import ByteSize, format_bytes
from moetool.checkpoint.source import model_name
from moetool.errors import MoetoolError, UsageError, option_of
from moetool.job.blueprint import open_for_planning
from moetool.job.estimate import estimate
from moetool.job.forecast import format_seconds
from moetool.job.job import Source
from moetool.job.options import Options, RunOptions
from moetool.job.plan import Plan
from moetool.job.planning import plan_stage
from moetool.job.result import Printed
from moetool.job.writing import original_bytes
from moetool.stages import stages

HELD_OUT = "held-out.txt"  # a text of the user's own: the bundled one calibrates
Engine = Literal["transformers", "vllm", "llama.cpp"]

_LEAST_WORKING = 1_000_000_000  # bytes: Python, libraries and what one layer computes
_WORKING = 0.1  # share of the memory beside the weights: cache of keys and values, activations
_LONG = 24 * 3600.0  # seconds from which on a quicker way is told
_BEST = 0.8  # share saved from which on `--effort best` is worth its time
# Share saved and KL divergence in thousandths of a nat, the least and the most over texts, of `auto` (with `--effort
# best` at 85 %) on a Mixtral of 20.7 M parameters, in scripts/benchmarks/results: included.md, below 75 %
# other_text.md, 85 % rows_in_turn.md.
_MEASURED = ((0.4, 0.01, 0.01), (0.6, 0.10, 0.10), (0.75, 0.19, 0.41), (0.8, 0.40, 0.90), (0.85, 0.98, 2.26))
# The same of GGUF files in types that were chosen: scripts/benchmarks/results/doors.md.
_MEASURED_GGUF = ((0.68, 0.79, 0.93), (0.74, 1.04, 1.81), (0.79, 2.10, 4.24))


class RecommendOptions(Options):
    """Options of `recommend`: the memory that there is, and the program that is to run the model."""

    memory: ByteSize | None = Field(
        None, description="Memory that it has to run in, e.g. 16GB [default: this machine's]."
    )
    engine: Engine = Field("transformers", description="What is to run it.")


@dataclass(frozen=True, kw_only=True)
class Recommendation(Printed):
    """Recommended command that makes a model fit into a given memory.

    Attributes:
        model: as it was given.
        model_type: of its config.
        parameters: numbers that it stands for, and those of them that one token uses.
        bytes: of its weight files as they are.
        gguf_bytes: of the GGUF file that it is read from, if it is; `bytes` are then of what it is read as.
        memory: bytes that there are.
        weights: of these, bytes that are left for weights.
        engine: that is to run it.
        ratio: share of the original's bytes that is to be saved; `None` where it fits as it is.
        bits: those of `weights` for each of all `parameters`, experts or not; `None` where it fits.
        commands: what to type, in order.
        in_llama_cpp: what to type instead for llama.cpp, if that is not the engine and runs such a model.
        seconds: of the first command on this machine, as `--dry-run` estimates them; `None` where that is unknown.
        peak_memory_bytes: of the first command; `None` where it fits.
        notes: what to do where the first command needs more than `memory`, and what is known of the loss.
    """

    model: str
    model_type: str
    parameters: int
    active_parameters: int
    bytes: int
    memory: int
    weights: int
    engine: Engine
    ratio: float | None = None
    bits: float | None = None
    commands: Sequence[Sequence[str]] = ()
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    notes: Sequence[str] = ()
    in_llama_cpp: Sequence[str] = ()
    gguf_bytes: int | None = None


def recommend(model: str | Path, memory: int, engine: Engine) -> Recommendation:
    """Say how to make an MoE model fit into `memory` bytes and run in an engine.

    Nothing is written; of a model on the hub, config and file headers are read.

    Raises:
        UsageError: it cannot be made so small.
        InvalidInputError: it is no MoE model that moetool handles.
    """
    source = Source.of(open_for_planning(model))
    counts, working = parameter_counts(source.experts), max(_LEAST_WORKING, round(_WORKING * memory))
    room = memory - working
    if room <= 0:
        raise UsageError(
            f"--memory {format_bytes(memory)} leaves nothing for weights: {format_bytes(working)} are kept for "
            "libraries, activations and the cache of keys and values. Give more."
        )
    found = Recommendation(
        model=str(model),
        model_type=str(source.checkpoint.config.get("model_type")),
        parameters=counts["total"],
        active_parameters=counts["active"],
        bytes=source.checkpoint.weight_bytes,
        gguf_bytes=source.checkpoint.gguf_bytes,
        memory=memory,
        weights=room,
        engine=engine,
    )
    if found.bytes <= room:
        return found
    found = replace(found, ratio=1 - room / original_bytes(source), bits=8 * room / counts["total"])
    if engine == "llama.cpp":
        return _exported(found, source.checkpoint)
    return _compressed(found, source.checkpoint)


@dataclass(frozen=True)
class _Job:
    """A job that `recommend` may advise: its plan, and the options to type for it.

    Attributes:
        stage: name of the stage that does it.
        checkpoint: the model, maybe known by its config alone.
        typed: values of options by their fields, as they are typed.
    """

    stage: str
    checkpoint: Checkpoint
    typed: Mapping[str, str]

    @property
    def words(self) -> tuple[str, ...]:
        """Its options and their values, as they are typed."""
        return tuple(word for name, value in self.typed.items() for word in (option_of(name), value))

    @cached_property
    def options(self) -> RunOptions:
        return stages()[self.stage].options_type.model_validate({"calibration": BUNDLED, **self.typed})

    @cached_property
    def plan(self) -> Plan:
        return plan_stage(stages()[self.stage], self.checkpoint, self.options)

    @property
    def seconds(self) -> float | None:
        return estimate(self.plan, self.options, Path()).seconds

    def typing(self, more: Mapping[str, str]) -> "_Job":
        """The job with `more` options typed."""
        return replace(self, typed={**self.typed, **more})


def _exported(found: Recommendation, checkpoint: Checkpoint) -> Recommendation:
    """With the export that gives every tensor the type in which it loses least in so many bytes."""
    job = _Job("gguf", checkpoint, {"size": _typed(found.weights)})
    try:
        job, notes = _within(found.memory, job, [{"compute_dtype": "bfloat16"}])
    except UsageError as error:
        left = f"--memory {format_bytes(found.memory)} leaves {format_bytes(found.weights)} for weights."
        raise UsageError(f"{left} {error}") from error
    return replace(
        found,
        commands=[_export(found, job)],
        seconds=job.seconds,
        peak_memory_bytes=job.plan.memory_bytes,
        notes=[*notes, _expected(found, _MEASURED_GGUF)],
    )


def _export(found: Recommendation, job: _Job) -> tuple[str, ...]:
    return ("export", found.model, f"{model_name(found.model)}-gguf", "--format", "gguf", *job.words)


def _compressed(found: Recommendation, checkpoint: Checkpoint) -> Recommendation:
    """With the command that compresses, and what it takes and loses."""
    assert found.ratio is not None
    is_best = found.ratio > _BEST and found.engine == "transformers"  # what the other does not take: 8-bit attention
    job = _Job("auto", checkpoint, {"size": _typed(found.weights), **({"effort": "best"} if is_best else {})})
    quick = {"effort": "fast"}
    try:
        job, notes = _within(found.memory, job, [quick, {**quick, "compute_dtype": "bfloat16"}])
    except UsageError as error:
        raise UsageError(f"{error} With fewer experts (compress --method reap) it gets smaller still.") from error
    output, took = f"{model_name(found.model)}-small", job.seconds
    return replace(
        found,
        commands=[
            ("compress", found.model, output, *job.words),
            ("eval", output, "--data", HELD_OUT, "--against", found.model),
        ],
        in_llama_cpp=_instead(found, checkpoint),
        seconds=took,
        peak_memory_bytes=job.plan.memory_bytes,
        notes=[*notes, *_quicker(job, took), _expected(found, _MEASURED)],
    )


def _within(memory: int, job: _Job, ways: Sequence[Mapping[str, str]]) -> tuple[_Job, list[str]]:
    """The job, with `--memory` where it takes no more than that if told so; and a sentence where it takes more even
    then, with the first of the other `ways` to type it that takes less."""
    if job.plan.memory_bytes <= memory:
        return job, []
    told = job.typing({"memory": _typed(memory)})
    if told.plan.memory_bytes <= memory:
        return told, []
    much = f"This job needs at least {format_bytes(told.plan.memory_bytes)} of memory, more than {format_bytes(memory)}"
    for other in map(told.typing, ways):
        if other.plan.memory_bytes <= memory:
            needs = format_bytes(other.plan.memory_bytes)
            return job, [f"{much}; with {' '.join(other.words)} it needs {needs}, and may lose more."]
    return job, [f"{much}: make the model on a larger machine."]


def _instead(found: Recommendation, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The export of as many bytes for llama.cpp; nothing where there is none of this model."""
    job = _Job("gguf", checkpoint, {"size": _typed(found.weights)})
    try:
        size = job.plan.output_bytes
    except MoetoolError:
        return ()
    return _export(found, job) if size <= found.weights else ()


def _quicker(job: _Job, seconds: float | None) -> Sequence[str]:
    """What a job of days takes with less text and in bfloat16."""
    if seconds is None or seconds < _LONG:
        return []
    quick = job.typing({"effort": "fast", "compute_dtype": "bfloat16"}).seconds
    if quick is None:
        return []
    return [f"With --effort fast --compute-dtype bfloat16: about {format_seconds(quick)} on this machine."]


def _typed(size: int) -> str:
    """The size as one would type it, rounded down to three digits: 14.4GB."""
    unit, name = next((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if size >= unit)
    digits = max(0, 3 - len(str(int(size / unit))))
    return f"{int(size / unit * 10**digits) / 10**digits:g}{name}"


def _expected(found: Recommendation, known: Sequence[tuple[float, float, float]]) -> str:
    """What such a result has lost on a small model, at the next size that was measured there."""
    assert found.ratio is not None
    if found.ratio > known[-1][0]:
        return f"Nothing was measured at so small a size ({found.ratio:.0%} smaller); expect a large loss."
    measured, least, most = next(row for row in known if row[0] >= found.ratio)
    lost = f"{least:g}" if least == most else f"{least:g} to {most:g}"
    return (
        "Measure what it loses on text that it was not calibrated on. For comparison, a Mixtral of 20.7 M parameters "
        f"made {measured:.0%} smaller has a KL divergence of {lost} thousandths of a nat from its original (0 = "
        "identical); larger models differ."
    )
