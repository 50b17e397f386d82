"""What other commands have printed with `--json`, read back for a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from moetool.checkpoint.reader import read_object
from moetool.checkpoint.source import local_path
from moetool.errors import InvalidInputError
from moetool.job.result import PhaseTime, Printed
from moetool.measure.evaluated import Evaluation
from moetool.measure.told import RoutingTold

ToldT = TypeVar("ToldT", bound=Printed)


@dataclass(frozen=True, kw_only=True)
class RecordedProof(Printed):
    """Losses of the dense model and of what was made of it, in nats, as a conversion proved them."""

    loss_dense: float | None = None
    loss_mixture: float | None = None
    loss_kept: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Printed):
    """What a stage had told; `None` and empty where it does not say such a thing.

    Attributes:
        curve: of a training, numbers by what they are, `step` among them.
    """

    stage: str
    input: str
    output: str
    seconds: float
    peak_memory_bytes: int
    bytes_before: int | None = None
    bytes_after: int | None = None
    phases: Sequence[PhaseTime] = ()
    proof: RecordedProof | None = None
    eval_loss: float | None = None
    curve: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedResults(Printed):
    """What was in all files, in their order."""

    runs: Sequence[RecordedRun] = field(default_factory=list)
    evaluations: Sequence[Evaluation] = field(default_factory=list)
    routings: Sequence[RoutingTold] = field(default_factory=list)


def read_recorded(names: str) -> RecordedResults:
    """Read files, named with commas between them.

    Raises:
        InvalidInputError: one is not there, or not what a command of moetool prints.
    """
    runs: list[RecordedRun] = []
    evaluations: list[Evaluation] = []
    routings: list[RoutingTold] = []
    for name in filter(None, map(str.strip, names.split(","))):
        path = local_path(name)
        content = _read(path)
        if "stage" in content and "seconds" in content:
            runs.append(_as(RecordedRun, content, path))
        elif "perplexity" in content and "nll" in content:
            evaluations.append(_as(Evaluation, content, path))
        elif "data" in content and "begin" in content:
            routings.append(_as(RoutingTold, content, path))
        else:
            raise InvalidInputError(
                f"--results {path}: this is not what compress, upcycle, moefy, tune, export, eval or routing print "
                "with --json."
            )
    return RecordedResults(runs=runs, evaluations=evaluations, routings=routings)


def _read(path: Path) -> dict[str, object]:
    return read_object(path, lambda: f"--results: there is no file {path}.")[1]


def _as(kind: type[ToldT], content: Mapping[str, object], path: Path) -> ToldT:
    try:
        told: ToldT = TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidInputError(f"--results {path}: {place}: {first['msg']}.") from error
    return told
