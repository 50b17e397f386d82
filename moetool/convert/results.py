"""Results of converting a dense model: the size of the model written, and the proof that it computes what it should."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

from moetool.job.result import Details, Inlined, Printed


@dataclass(frozen=True)
class Parameters(Printed):
    """Parameter counts of the result: all, those that one token uses, and those that the dense model did not have."""

    total: int
    active: int
    added: int


@dataclass(frozen=True)
class Losses(Inlined):
    """Mean next-token loss of the dense model and of the converted one on the same text, in nats."""

    loss_dense: float
    loss_mixture: float


@dataclass(frozen=True)
class Shares(Inlined):
    """Shares of the tokens that experts get, over all layers: the least, the largest, and the mean entropy of the
    routing probabilities in nats."""

    least_expert_share: float
    largest_expert_share: float
    router_entropy: float


@dataclass(frozen=True, kw_only=True)
class Proof(Printed):
    """Comparison of the result with the dense model on real tokens.

    Attributes:
        tokens: real tokens that both models ran on.
        relative_logit_error: ‖difference of the logits‖ / ‖logits‖.
        losses: of models that predict tokens.
        routing: of models that have routers.
        preserves: whether the method leaves the model as it is.
        with_all_experts: whether all experts were kept for this, of more than a token will use.
        loss_kept: the loss in nats with those that a token will use.
    """

    tokens: int
    relative_logit_error: float
    losses: Losses | None = None
    routing: Shares | None = None
    preserves: bool
    with_all_experts: bool = False
    loss_kept: float | None = None


@dataclass(frozen=True, kw_only=True)
class Activations(Printed):
    """Sparsity of activations, and the energy that chosen experts hold, as shares between 0 and 1.

    Attributes:
        soft_sparsity: activations near zero.
        soft_sparsity_centred: activations near their neuron's mean.
        captured: energy in the experts that are chosen.
        captured_by_oracle: energy in the best choice of as many.
        selector_accuracy: of the best choice, what the selector chooses.
    """

    soft_sparsity: float
    soft_sparsity_centred: float
    captured: float | None = None
    captured_by_oracle: float | None = None
    selector_accuracy: float | None = None

    @classmethod
    def mean(cls, layers: Iterable["Activations"]) -> Self:
        """The mean over layers, of which each says the same, to six digits."""
        every = [vars(layer) for layer in layers]
        told = [field.name for field in fields(cls) if every[0][field.name] is not None]
        return cls(**{name: round(sum(layer[name] for layer in every) / len(every), 6) for name in told})


@dataclass(frozen=True, kw_only=True)
class ConversionResult(Details):
    """Result of a conversion, with the fields that all conversions share.

    Attributes:
        target: the family that is written, where there is a choice.
        parameters: of the result.
        proof: that it computes what it should, unless none was wanted.
        notes: what a user of the result has to know.
        activations: the mean over layers, where neurons were measured.
    """

    target: str | None = None
    parameters: Parameters
    proof: Proof | None = None
    notes: Sequence[str]
    activations: Activations | None = None
