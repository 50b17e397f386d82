"""Results of measurements: records that the command line shows field by field and `--json` prints (docs/json.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from moetool.architectures import Role
from moetool.job.result import Inlined, Printed

if TYPE_CHECKING:
    from moetool.runtime.synthesis import SynthesisChoice

Matrix = Sequence[Sequence[float]]
# Read back from what `--json` printed, which has null for an infinite one.
Perplexity = Annotated[float, BeforeValidator(lambda told: math.inf if told is None else told)]
KL_ROUNDING = 1e-6  # nats per token: what rounding in fp32 may make of the divergence of a model from itself
NAT_UNIT = "thousandths of a nat per token"  # in which people are shown KL divergence and excess loss


def short_names(paths: Sequence[str]) -> list[str]:
    """The last part of every path, or all of each where two would be called the same."""
    short = [Path(path).name or path for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


@dataclass(frozen=True, kw_only=True)
class SynthesisResult(Printed):
    """Why a compressed model's experts were made as they were.

    Attributes:
        reason: in words.
        needed_bytes: what dense experts take; 0 where nothing is compressed.
        free_bytes: what was free for them.
    """

    reason: str
    needed_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, choice: "SynthesisChoice") -> "SynthesisResult":
        """Record of the choice whether experts become dense, and its reason."""
        return cls(reason=choice.reason, needed_bytes=choice.needed, free_bytes=choice.free)


@dataclass(frozen=True, kw_only=True)
class Divergence(Printed):
    """Divergence of a model from the original that it was made from, on the same windows.

    Attributes:
        model: the original, as it was given.
        perplexity, nll: of the original.
        excess: the model's loss less the original's, in nats per token.
        excess_error: standard error of that, from the pairs of losses of each window; `None` of one window.
        kl: mean over all predictions of `Σ_v p(v) (log p(v) − log q(v))` in nats, `p` the original's, `q` the model's.
        agreement: share of the predictions where both find the same token likeliest.
    """

    model: str
    perplexity: Perplexity
    nll: float
    excess: float
    excess_error: float | None
    kl: float
    agreement: float


@dataclass(frozen=True, kw_only=True)
class TextLoss(Printed):
    """Loss of a model on one of several texts.

    Attributes:
        name: as the text was given; of a kind of the bundled text `bundled:KIND`.
        perplexity: exp of `nll`.
        nll: mean loss per token in nats.
        windows, tokens: of the text.
        own_kind: whether the model was calibrated on text of this kind, as far as names tell (`is_own_kind`); `None`
            where nothing says what it was calibrated on.
        against: how far it is from an original, if one was given.
    """

    name: str
    perplexity: Perplexity
    nll: float
    windows: int
    tokens: int
    own_kind: bool | None = None
    against: Divergence | None = None


# Of an evaluation that says nothing of text that calibration did not have.
OWN_KIND_ALONE = "all of this is text of the calibration's own kind; text of other kinds loses more"


def shown_kl(kl: float) -> str:
    """A KL divergence in nats as people are shown it, in `NAT_UNIT`: 0 where rounding alone has made it negative."""
    return _thousandths(0.0 if -KL_ROUNDING < kl <= 0 else kl)


def shown_excess(lost: float, error: float | None) -> str:
    """An excess loss in nats and its standard error, if it has one, as people are shown them, in `NAT_UNIT`."""
    return _thousandths(lost) + ("" if error is None else f" ± {_thousandths(error)}")


def _thousandths(nats: float) -> str:
    """Three significant digits, none of them below a ten-millionth of a nat, which is rounding."""
    number = 1000 * nats
    decimals = sum(abs(number) < limit for limit in (0.1, 1, 10, 100))
    return f"{number:z.{decimals}f}"


def kind_in_words(own_kind: bool | None) -> str:
    """Whether calibration had text of a text's kind; nothing where that is not known."""
    return {True: "own kind", False: "other kind", None: ""}[own_kind]


@dataclass(frozen=True, kw_only=True)
class OverTexts(Printed):
    """KL divergence from an original over several texts, in nats, each text counting as much as any other.

    Attributes:
        kl_mean: mean over the texts.
        kl_worst: the largest.
        worst_text: the name of the text that it is of.
        kl_own: mean over the texts of the calibration's own kind; `None` if there are none.
        abroad: the largest of the other texts by `kl_own`: how many times as much is lost there; `None` without both.
    """

    kl_mean: float
    kl_worst: float
    worst_text: str
    kl_own: float | None = None
    abroad: float | None = None

    @classmethod
    def of(cls, texts: Sequence[TextLoss]) -> "OverTexts | None":
        """Summarize several texts that were compared with an original; `None` for one text alone, or without an
        original."""
        lost = [(text, text.against.kl) for text in texts if text.against is not None]
        if len(lost) < 2:
            return None
        worst, largest = max(lost, key=lambda found: found[1])
        own = [kl for text, kl in lost if text.own_kind]
        others = [kl for text, kl in lost if text.own_kind is False]
        home = sum(own) / len(own) if own else None
        return cls(
            kl_mean=sum(kl for _, kl in lost) / len(lost),
            kl_worst=largest,
            worst_text=worst.name,
            kl_own=home,
            abroad=max(others) / home if others and home is not None and home > 0 else None,
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation(Printed):
    """Loss of a model on a text, or on several together and on each by itself.

    Attributes:
        model, data: as they were given.
        perplexity: exp of `nll`.
        nll: mean loss per token in nats, over the windows of all texts.
        windows, tokens, sequence_length: of all texts.
        begin: the token that every window begins with; `None` for the text itself.
        protocol: the loss is of the next token, or of an encoder's hidden one.
        synthesized: when a compressed model's experts were made dense.
        synthesis: why.
        batch_rows: windows in a batch; of an encoder, copies of a window.
        depends_on_batch: whether `nll` depends on that.
        against: how far it is from an original, if one was given.
        unrelated: sentence that says how both differ in shape, if the original cannot be one.
        texts: each by itself; empty in what an older moetool has recorded.
        over_texts: KL divergence over several of them, if an original was given.
        calibration: the texts that the model was calibrated on since it was the original, or ever, as its manifest
            names them.
    """

    model: str
    data: str
    perplexity: Perplexity
    nll: float
    windows: int
    tokens: int
    sequence_length: int
    begin: str | None
    protocol: Literal["perplexity", "pseudo-perplexity"]
    synthesized: Literal["load", "on-the-fly"]
    synthesis: SynthesisResult
    batch_rows: int
    depends_on_batch: bool
    against: Divergence | None = None
    unrelated: str | None = None
    texts: Sequence[TextLoss] = ()
    over_texts: OverTexts | None = None
    calibration: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Generation(Printed):
    """Result of `moetool generate`.

    Attributes:
        model, prompt: as they were given.
        text: what the model wrote, without special tokens.
        prompt_tokens, new_tokens: of both.
        seconds: of prompt and answer, without loading.
        tokens_per_second: new tokens in that time.
        synthesized: when a compressed model's experts were made dense.
        synthesis: why.
    """

    model: str
    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    synthesized: Literal["load", "on-the-fly"]
    synthesis: SynthesisResult


@dataclass(frozen=True, kw_only=True)
class TextRouting(Printed):
    """Shares of the routing choices that each expert gets on one text.

    Attributes:
        name: as it was given.
        tokens: of all windows.
        shares: `[layers][experts]` of all choices, which sum to 1 in each layer; of SIMoE the mean α, one for all
            layers, each window a prompt.
        components: `[windows][2]`, the first two principal components of each window's shares, over all texts.
    """

    name: str
    tokens: int
    shares: Matrix
    components: Matrix


@dataclass(frozen=True)
class Clustering(Inlined):
    """Distances between the routing of several texts.

    Attributes:
        distances: `[texts][texts]` between their shares: mean over the layers of half the L1 norm.
        linkage: of their average-linkage dendrogram, as scipy writes it.
    """

    distances: Matrix
    linkage: Matrix


@dataclass(frozen=True, kw_only=True)
class RoutingResult(Printed):
    """Result of `moetool routing`.

    Attributes:
        model: as it was given.
        begin: the token that every window begins with; `None` for the text itself.
        data: of each text.
        depends_on_batch: whether the choices for a token depend on all others of its window.
        clustering: of several texts.
    """

    model: str
    begin: str | None
    data: Sequence[TextRouting]
    depends_on_batch: bool
    clustering: Clustering | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison(Inlined):
    """Comparison of a checkpoint's matrices with those of its source.

    Attributes:
        against: the source, as it was given.
        stages: what lies between, the last first; empty if the checkpoint says nothing of it.
        same_tensors: how many were compared bit for bit.
        rounded_tensors: how many beside the experts were not, being or having been stored in few bits (`--include`).
        relative_error: by layer and role `‖W' − W‖ / ‖W‖` over all experts, where family and shape are the same.
        expert_error: the same of each expert.
    """

    against: str
    stages: Sequence[str]
    same_tensors: int
    rounded_tensors: int = 0
    relative_error: Mapping[int, Mapping[Role, float]] | None = None
    expert_error: Mapping[int, Mapping[Role, Sequence[float]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Likeness(Printed):
    """Comparison of a checkpoint's predictions with its source's on real text.

    Attributes:
        text: as it was given.
        windows, tokens: of all texts in it.
        kl: mean KL(source ‖ model) over all predictions, in nats.
        agreement: share of the predictions where both find the same token likeliest.
        excess: the model's loss less the source's, in nats per token.
        layer_error: by layer `‖y' − y‖ / ‖y − x‖`, both given what the source's layer is given; `None` where layers
            cannot be compared one by one.
        texts: each text by itself.
        over_texts: KL divergence over several.
    """

    text: str
    windows: int
    tokens: int
    kl: float
    agreement: float
    excess: float
    layer_error: Mapping[int, float] | None
    texts: Sequence[TextLoss]
    over_texts: OverTexts | None = None


@dataclass(frozen=True, kw_only=True)
class Verification(Printed):
    """Result of `moetool verify`: what was checked and found sound.

    Attributes:
        path: as it was given.
        tensors: how many there are.
        bytes: of the weight files.
        comparison: with a source, if one was given.
        likeness: to it on a text, if one was given.
        notes: what is no error: documents that were edited, files that were added.
    """

    path: str
    tensors: int
    bytes: int
    comparison: Comparison | None = None
    likeness: Likeness | None = None
    notes: Sequence[str]
