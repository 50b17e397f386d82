"""Results of a job: records that the command line shows field by field and `--json` prints (docs/json.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Literal, TypeAlias, TypeVar

KeyT = TypeVar("KeyT")
Value = TypeVar("Value")
Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None


class Printed:
    """Base of frozen dataclasses that are printed: by name, all fields but those that hold their default."""

    def to_json(self) -> dict[str, Json]:
        """The fields as values of JSON, keys of mappings as text; those of an `Inlined` record among its own."""
        held, shown = vars(self), dict[str, Json]()
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = held[field.name]
            if isinstance(value, Inlined):
                shown |= value.to_json()
            elif field.default is MISSING or value != field.default:
                shown[field.name] = _plain(value)
        return shown


class Inlined(Printed):
    """A record whose fields are printed among those of the record that holds it."""


class Keyed(Inlined, dict[KeyT, Value]):
    """A mapping whose keys are printed among the fields of the record that holds it."""

    def to_json(self) -> dict[str, Json]:
        """Return the entries of the mapping as JSON values, with keys as text."""
        return {str(key): _plain(value) for key, value in self.items()}


def _plain(value: object) -> Json:
    if isinstance(value, Printed):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON has no {type(value).__name__}")


def significant(value: float) -> float:
    """The number to four digits, as results show errors."""
    return float(f"{value:.4g}")


def relative_error(lost: float, total: float) -> float:
    """√(lost / total) of two sums of squares, to four digits; 0 where the total is."""
    return significant((lost / total) ** 0.5 if total else 0.0)


@dataclass(frozen=True)
class CalibrationFacts(Printed):
    """The calibration text of a job.

    Attributes:
        windows: of text.
        tokens: in all windows.
        begin: the token that every window begins with, if one was put there.
        loss: mean next-token loss in nats, where it was taken.
        gradient_windows: on how many of the windows it and its gradients were taken.
        text: which windows are of which text, in words.
        kinds: windows of each source, by name, and of each kind of the bundled text.
    """

    windows: int
    tokens: int
    begin: str | None
    loss: float | None = None
    gradient_windows: int | None = None
    text: str | None = None
    kinds: Mapping[str, int] | None = None


@dataclass(frozen=True)
class PhaseTime(Printed):
    """Name of a phase of a job, and the seconds that it took or is predicted to take."""

    name: str
    seconds: float


@dataclass(frozen=True)
class PhaseCost(PhaseTime):
    """Seconds, memory and disk that a phase took.

    Attributes:
        peak_memory_bytes: of anonymous memory.
        scratch_bytes: the most that unfinished work took on the disk.
        expected_seconds: as `--dry-run` tells, if it does.
    """

    peak_memory_bytes: int | None = None
    scratch_bytes: int | None = None
    expected_seconds: float | None = None


@dataclass(frozen=True)
class LoadedLayer(Printed):
    """A layer of the result that was loaded by transformers before the job was done.

    Attributes:
        layer: its index.
        relative_error: ‖Δ output‖ / ‖output‖ of its experts, and of matrices stored as codes beside them, in fp32 on
            random inputs, against the matrices that the files stand for: the largest. `None` where names and shapes
            alone were compared: of dense models, of moetool's own modules, and where the layer did not fit in memory.
    """

    layer: int
    relative_error: float | None = None


@dataclass(frozen=True)
class Sizes(Inlined):
    """Bytes of weight files before and after a job.

    Attributes:
        bytes_before: of the input, or of the model that it was before anything was compressed.
        bytes_after: of the output.
        achieved_ratio: `1 - after / before`, rounded, where a ratio is counted.
        bytes_input: of the input, where that is another number than `bytes_before`.
        gguf_bytes: of the GGUF file that the input was read from, where `bytes_before` is what it is read as.
    """

    bytes_before: int
    bytes_after: int
    achieved_ratio: float | None = None
    bytes_input: int | None = None
    gguf_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Details(Inlined):
    """Fields of a result beyond sizes and time; a stage with more fields returns a subclass.

    Attributes:
        calibration: on what it was calibrated, if it was.
    """

    calibration: CalibrationFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Result(Printed):
    """The result of one stage: where it is, what it took, and what the stage tells of it.

    Attributes:
        stage: which.
        input, output: as they were given.
        status: `finished` if nothing was left to do.
        sizes: of a stage that writes a model.
        loaded: what was compared of it when it was loaded, unless that was not wanted.
        seconds: of the whole run.
        peak_memory_bytes: of anonymous memory.
        scratch_bytes: the most that unfinished work took on the disk.
        phases: of this run, in the order in which they began.
        details: what the stage itself says; of a run that had finished already, nothing.
    """

    stage: str
    input: str
    output: str
    status: Literal["finished"] | None = None
    sizes: Sizes | None = None
    loaded: LoadedLayer | None = None
    seconds: float
    peak_memory_bytes: int
    scratch_bytes: int | None = None
    phases: Sequence[PhaseCost] = ()
    details: Details
