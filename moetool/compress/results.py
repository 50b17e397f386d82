"""Result records of compression: of a whole job, and of each kind of layer that it makes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.architectures import Role
from moetool.job.result import Details, Printed


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
    """A layer whose matrices each got the form that loses least within the budget.

    Attributes:
        loss: estimated loss of all experts together, by role.
        refined: what refinement has changed.
        base: name of the storage scheme, by role, where there was a choice.
    """

    loss: Mapping[Role, float]
    refined: RefinedLayer | None = None
    base: Mapping[Role, str] | None = None


@dataclass(frozen=True)
class MergedLayer(Printed):
    """Record of a layer that was given a shared base; it has no fields."""


@dataclass(frozen=True, kw_only=True)
class LayersResult(Details):
    """Result of a stage with an entry for every layer, by its number."""

    layers: Mapping[int, Printed]


@dataclass(frozen=True)
class Trial(Printed):
    """A model of one size that was made and measured.

    Attributes:
        bytes: bytes of all weight files, at most.
        increase: increase of perplexity on windows held out, as a share: the model's / the original's − 1.
        increase_error: standard error of the increase, from the pairs of losses of each window.
    """

    bytes: int
    increase: float
    increase_error: float


@dataclass(frozen=True, kw_only=True)
class MixedResult(LayersResult):
    """Result of a stage that chooses forms within a budget of bytes.

    Attributes:
        ratio: share of the bytes to save, as it was asked for.
        notes: sentences on what was chosen.
        trials: sizes that were tried for a limit on perplexity, the one that was kept last.
    """

    ratio: float
    notes: Sequence[str] = ()
    trials: Sequence[Trial] = ()


@dataclass(frozen=True, kw_only=True)
class RankedResult(LayersResult):
    """Result of a stage that cuts deltas to ranks.

    Attributes:
        ratio: share of the bytes to save; `None` where a rank was asked for.
        unreached_experts: experts that saw no calibration token, in words.
        depends_on_batch: whether a token's result depends on the others of its batch.
        notes: sentences on where the result is not what was asked for.
    """

    ratio: float | None
    unreached_experts: Sequence[str]
    depends_on_batch: bool
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class PrunedResult(Details):
    """Result of pruning a base.

    Attributes:
        static_channels: channels that were removed from the file.
        dynamic_channels: channels that each batch skips.
        depends_on_batch: whether a token's result depends on the others of its batch.
    """

    static_channels: int
    dynamic_channels: int
    depends_on_batch: bool
