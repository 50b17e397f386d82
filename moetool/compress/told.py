"""What compression tells, as a whole and layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.architectures import Role
from moetool.job.result import Printed, Told


@dataclass(frozen=True)
class RefinedLayer(Printed):
    """A layer whose experts were refined.

    Attributes:
        experts: number of experts that were changed.
        kept: number of experts that stayed as they were: no better on the windows held out, or with too few tokens.
        before, after: loss that the errors of all experts cause on those windows, in nats per token.
    """

    experts: int
    kept: int
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class RankedLayer(Printed):
    """A layer whose deltas were cut to ranks.

    Attributes:
        tokens: calibration tokens per expert, if it was calibrated.
        lost_energy: by role and expert, the share of the delta's energy that its rank has cut off.
        refined: what refinement made of it.
    """

    tokens: Sequence[int] | None = None
    lost_energy: Mapping[Role, Sequence[float]]
    refined: RefinedLayer | None = None


@dataclass(frozen=True)
class EncodedLayer(Printed):
    """A layer whose deltas were quantized or made sparse.

    Attributes:
        relative_error: by role and expert, ‖error‖ / ‖delta‖.
    """

    relative_error: Mapping[Role, Sequence[float]]


@dataclass(frozen=True)
class MixedLayer(Printed):
    """A layer whose deltas were each given the form that loses least.

    Attributes:
        loss: by role, what all experts are estimated to lose together.
        refined: what refinement made of it.
        base: by role, what its deltas are to, where there was a choice.
    """

    loss: Mapping[Role, float]
    refined: RefinedLayer | None = None
    base: Mapping[Role, str] | None = None


@dataclass(frozen=True)
class MergedLayer(Printed):
    """A layer that got a base, of which there is nothing to say."""


@dataclass(frozen=True, kw_only=True)
class LayersTold(Told):
    """What a stage tells that says something of every layer, by its number."""

    layers: Mapping[int, Printed]


@dataclass(frozen=True)
class Trial(Printed):
    """A size that was tried.

    Attributes:
        bytes: of all weight files, at most.
        increase: of the perplexity on windows held out: the model's / the original's − 1.
        increase_error: standard error of that, from the pairs of losses of each window.
    """

    bytes: int
    increase: float
    increase_error: float


@dataclass(frozen=True, kw_only=True)
class MixedTold(LayersTold):
    """What a stage tells that keeps to a budget.

    Attributes:
        ratio: of the bytes, as it was asked for.
        notes: on what was chosen.
        trials: sizes that were tried, where it was measured how small it can be.
    """

    ratio: float
    notes: Sequence[str] = ()
    trials: Sequence[Trial] = ()


@dataclass(frozen=True, kw_only=True)
class RankedTold(LayersTold):
    """What a stage tells that cuts to ranks.

    Attributes:
        ratio: as it was asked for, unless a rank was.
        unreached_experts: experts that saw no calibration token, in words.
        depends_on_batch: whether a token's result depends on the others of its batch.
        notes: where the result is not what was asked for.
    """

    ratio: float | None
    unreached_experts: Sequence[str]
    depends_on_batch: bool
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class PrunedTold(Told):
    """What pruning of a base tells.

    Attributes:
        static_channels: channels that went from the file.
        dynamic_channels: channels that each batch skips.
        depends_on_batch: whether a token's result depends on the others of its batch.
    """

    static_channels: int
    dynamic_channels: int
    depends_on_batch: bool
