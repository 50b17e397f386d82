"""Records for a report: files that jobs left beside their results, and saved output of commands with `--json`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from moetool.checkpoint.json_files import read_object
from moetool.checkpoint.manifest import Manifest
from moetool.checkpoint.names import COSTS
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import is_here, local_path
from moetool.errors import InvalidInputError
from moetool.job.metering import ExpectedCosts, read_costs, unreadable_costs
from moetool.job.result import PhaseCost, Printed
from moetool.measure.results import Divergence, Evaluation, RoutingResult
from moetool.measure.tasks.results import saved_beside

RecordT = TypeVar("RecordT", bound=Printed)


@dataclass(frozen=True, kw_only=True)
class RecordedProof(Printed):
    """Losses of the dense model and of what was made of it, in nats, as a conversion proved them."""

    loss_dense: float | None = None
    loss_mixture: float | None = None
    loss_kept: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Printed):
    """Recorded result of a stage; fields that it does not have are `None` or empty.

    Attributes:
        input, output: as they were given.
        runs: that the job took, where that was kept; the rest is of all of them.
        scratch_bytes: the most that unfinished work took on the disk.
        expected: what `--dry-run` tells of it.
        curve: of a training, numbers by what they are, `step` among them.
    """

    stage: str
    input: str
    output: str
    seconds: float
    peak_memory_bytes: int
    runs: int = 1
    scratch_bytes: int | None = None
    expected: ExpectedCosts | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    phases: Sequence[PhaseCost] = ()
    proof: RecordedProof | None = None
    eval_loss: float | None = None
    curve: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedEvaluated(Printed):
    """What `eval` of several models, or of tasks, says of one model: its scores of tasks are left out."""

    model: str
    fingerprint: str
    text: Evaluation | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedEvaluations(Printed):
    """Result of `eval` of several models, or of tasks, and what it saves beside a model."""

    models: Sequence[RecordedEvaluated]


@dataclass(frozen=True, kw_only=True)
class RecordedResults(Printed):
    """Results that other commands have written, read from the files of `--results` in their order."""

    runs: Sequence[RecordedRun] = field(default_factory=list)
    evaluations: Sequence[Evaluation] = field(default_factory=list)
    routings: Sequence[RoutingResult] = field(default_factory=list)


def kept_runs(path: Path, manifest: Manifest | None, results: RecordedResults | None) -> list[RecordedRun]:
    """Records of the jobs that made a checkpoint, the first one above, as far as each left its costs beside its result;
    those that are among `results` are left out.

    Raises:
        InvalidInputError: another version of moetool has kept something else.
    """
    origins = () if manifest is None else manifest.origins
    told = {(run.stage, Path(run.output).resolve()) for run in (() if results is None else results.runs)}
    found, output = list[RecordedRun](), str(path)
    for job, origin in zip(reversed(read_costs(path)), origins, strict=False):
        run = _as(RecordedRun, {**job, "input": origin.source, "output": output}, path / COSTS)
        if (run.stage, Path(output).resolve()) not in told:
            found.append(run)
        output = origin.source
    return found[::-1]


def without_costs(path: Path, manifest: Manifest | None) -> str | None:
    """A note if the costs of some job that made a checkpoint are missing; else `None`."""
    steps, kept = 0 if manifest is None else len(manifest.origins), len(read_costs(path))
    if kept >= steps:
        return None
    if (problem := unreadable_costs(path)) is not None:
        return f"What its jobs cost cannot be read: {problem}."
    return f"{COSTS} tells nothing of the first {steps - kept} of the {steps} jobs that made it."


def saved_evaluations(checkpoint: Checkpoint) -> tuple[list[Evaluation], list[str]]:
    """Evaluations on texts that `eval` saved beside a model with its present weights, in the order of their files; and
    a note on each file that is of other weights or cannot be read."""
    found, notes = list[Evaluation](), list[str]()
    for file in saved_beside(checkpoint.source):
        try:
            content = _read(file)
            if "models" not in content:  # of one model, by --output
                notes.append(f"{file.name} is left out: it does not say on which weights eval measured it (--results).")
                continue
            models = _as(RecordedEvaluations, content, file).models
        except InvalidInputError as error:
            notes.append(f"Results of eval cannot be read: {error}")
            continue
        own = [model for model in models if model.fingerprint == checkpoint.fingerprint()]
        if not own:
            notes.append(f"{file.name} is left out: eval measured it on other weights than these.")
        found += [model.text for model in own if model.text is not None]
    return found, notes


def is_same_measurement(one: Evaluation, other: Evaluation) -> bool:
    """Whether two evaluations of the same weights, read from here, measured the same on the same texts against the same
    original, however these were named (`text.txt`, `./text.txt`), and whatever memory was free."""
    return _unnamed(one) == replace(_unnamed(other), synthesis=one.synthesis)


def _unnamed(found: Evaluation) -> Evaluation:
    """An evaluation without the model's name, and with whole paths of texts and originals that are here."""
    texts = [replace(text, name=_whole(text.name), against=_whole_original(text.against)) for text in found.texts]
    return replace(
        found, model="", data="", texts=texts, against=_whole_original(found.against), over_texts=None, calibration=()
    )


def _whole_original(found: Divergence | None) -> Divergence | None:
    return None if found is None else replace(found, model=_whole(found.model))


def _whole(name: str) -> str:
    return str(local_path(name).resolve()) if is_here(name) else name


def read_recorded(names: Iterable[str]) -> RecordedResults:
    """Read files of these names.

    Raises:
        InvalidInputError: one is not there, or not what a command of moetool prints.
    """
    runs: list[RecordedRun] = []
    evaluations: list[Evaluation] = []
    routings: list[RoutingResult] = []
    for name in names:
        path = local_path(name)
        try:
            content = _read(path)
        except InvalidInputError as error:
            raise InvalidInputError(f"--results: {error}") from error
        if "stage" in content and "seconds" in content:
            runs.append(_as(RecordedRun, content, path, "--results "))
        elif "perplexity" in content and "nll" in content:
            evaluations.append(_as(Evaluation, content, path, "--results "))
        elif "models" in content:
            several = _as(RecordedEvaluations, content, path, "--results ").models
            evaluations += [found.text for found in several if found.text is not None]
        elif "data" in content and "begin" in content:
            routings.append(_as(RoutingResult, content, path, "--results "))
        else:
            raise InvalidInputError(
                f"--results {path}: this is not what compress, upcycle, moefy, tune, export, eval or routing print "
                "with --json."
            )
    return RecordedResults(runs=runs, evaluations=evaluations, routings=routings)


def _read(path: Path) -> dict[str, object]:
    return read_object(path, lambda: f"There is no file {path}.")[1]


def _as(kind: type[RecordT], content: Mapping[str, object], path: Path, option: str = "") -> RecordT:
    try:
        told: RecordT = TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidInputError(f"{option}{path}: {place}: {first['msg']}.") from error
    return told
