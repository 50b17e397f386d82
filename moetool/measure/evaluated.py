"""What `moetool eval` tells (docs/json.md)."""

from dataclasses import dataclass
from typing import Literal

from moetool.job.result import Printed
from moetool.measure.told import SynthesisTold


@dataclass(frozen=True, kw_only=True)
class Divergence(Printed):
    """How far a model is from the original that it was made from, on the same windows.

    Attributes:
        model: the original, as it was given.
        perplexity, nll: of the original.
        excess: the model's loss less the original's, in nats per token.
        excess_error: standard error of that, from the pairs of losses of each window; `None` of one window.
        kl: mean over all predictions of `Σ_v p(v) (log p(v) − log q(v))` in nats, `p` the original's, `q` the model's.
        agreement: share of the predictions where both find the same token likeliest.
    """

    model: str
    perplexity: float
    nll: float
    excess: float
    excess_error: float | None
    kl: float
    agreement: float


@dataclass(frozen=True, kw_only=True)
class Evaluation(Printed):
    """How well a model predicts a text.

    Attributes:
        model, data: as they were given.
        perplexity: exp of `nll`.
        nll: mean loss per token in nats.
        windows, tokens, sequence_length: of the text.
        begin: the token that every window begins with; `None` for the text itself.
        protocol: the loss is of the next token, or of an encoder's hidden one.
        synthesized: when a compressed model's experts were made dense.
        synthesis: why.
        batch_rows: windows in a batch; of an encoder, copies of a window.
        depends_on_batch: whether `nll` depends on that.
        against: how far it is from an original, if one was given.
    """

    model: str
    data: str
    perplexity: float
    nll: float
    windows: int
    tokens: int
    sequence_length: int
    begin: str | None
    protocol: Literal["perplexity", "pseudo-perplexity"]
    synthesized: Literal["load", "on-the-fly"]
    synthesis: SynthesisTold
    batch_rows: int
    depends_on_batch: bool
    against: Divergence | None = None
