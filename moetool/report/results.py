"""Contents of a report: records that its page shows and `--json` prints (docs/json.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.architectures import Role
from moetool.convert.results import Activations
from moetool.job.result import Json, Printed
from moetool.measure.inspected import Inspection
from moetool.measure.results import Evaluation, Matrix, RoutingResult
from moetool.report.recorded import RecordedResults, RecordedRun


@dataclass(frozen=True, kw_only=True)
class MadeStep(Printed):
    """One step of how a model came about: the stage, and what it was given.

    Attributes:
        command: that makes a step before the last again, with files by their names alone, as the manifest of what came
            of it all has them; `None` where it has them not, or a preset is needed.
    """

    stage: str
    source: str
    source_fingerprint: str
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class HowMade(Printed):
    """Origin of a model, from its manifest.

    Attributes:
        steps: from the first to the last.
        command: that makes the last step again; `None` if this moetool does not know the stage, or an option of it.
        preset: a YAML file that the command needs, where options are more than a command line holds.
        options: of the last step, defaults included.
        versions: of moetool and of the libraries.
        calibration: on which text, and the loss there.
    """

    steps: Sequence[MadeStep]
    command: str | None
    preset: str | None = None
    options: Mapping[str, Json]
    versions: Mapping[str, str]
    calibration: Mapping[str, Json] | None = None


@dataclass(frozen=True, kw_only=True)
class WeightBytes(Printed):
    """Bytes of the tensors of one kind; `before` of the source, if it was given."""

    kind: str
    bytes: int
    before: int | None = None


@dataclass(frozen=True, kw_only=True)
class StoredRole(Printed):
    """All experts' matrices of one role in one layer.

    Attributes:
        form: how they are stored, in words.
        bits: of the files per weight that they stand for, bases and scales included.
        error: what the manifest says, by `StoredExperts.measure`: mean over the experts, of `loss` their sum.
        largest: of the experts; `None` of `loss`.
    """

    layer: int
    role: Role
    form: str
    bits: float
    error: float | None = None
    largest: float | None = None


@dataclass(frozen=True, kw_only=True)
class StoredExperts(Printed):
    """Form, bits per weight and error of all experts, by layer and role.

    Attributes:
        measure: by which name the manifest has their errors, if it has any: `lost_energy`, `relative_error`, `loss`.
        roles: by layer and role.
    """

    measure: str | None = None
    roles: Sequence[StoredRole]


@dataclass(frozen=True, kw_only=True)
class RareExpert(Printed):
    """An expert that got less than a tenth of an even share of the tokens."""

    layer: int
    expert: int
    share: float


@dataclass(frozen=True, kw_only=True)
class TextCoverage(Printed):
    """Shares of a text's tokens that each expert received.

    Attributes:
        text: as it was given.
        layers: their numbers; one alone, 0, of models that choose once for all layers.
        shares: `[layers][experts]` of the tokens, 1 in each layer.
        rare: experts with less than a tenth of an even share.
        unreached: of them, those without any token.
    """

    text: str
    layers: Sequence[int]
    shares: Matrix
    rare: Sequence[RareExpert]
    unreached: int


@dataclass(frozen=True, kw_only=True)
class MergedExperts(Printed):
    """The experts that a layer was left with, and the original experts that each was merged of."""

    layer: int
    made_of: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Report(Printed):
    """Everything that a page shows, as it was measured or found.

    Attributes:
        model: as it was given.
        output: where the page is.
        model_type: the family, as `config.json` has it.
        bytes: of the weight files.
        files: with weights, how many.
        numbers: in the files.
        weights: bytes by kind of tensor, the largest first.
        against: the source, which `before` in `weights` is of.
        against_bytes: of the weight files of `against`, headers and all, as `bytes` is of the model's.
        gguf_bytes, against_gguf_bytes: of the GGUF files that they are read from, if they are.
        made: how it was made, if moetool did.
        inspection: what it holds, if it has experts, and what they are like (`--analysis`).
        stored: how its experts are stored, if they are whole networks.
        merged: which experts were left, where there were more.
        coverage: which experts texts reached: that of the calibration, and those of `--data`.
        routing: which experts are chosen on texts.
        evaluation: how well it predicts texts.
        saved: what `eval` had saved beside the model, of these weights.
        activations: of neurons as experts, by layer.
        jobs: what those that made it have cost, as far as that was kept, the first above.
        recorded: what other commands had printed with `--json`.
        notes: what was left out, and why.
    """

    model: str
    output: str
    model_type: str
    bytes: int
    files: int
    numbers: int
    weights: Sequence[WeightBytes]
    against: str | None = None
    against_bytes: int | None = None
    gguf_bytes: int | None = None
    against_gguf_bytes: int | None = None
    made: HowMade | None = None
    inspection: Inspection | None = None
    stored: StoredExperts | None = None
    merged: Sequence[MergedExperts] = ()
    coverage: Sequence[TextCoverage] = ()
    routing: RoutingResult | None = None
    evaluation: Evaluation | None = None
    saved: Sequence[Evaluation] = ()
    activations: Mapping[int, Activations] | None = None
    jobs: Sequence[RecordedRun] = ()
    recorded: RecordedResults | None = None
    notes: Sequence[str] = ()

    @property
    def runs(self) -> Sequence[RecordedRun]:
        """Recorded runs: those kept beside the model, then those from the given results."""
        return [*self.jobs, *(() if self.recorded is None else self.recorded.runs)]
