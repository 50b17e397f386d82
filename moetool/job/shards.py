"""Plan of a result's weight files: which tensors lie in which shard, by layer and size limit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from moetool.architectures.layers import decoder_layer
from moetool.checkpoint.writer import CheckpointWriter, TensorSpec
from moetool.format.layout import LayerLayout
from moetool.format.marker import with_stored
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


def by_layer(specs: Iterable[TensorSpec], shard_size: int) -> ShardPlan:
    """The shards for tensors of any model, whose units are those of a decoder layer by their names, numbered as met."""
    units: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        units.setdefault(decoder_layer(spec.name), []).append(spec)
    return ShardPlan(enumerate(units.values()), shard_size)


class PassingPlan(ShardPlan):
    """The shards of a model some tensors of which pass through.

    Attributes:
        source: where they are from.
        stored: names of the tensors that pass through as the source stores them, in another tool's format.
    """

    def __init__(self, source: Source, units: Iterable[tuple[int, Sequence[TensorSpec]]], shard_size: int) -> None:
        self.source = source
        self.stored: set[str] = set()
        super().__init__(units, shard_size)

    def passing(self, name: str) -> list[TensorSpec]:
        """The tensors that are written for one that passes through: itself, or what stores it in few bits."""
        source = self.source
        if not source.keeps_stored or name not in source.checkpoint.forms:
            info = source.checkpoint.tensors[name]
            return included_specs(source, TensorSpec(name, info.dtype, info.shape))
        return self.passing_as_stored(*source.checkpoint.stored_parts([name]))

    def passing_as_stored(self, *names: str) -> list[TensorSpec]:
        """Tensors of the files that are written as they are, of those that are not yet."""
        held = {name: self.source.checkpoint.on_disk[name] for name in names if name not in self.stored}
        self.stored.update(names)
        return [TensorSpec(name, info.dtype, info.shape) for name, info in held.items()]

    def read(self, name: str) -> Tensor:
        """A tensor that passes through, as it is written. Raises `InvalidInputError` if the file has changed."""
        checkpoint = self.source.checkpoint
        return checkpoint.read_stored(name) if name in self.stored else checkpoint.read(name)


class OutputPlan(PassingPlan):
    """The shards for given layouts of the MoE layers of a model that is otherwise left as it is."""

    def __init__(self, source: Source, layouts: Mapping[int, LayerLayout], shard_size: int) -> None:
        self.layouts = dict(layouts)
        super().__init__(source, self._units(), shard_size)

    def _units(self) -> Iterator[tuple[int, list[TensorSpec]]]:
        """Everything outside the layers, then the layers in order; tensors that are not experts pass through."""
        source, layouts = self.source, self.layouts
        for layer, passed in _passed(source, layouts).items():
            specs = [spec for name in passed for spec in self.passing(name)]
            if layer in layouts:
                specs += source.experts.specs(layer, layouts[layer])
                if source.experts.layout(layer).is_extended and not layouts[layer].is_extended:
                    specs += source.experts.shared_expert_specs(layer)
            if specs:
                yield layer, specs

    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """The `config.json` to write, with what the source says of the format of stored tensors, if there are any."""
        stored = self.source.checkpoint.stored_entry
        return with_stored(config, stored) if self.stored and stored is not None else config


def _passed(source: Source, layouts: Mapping[int, LayerLayout]) -> dict[int, list[str]]:
    """By layer, −1 for none, names of the tensors that pass through."""
    architecture, experts = source.architecture, source.experts.names
    joined = {layer: _joined(source, layer, layout) for layer, layout in layouts.items()}
    names: dict[int, list[str]] = {layer: [] for layer in range(-1, architecture.layers)}
    for name in source.checkpoint.tensors:
        owner = architecture.layer_of(name)
        if owner not in layouts or (name not in experts and name not in joined[owner]):
            names[owner].append(name)
    return names


def _joined(source: Source, layer: int, layout: LayerLayout) -> set[str]:
    """Native names of a shared expert that joins the routed ones on their base."""
    if not layout.is_extended or source.experts.layout(layer).is_extended:
        return set()
    return {spec.name for spec in source.experts.shared_expert_specs(layer)}
