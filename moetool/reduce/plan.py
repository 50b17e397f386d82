"""Number of experts that a model is to have, and the tensors and config of that checkpoint."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from moetool.architectures import Architecture, Role
from moetool.architectures.base import EXPERT_KEYS, TOP_K_KEYS, whole_number
from moetool.architectures.described import language_entries, with_language_entries
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.sizes import format_bytes, format_least_bytes
from moetool.checkpoint.writer import TensorSpec
from moetool.errors import InvalidInputError, UsageError
from moetool.format.entry import custom_entry
from moetool.format.kinds import custom_module
from moetool.format.marker import moetool_entry
from moetool.job.job import Source
from moetool.job.shards import PassingPlan
from moetool.job.writing import original_bytes
from moetool.reduce.choosing import Fewer
from moetool.reduce.options import ReduceOptions
from moetool.reduce.stored import has_stored_experts, stored_specs, unread_beside

_PREDICTION = "num_nextn_predict_layers"
_NEAR = 0.01  # a ratio missed by more than this is worth a note


class CountedPlan(PassingPlan):
    """Assignment of tensors to shards if every MoE layer has `count` experts, fewer than before or more; other tensors
    pass through.

    Attributes:
        count: experts of every MoE layer.
    """

    def __init__(self, source: Source, count: int, shard_size: int) -> None:
        self.count = count
        super().__init__(source, self._of_layers(), shard_size)

    def _of_layers(self) -> Iterator[tuple[int, list[TensorSpec]]]:
        """Everything outside the layers, then the layers in order."""
        source, tensors = self.source, self.source.checkpoint.tensors
        architecture, reader = source.architecture, source.experts
        gone = lost_names(source)
        specs: dict[int, list[TensorSpec]] = {layer: [] for layer in range(-1, architecture.layers)}
        for name, info in tensors.items():
            layer = architecture.layer_of(name)
            if name in reader.names or name in reader.biases or name in gone:
                continue
            shape = list(info.shape)
            counts = reader.has(layer) and architecture.is_router(layer, name)
            if counts and (axis := expert_axis(info.shape, architecture)) is not None:
                shape[axis] += self.count - reader.shape.experts
                specs[layer].append(TensorSpec(name, info.dtype, tuple(shape)))
            else:
                specs[layer] += self.passing(name)
        if source.keeps_stored:
            for name in unread_beside(source):
                specs[architecture.layer_of(name)] += self.passing_as_stored(name)
        for layer, own in specs.items():
            own += self._experts(layer) if reader.has(layer) else ()
            if own:
                yield layer, own

    def _experts(self, layer: int) -> Iterator[TensorSpec]:
        source, shape = self.source, self.source.experts.shape
        if are_stored := has_stored_experts(source):
            yield from stored_specs(source, layer, self.count)
        for roles in shape.groups:
            alone = (together[0] for together in source.architecture.together(roles))
            for role in alone if source.architecture.is_fused else roles:
                info = source.checkpoint.tensors[source.architecture.weight_name(layer, 0, role)]
                if source.architecture.is_fused:
                    if not are_stored:
                        rows = info.shape[0] // shape.experts  # of each expert, more than one where they are stacked
                        yield TensorSpec(info.name, info.dtype, (self.count * rows, *info.shape[1:]))
                    if role in shape.biases:
                        bias = source.checkpoint.tensors[source.architecture.bias_name(layer, role)]
                        yield TensorSpec(bias.name, bias.dtype, (self.count, *bias.shape[1:]))
                    continue
                if not are_stored:
                    dtype = whole_dtype(source.experts, layer, role)
                    for expert in range(self.count):
                        yield TensorSpec(source.architecture.weight_name(layer, expert, role), dtype, info.shape)


def whole_dtype(reader: ExpertReader, layer: int, role: Role) -> torch.dtype:
    """The dtype that holds the matrices of all experts of a layer in a role without rounding: files may have some of
    them in bf16 and others in fp32."""
    if not reader.layout(layer).is_native:
        return reader.dtype
    names = {reader.architecture.weight_name(layer, expert, role) for expert in range(reader.shape.experts)}
    return reduce(torch.promote_types, {reader.checkpoint.info(name).dtype for name in names})


def expert_axis(shape: Sequence[int], architecture: Architecture) -> int | None:
    """Index of the dimension of a router's tensor that counts experts (`[experts, …]`, `[1, experts]`), or these and
    after them what else a token may be given; `None` if none does."""
    counts = {architecture.shape.experts, architecture.routed_to[0]}
    if shape and shape[0] in counts:
        return 0
    return 1 if len(shape) == 2 and shape[0] == 1 and shape[1] in counts else None


def rows_kept(tensor: Tensor, architecture: Architecture, experts: Sequence[int]) -> Tensor:
    """A router's tensor for these of a layer's experts: their entries, and those that are for no expert."""
    if (axis := expert_axis(tensor.shape, architecture)) is None:
        return tensor
    beside = range(architecture.shape.experts, tensor.shape[axis])
    return tensor.index_select(axis, torch.tensor([*experts, *beside], device=tensor.device))


def lost_names(source: Source) -> set[str]:
    """Tensors of the layers after the last that predict further tokens, if they have experts: transformers does not run
    them, so nothing is known of these, and with another number of experts no engine could load them."""
    architecture, tensors = source.architecture, source.checkpoint.tensors
    further = architecture.layers
    lost: set[str] = set()
    while architecture.router_name(further) in tensors:
        lost |= {name for name in tensors if name.startswith(architecture.layer_prefix(further))}
        further += 1
    return lost


def counted_config(source: Source, count: int, top_k: int | None = None) -> dict[str, object]:
    """`config.json` with another number of experts, and of experts per token if `top_k` is given, without layers that
    predict further tokens if these go; with what it says of the format that it is stored in, if it stays in that."""
    config, shape = source.checkpoint.config, source.experts.shape
    if (spec := custom_module(config)) is not None:
        told = spec.model_copy(update={"experts": count, "top_k": shape.top_k if top_k is None else top_k})
        return {**config, "quantization_config": custom_entry(told)}
    settings, own = source.checkpoint.settings, language_entries(config)
    changes = _named(settings, own, EXPERT_KEYS, shape.experts, count)
    if top_k is not None:
        changes |= _named(settings, own, TOP_K_KEYS, shape.top_k, top_k)
    if lost_names(source) and _PREDICTION in own:
        changes[_PREDICTION] = 0
    counted = with_language_entries(config, changes)
    entry = source.checkpoint.stored_entry
    return {**counted, "quantization_config": dict(entry)} if source.keeps_stored and entry is not None else counted


def _named(
    settings: Mapping[str, object], config: Mapping[str, object], keys: Sequence[str], before: int, after: int
) -> dict[str, object]:
    """The entries among these keys that say a number, with another; one that `config` leaves to the defaults, if it
    names none; or the part of `config` that says it (DBRX)."""
    if known := [key for key in keys if whole_number(settings, key) == before]:
        return dict.fromkeys({key for key in known if key in config} or known[:1], after)
    parts = {name: part for name, part in config.items() if isinstance(part, Mapping)}
    changed = {name: _named(part, part, keys, before, after) for name, part in parts.items()}
    return {name: {**parts[name], **entries} for name, entries in changed.items() if entries}


def check_countable(source: Source, *, custom: bool = False) -> None:
    """Raise `UsageError` for a checkpoint in moetool's own format, unless it is no more than `custom` modules and these
    are taken; `InvalidInputError` for a router with tensors that have no entry per expert, and for a model that has as
    many experts elsewhere in its layers."""
    reader, architecture, config = source.experts, source.architecture, source.checkpoint.config
    spec, entry = custom_module(config) if custom else None, moetool_entry(config) or {}
    is_ordinary = spec is not None and {key: entry[key] for key in entry if entry[key]} == custom_entry(spec)
    if "quantization_config" in config and not is_ordinary:
        name = source.checkpoint.source
        if not reader.layouts:
            raise UsageError(
                f"{name} has its experts in moetool's own module. There, experts are removed by their numbers alone: "
                "--method drop-experts --drop NUMBERS."
            )
        raise UsageError(
            f"{name} is a moetool checkpoint. The number of experts is changed in an ordinary one, as moetool export "
            f"{name} NEW --format dense-experts writes it."
        )
    for layer in reader.moe_layers:
        block = architecture.block_prefix(layer)
        for name, info in source.checkpoint.tensors.items():
            if name.startswith(architecture.layer_prefix(layer)) and not name.startswith(block):
                count, *matrix = info.shape
                if len(matrix) == 2 and min(matrix) > 1 and count == reader.shape.experts:  # as JetMoE's attention
                    raise InvalidInputError(
                        f"{name} has {count} experts, too, and config.json of {architecture.name} counts both in one "
                        "number: neither can have fewer alone. Other methods of compress make experts smaller."
                    )
            is_several = math.prod(info.shape) > 1  # one number is no expert's
            if architecture.is_router(layer, name) and is_several and expert_axis(info.shape, architecture) is None:
                raise InvalidInputError(
                    f"Tensor {name} has shape {list(info.shape)}, not a row for each of {reader.shape.experts} "
                    f"experts: {architecture.name} with this router cannot have another number of them."
                )


def possible_counts(source: Source, top_k: int | None = None) -> range:
    """Numbers of experts that every layer can be left with: enough for the router, which takes `top_k` of them (by
    default as many as before), as many in each of its groups, and not all."""
    shape = source.experts.shape
    groups, chosen = source.architecture.groups
    least = groups * max(2, -(-(shape.top_k if top_k is None else top_k) // chosen))  # routers look at two of a group
    return range(least, shape.experts, groups)


def experts_left(source: Source, options: ReduceOptions) -> tuple[Fewer, str | None]:
    """Number of experts that every layer keeps, with a warning if there is reason for one.

    Raises:
        UsageError: so many are not possible, or none are that leave a file so small.
    """
    groups, _ = source.architecture.groups
    experts, counts = source.experts.shape.experts, possible_counts(source)
    if not counts:
        raise UsageError(f"{limits(source)} So there is nothing to take away.")
    if options.experts is not None:
        if options.experts not in counts:
            many = f"a multiple of {groups} from {counts[0]} to {counts[-1]}" if groups > 1 else _span(counts)
            raise UsageError(f"--experts {options.experts} of {experts}: it can be {many}. {limits(source)}")
        return Fewer(experts, options.experts, groups), None
    assert options.ratio is not None
    original = original_bytes(source)
    target = round(original * (1 - options.ratio))

    def size(kept: int) -> int:
        return CountedPlan(source, kept, options.shard_size).nbytes

    fitting = bisect_right(counts, target, key=size)
    if not fitting:
        least = size(counts[0])
        raise UsageError(
            f"{options.target_option} cannot be met by fewer experts: {counts[0]} of {experts} leave "
            f"{format_least_bytes(least)} of {format_bytes(original)}, so {options.target_limits(least, original)}. "
            f"{limits(source)} Other methods of compress make experts smaller."
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


def limits(source: Source) -> str:
    """Sentence that says why a layer cannot have fewer experts."""
    shape = source.experts.shape
    groups, chosen = source.architecture.groups
    if groups == 1 and shape.top_k == 1:
        return f"A router needs two of {shape.experts} experts at least."
    if groups == 1:
        return f"The router takes {shape.top_k} of {shape.experts} experts for every token."
    return (
        f"The router takes {shape.top_k} of {shape.experts} experts for every token, from the best {chosen} of "
        f"{groups} groups, each of which keeps as many, two at least."
    )
