"""Numbers of experts that a model can keep, and the number that a ratio leaves it."""

from bisect import bisect_right

from moetool.checkpoint.sizes import format_bytes
from moetool.errors import InvalidInputError, UsageError
from moetool.job.job import Source
from moetool.job.writing import original_bytes
from moetool.reduce.choosing import Fewer
from moetool.reduce.options import ReduceOptions
from moetool.reduce.plan import ReducedPlan, expert_axis

_NEAR = 0.01  # a ratio missed by more than this is worth a note


def check_reducible(source: Source) -> None:
    """Raise `UsageError` for a checkpoint in moetool's own format, `InvalidInputError` for a router with tensors that
    have no entry per expert."""
    reader, architecture = source.experts, source.architecture
    if "quantization_config" in source.checkpoint.config:
        raise UsageError(
            f"{source.checkpoint.path} is a moetool checkpoint. Experts are dropped and merged in an ordinary one: "
            "export --format dense-experts writes it, if it was compressed."
        )
    for layer in reader.moe_layers:
        for name, info in source.checkpoint.tensors.items():
            if architecture.is_router(layer, name) and expert_axis(info.shape, reader.shape.experts) is None:
                raise InvalidInputError(
                    f"Tensor {name} has shape {list(info.shape)}, not a row for each of {reader.shape.experts} "
                    f"experts: {architecture.name} with this router cannot do with fewer."
                )


def possible_counts(source: Source) -> range:
    """Numbers of experts that every layer can be left with: enough for the router, as many in each of its groups, and
    not all."""
    shape = source.experts.shape
    groups, chosen = source.architecture.groups
    least = groups * max(2, -(-shape.top_k // chosen))  # routers look at two of a group
    return range(least, shape.experts, groups)


def experts_left(source: Source, options: ReduceOptions) -> tuple[Fewer, str | None]:
    """Number of experts that every layer keeps, with a warning if there is reason for one.

    Raises:
        UsageError: so many are not possible, or none are that leave a file so small.
    """
    groups, _ = source.architecture.groups
    experts, counts = source.experts.shape.experts, possible_counts(source)
    if not counts:
        raise UsageError(f"{_limits(source)} So there is nothing to take away.")
    if options.experts is not None:
        if options.experts not in counts:
            many = f"a multiple of {groups} from {counts[0]} to {counts[-1]}" if groups > 1 else _span(counts)
            raise UsageError(f"--experts {options.experts} of {experts}: it can be {many}. {_limits(source)}")
        return Fewer(experts, options.experts, groups), None
    assert options.ratio is not None
    original = original_bytes(source)
    target = round(original * (1 - options.ratio))

    def size(kept: int) -> int:
        return ReducedPlan(source, kept, options.shard_size).nbytes

    fitting = bisect_right(counts, target, key=size)
    if not fitting:
        least = size(counts[0])
        raise UsageError(
            f"{options.target_option} cannot be met by fewer experts: {counts[0]} of {experts} leave "
            f"{format_bytes(least)} of {format_bytes(original)}, a ratio of {1 - least / original:.4f}. "
            f"{_limits(source)} Other methods of compress make experts smaller."
        )
    kept = counts[fitting - 1]
    achieved = 1 - size(kept) / original
    if achieved - options.ratio <= _NEAR:
        return Fewer(experts, kept, groups), None
    note = f"{kept} of {experts} experts in every layer make it {achieved:.1%} smaller; {options.ratio:.1%} were asked"
    if fitting < len(counts):
        note += f", and {counts[fitting]} would make it {1 - size(counts[fitting]) / original:.1%}"
    return Fewer(experts, kept, groups), f"{note}."


def _span(counts: range) -> str:
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])


def _limits(source: Source) -> str:
    """Sentence that says why a layer cannot have fewer experts."""
    shape = source.experts.shape
    groups, chosen = source.architecture.groups
    if groups == 1:
        return f"The router takes {shape.top_k} of {shape.experts} experts for every token."
    return (
        f"The router takes {shape.top_k} of {shape.experts} experts for every token, from the best {chosen} of "
        f"{groups} groups, each of which keeps as many, two at least."
    )
