"""Plan of a result's weight files: which tensors lie in which shard, by layer and size limit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from moetool.checkpoint.writer import CheckpointWriter, TensorSpec
from moetool.format.layout import LayerLayout
from moetool.job.including import included_specs
from moetool.job.job import Source


class ShardPlan:
    """Assignment of tensors to shards: each shard takes as many layers as fit, in order.

    Args:
        units: by layer, the tensors to write; -1 stands for everything that belongs to no layer.
        shard_size: most bytes in a shard, if a layer is not larger.

    Attributes:
        units: as given.
        shards: indices of the units of each.
    """

    def __init__(self, units: Iterable[tuple[int, Sequence[TensorSpec]]], shard_size: int) -> None:
        self.units = list(units)
        self.shards: list[list[int]] = []
        size = 0
        for unit, (_, specs) in enumerate(self.units):
            nbytes = sum(spec.nbytes for spec in specs)
            if not self.shards or size + nbytes > shard_size:
                self.shards.append([])
                size = 0
            self.shards[-1].append(unit)
            size += nbytes

    def layers(self, shard: int) -> list[int]:
        """Numbers of the layers whose tensors lie in a shard, in order."""
        return [self.units[unit][0] for unit in self.shards[shard]]

    def specs(self, shard: int) -> list[TensorSpec]:
        """Names, dtypes and shapes of the tensors in a shard, in the order in which they are written."""
        return [spec for unit in self.shards[shard] for spec in self.units[unit][1]]

    def unit(self, layer: int) -> Sequence[TensorSpec]:
        """Names, dtypes and shapes of the tensors of one layer."""
        return next(specs for owner, specs in self.units if owner == layer)

    def writer(self, directory: Path) -> CheckpointWriter:
        """Make the writer of these shards in a directory."""
        return CheckpointWriter(directory, [self.specs(shard) for shard in range(len(self.shards))])

    @property
    def nbytes(self) -> int:
        """Exact size in bytes of all weight files together, headers included."""
        return self.writer(Path()).nbytes


class OutputPlan(ShardPlan):
    """The shards for given layouts of the MoE layers of a model that is otherwise left as it is."""

    def __init__(self, source: Source, layouts: Mapping[int, LayerLayout], shard_size: int) -> None:
        self.source, self.layouts = source, dict(layouts)
        super().__init__(_units(source, self.layouts), shard_size)


def _units(source: Source, layouts: Mapping[int, LayerLayout]) -> Iterator[tuple[int, list[TensorSpec]]]:
    """Everything outside the layers, then the layers in order; tensors that are not experts pass through."""
    architecture, tensors = source.architecture, source.checkpoint.tensors
    count = architecture.layers
    owners = {architecture.layer_prefix(layer): layer for layer in range(count)}
    lengths = {len(prefix) for prefix in owners}
    experts = source.experts.names
    joined = {layer: _joined(source, layer, layout) for layer, layout in layouts.items()}
    names: dict[int, list[str]] = {layer: [] for layer in range(-1, count)}
    for name in tensors:
        owner = next((owners[name[:length]] for length in lengths if name[:length] in owners), -1)
        if owner not in layouts or (name not in experts and name not in joined[owner]):
            names[owner].append(name)
    for layer, passed in names.items():
        passing = (TensorSpec(name, tensors[name].dtype, tensors[name].shape) for name in passed)
        specs = [spec for own in passing for spec in included_specs(source, own)]
        if layer in layouts:
            specs += source.experts.specs(layer, layouts[layer])
            if source.experts.layout(layer).is_extended and not layouts[layer].is_extended:
                specs += source.experts.shared_expert_specs(layer)
        if specs:
            yield layer, specs


def _joined(source: Source, layer: int, layout: LayerLayout) -> set[str]:
    """Native names of a shared expert that joins the routed ones on their base."""
    if not layout.is_extended or source.experts.layout(layer).is_extended:
        return set()
    return {spec.name for spec in source.experts.shared_expert_specs(layer)}
