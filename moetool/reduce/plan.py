"""Tensors and config of a checkpoint with fewer experts."""

from collections.abc import Iterator, Sequence

from moetool.architectures.base import EXPERT_KEYS, whole_number
from moetool.architectures.described import language_entries, with_language_entries
from moetool.checkpoint.writer import TensorSpec
from moetool.job.job import Source
from moetool.job.shards import ShardPlan

_PREDICTION = "num_nextn_predict_layers"


class ReducedPlan(ShardPlan):
    """Assignment of tensors to shards if every MoE layer keeps `kept` experts; other tensors pass through.

    Attributes:
        kept: experts of every MoE layer.
    """

    def __init__(self, source: Source, kept: int, shard_size: int) -> None:
        self.source, self.kept = source, kept
        super().__init__(self._of_layers(), shard_size)

    def _of_layers(self) -> Iterator[tuple[int, list[TensorSpec]]]:
        """Everything outside the layers, then the layers in order."""
        source, tensors = self.source, self.source.checkpoint.tensors
        architecture, reader = source.architecture, source.experts
        count = architecture.layers
        owners = {architecture.layer_prefix(layer): layer for layer in range(count)}
        lengths = {len(prefix) for prefix in owners}
        gone = lost_names(source)
        specs: dict[int, list[TensorSpec]] = {layer: [] for layer in range(-1, count)}
        for name, info in tensors.items():
            layer = next((owners[name[:length]] for length in lengths if name[:length] in owners), -1)
            if name in reader.names or name in reader.biases or name in gone:
                continue
            shape = list(info.shape)
            if reader.has(layer) and architecture.is_router(layer, name):
                shape[expert_axis(info.shape, reader.shape.experts) or 0] = self.kept
            specs[layer].append(TensorSpec(name, info.dtype, tuple(shape)))
        for layer, own in specs.items():
            own += self._experts(layer) if reader.has(layer) else ()
            if own:
                yield layer, own

    def _experts(self, layer: int) -> Iterator[TensorSpec]:
        source, shape = self.source, self.source.experts.shape
        for roles in shape.groups:
            alone = (together[0] for together in source.architecture.together(roles))
            for role in alone if source.architecture.is_fused else roles:
                info = source.checkpoint.tensors[source.architecture.weight_name(layer, 0, role)]
                if source.architecture.is_fused:
                    yield TensorSpec(info.name, info.dtype, (self.kept, *info.shape[1:]))
                    if role in shape.biases:
                        bias = source.checkpoint.tensors[source.architecture.bias_name(layer, role)]
                        yield TensorSpec(bias.name, bias.dtype, (self.kept, *bias.shape[1:]))
                    continue
                for expert in range(self.kept):
                    name = source.architecture.weight_name(layer, expert, role)
                    yield TensorSpec(name, info.dtype, info.shape)


def expert_axis(shape: Sequence[int], experts: int) -> int | None:
    """Index of the dimension of a router's tensor that counts experts (`[experts, …]`, `[1, experts]`), or `None`."""
    if tuple(shape[:1]) == (experts,):
        return 0
    return 1 if tuple(shape) == (1, experts) else None


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


def reduced_config(source: Source, kept: int) -> dict[str, object]:
    """`config.json` with another number of experts, and without layers that predict further tokens if these go."""
    settings, count = source.checkpoint.settings, source.experts.shape.experts
    config = language_entries(source.checkpoint.config)
    counts = [key for key in EXPERT_KEYS if whole_number(settings, key) == count]
    named = {key for key in counts if key in config} or counts[:1]
    changes: dict[str, object] = dict.fromkeys(named, kept)
    if lost_names(source) and _PREDICTION in config:
        changes[_PREDICTION] = 0
    return with_language_entries(source.checkpoint.config, changes)
