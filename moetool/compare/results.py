"""Result records of `moetool compare` (docs/json.md)."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetool.job.result import Printed
from moetool.measure.results import OverTexts, TextLoss, kind_in_words


@dataclass(frozen=True, kw_only=True)
class ComparedModel(Printed):
    """One row of the table.

    Attributes:
        name: what the row is called.
        method: that made it; `None` of a model that was there.
        asked: the ratio it was asked for, if any.
        saved: `1 − bytes / the original's`.
        bytes: of the weight files.
        perplexity: on all texts together.
        excess, excess_error: its loss less the original's, in nats per token, and the standard error of that.
        kl: mean KL(original ‖ model) in nats.
        agreement: share of the predictions where both find the same token likeliest.
        texts: each of these by itself.
        over_texts: KL divergence over several texts.
        calibration: the texts that the model was calibrated on, as its manifest names them.
        seconds: that making it took; `None` where it was interrupted, and of a model that was there.
        peak_memory_bytes: of anonymous memory, meanwhile.
        path: where it is, if it is kept.
        error: why there is no such model; then of the others only the first three say anything.
    """

    name: str
    method: str | None
    asked: float | None
    saved: float | None = None
    bytes: int | None = None
    perplexity: float | None = None
    excess: float | None = None
    excess_error: float | None = None
    kl: float | None = None
    agreement: float | None = None
    texts: Sequence[TextLoss] = ()
    over_texts: OverTexts | None = None
    calibration: Sequence[str] = ()
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    path: str | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """Name of the row in messages: its name, and the ratio if one was asked for."""
        return self.name if self.asked is None else f"{self.name} at {self.asked:.1%}"


@dataclass(frozen=True, kw_only=True)
class SharedStatistics(Printed):
    """Cost of one calibration pass that several rows share.

    Attributes:
        rows: in words.
        seconds: that it took, which are in no row's; `None` where it was interrupted.
    """

    rows: Sequence[str]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Compared(Printed):
    """Result of `moetool compare`: the original, and a row per model.

    Attributes:
        model, data: as they were given.
        bytes, perplexity, nll: of the original: weight files, and on all texts together.
        gguf_bytes: of the GGUF file that the original is read from, if it is; `bytes` are then of what it is read as.
        windows, tokens, sequence_length, begin: of the texts, as `moetool eval` has them.
        texts: the original's losses on each.
        rows: models that were there, then every method at every ratio.
        statistics: what was measured once for several of them.
    """

    model: str
    data: str
    bytes: int
    gguf_bytes: int | None = None
    perplexity: float
    nll: float
    windows: int
    tokens: int
    sequence_length: int
    begin: str | None
    texts: Sequence[TextLoss] = ()
    rows: Sequence[ComparedModel]
    statistics: Sequence[SharedStatistics] = ()


def kind_of_text(result: Compared, number: int) -> str:
    """Return `own kind` or `other kind` for a text, by its number, if all calibrated models of a table agree on it;
    else an empty text."""
    said = {row.texts[number].own_kind for row in result.rows if number < len(row.texts)} - {None}
    return kind_in_words(said.pop()) if len(said) == 1 else ""
