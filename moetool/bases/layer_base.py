"""The shared base of each layer and what was measured to make it, as files of the work directory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import ROLES, MoEShape, Role
from moetool.bases.choices import Merge
from moetool.bases.merging import Matrices, Regression, merge
from moetool.bases.pruning import PruningPlan, kept_channels, prune_base, spread
from moetool.calibration.collectors import (
    BaseGramCollector,
    FisherCollector,
    LayerStatistics,
    RegressionCollector,
    UsageCollector,
)
from moetool.calibration.output_gradients import OutputGradients, metric_path
from moetool.calibration.peers import Peers
from moetool.checkpoint.experts import ExpertReader, Weights
from moetool.checkpoint.files import save_tensors
from moetool.format.layout import BASE_CHANNELS, NO_BASE, LayerLayout, base_name
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import to_cpu
from moetool.numerics.factorize import factorize
from moetool.numerics.rotation import Rotation
from moetool.representations import Measured, Representation, parse_representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank


@dataclass(frozen=True)
class LayerBase:
    """A layer's base as it will be stored.

    Attributes:
        matrices: by role that has a base `[out, in]`, in the storage dtype, without pruned channels; what a compact
            form stands for, in fp32.
        channels: `[kept]` int64, the intermediate channels that are left.
        intermediate: how many there were.
        statistics: `None` if nothing was measured.
        compact: by role, the form a base is stored in, and its tensors, for those that are not dense.
        rotation: by role, the seed of the rotation of inputs that a compact form is multiplied with, if any; `matrices`
            are what it comes to on inputs as they are.
    """

    matrices: dict[Role, Tensor]
    channels: Tensor
    intermediate: int
    statistics: LayerStatistics | None
    compact: Mapping[Role, tuple[Representation, dict[str, Tensor]]] = field(default_factory=dict)
    rotation: Mapping[Role, int] = field(default_factory=dict)

    def full(self, role: Role) -> Tensor:
        """The base in fp32, with zeros where channels are gone: what deltas are taken against."""
        return spread(self.matrices[role].float(), self.channels, self.intermediate, 1 if role == "down" else 0)

    def pruned(self, plan: PruningPlan) -> "LayerBase":
        """Remove the base's channels of least score on the calibration text, as many as the plan leaves out of the
        file."""
        if not plan.static:
            return self
        assert self.statistics is not None
        energy = self.statistics.channel_energy[self.channels]
        kept = kept_channels(self.matrices["down"], energy, plan.static)
        matrices = prune_base(self.matrices, kept)
        return replace(self, matrices=matrices, channels=self.channels[kept])

    def moved(self, matrices: Mapping[Role, Tensor]) -> "LayerBase":
        """Return a copy whose stored matrices `[out, in]` of some roles are replaced."""
        return replace(self, matrices={**self.matrices, **matrices})

    def encoded(
        self, forms: Mapping[Role, Representation], rotation: Mapping[Role, int] = MappingProxyType({})
    ) -> "LayerBase":
        """Encode the full matrices of the base in the given form of each role, with rotated inputs where a seed is
        given. Forms that change nothing are left out."""
        compact = {}
        for role, form in forms.items():
            if form.is_whole:
                continue
            matrix = self.full(role)
            turned = Rotation(matrix.shape[1], rotation[role])(matrix) if role in rotation else matrix
            compact[role] = form, form.encode(turned, self.matrices[role].dtype)
        return self.stored_as(compact, rotation)

    def stored_as(
        self,
        compact: Mapping[Role, tuple[Representation, dict[str, Tensor]]],
        rotation: Mapping[Role, int] = MappingProxyType({}),
    ) -> "LayerBase":
        """Encode the base in compact forms. Its matrices become what these decode to, so that deltas make up for their
        errors."""
        decoded = {
            role: _turned_back(
                representation.decode(tensors, self._shape(role), self.matrices[role].dtype).float(),
                rotation.get(role),
            )
            for role, (representation, tensors) in compact.items()
        }
        matrices, forms = {**self.matrices, **decoded}, {**self.compact, **compact}
        return replace(self, matrices=matrices, compact=forms, rotation={**self.rotation, **rotation})

    def _shape(self, role: Role) -> tuple[int, int]:
        rows, columns = self.matrices[role].shape
        return rows, columns

    @property
    def representations(self) -> dict[Role, Representation]:
        """The representation in which the base of each role is stored: `Dense` where no other was chosen."""
        return {role: self.compact[role][0] if role in self.compact else Dense() for role in self.matrices}

    def save(self, path: Path) -> None:
        """Write the base of the layer to a safetensors file, which is renamed into place when it is whole."""
        tensors = {f"base.{role}": matrix for role, matrix in self.matrices.items() if role not in self.compact}
        tensors["channels"] = self.channels
        tensors["intermediate"] = torch.tensor(self.intermediate)
        for role, (representation, own) in self.compact.items():
            tensors[f"shape.{role}"] = torch.tensor(self.matrices[role].shape)
            tensors.update({f"compact.{role}.{representation.spec}/{name}": tensor for name, tensor in own.items()})
            if role in self.rotation:
                tensors[f"rotation.{role}"] = torch.tensor(self.rotation[role])
        if self.statistics is not None:
            tensors.update(self.statistics.tensors())
        save_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path) -> "LayerBase":
        """Read a base from the file that `save` wrote."""
        tensors = load_file(path)
        statistics = LayerStatistics.from_tensors(tensors) if "tokens" in tensors else None
        matrices = {role: tensors[f"base.{role}"] for role in ROLES if f"base.{role}" in tensors}
        compact: dict[Role, tuple[Representation, dict[str, Tensor]]] = {}
        rotation = {role: int(tensors[f"rotation.{role}"]) for role in ROLES if f"rotation.{role}" in tensors}
        for role in ROLES:
            own = {name.removeprefix(f"compact.{role}."): name for name in tensors if f"compact.{role}." in name}
            if f"shape.{role}" in tensors:
                spec = next(iter(own), NO_BASE[role].spec).partition("/")[0]
                parts = {name.partition("/")[2]: tensors[full] for name, full in own.items()}
                compact[role] = form, parts = parse_representation(spec), parts
                rows, columns = tensors[f"shape.{role}"].tolist()
                matrix = form.decode(parts, (rows, columns), torch.float32).float()
                matrices[role] = _turned_back(matrix, rotation.get(role))
        return cls(matrices, tensors["channels"], int(tensors["intermediate"]), statistics, compact, rotation)


def _turned_back(matrix: Tensor, seed: int | None) -> Tensor:
    return matrix if seed is None else Rotation(matrix.shape[1], seed).back(matrix)


def base_path(work: Path, layer: int) -> Path:
    """Path in the work directory of the file that holds a layer's base until the job ends."""
    return work / f"base-{layer:05d}.safetensors"


def agreed(peers: Peers, path: Path, base: LayerBase) -> LayerBase:
    """The base that all processes have made, as the first of them has, which leaves it at `path`."""
    if peers.is_first:
        base.save(path)
    peers.barrier()
    return base if peers.is_first else LayerBase.load(path)


def unweighted_base(
    weights: Weights, shape: MoEShape, dtype: torch.dtype, method: Merge, *, shared_expert: bool = False
) -> LayerBase:
    """Merge a layer's experts into a base by a rule that needs no statistics, with the shared expert if it is to be on
    the base."""
    count = shape.experts + shared_expert
    matrices = {
        role: merge(method, role, Matrices(weights, role, count, torch.device("cpu"))).to(dtype) for role in shape.roles
    }
    return LayerBase(matrices, torch.arange(shape.intermediate), shape.intermediate, None)


def no_base(shape: MoEShape, dtype: torch.dtype) -> LayerBase:
    """A base of zeros, for experts that are stored each by itself."""
    matrices = {role: torch.zeros(shape.matrix(role), dtype=dtype) for role in shape.roles}
    compact = {role: (NO_BASE[role], dict[str, Tensor]()) for role in shape.roles}
    return LayerBase(matrices, torch.arange(shape.intermediate), shape.intermediate, None).stored_as(compact)


def measured_base(calibrated: CalibratedJob, index: int, layer: nn.Module, method: Merge, *, metric: bool) -> LayerBase:
    """Run a loaded layer backwards, measure it, and merge its experts; with `metric` also measure how errors at their
    output count together, and write that to its file in the work directory.

    The base is rounded to the storage dtype here, before any delta is taken against it, so that the deltas
    absorb the rounding.
    """
    job, reader = calibrated.job, calibrated.source.experts
    usage = UsageCollector(reader.shape)
    frequency = None
    if method == "fisher-frequency":  # the shares have to be known before gradients are summed
        calibrated.gradient_sweep.forward(index, layer, [first := UsageCollector(reader.shape)], keep=False)
        frequency = first.tokens.double() / first.tokens.sum()
    scale = calibrated.gradient_sweep.loss_scale
    fisher = FisherCollector(calibrated.model.matrix, reader.shape, job.device, frequency, scale)
    regression = RegressionCollector(reader.shape, job.device) if method == "regmean" else None
    outputs = OutputGradients(calibrated.gradient_sweep, job.device) if metric else None
    others = [own for own in (regression, outputs) if own is not None]
    calibrated.gradient_sweep.backward(index, layer, [usage, fisher, *others])
    if outputs is not None and job.ranks.is_first:
        outputs.save(metric_path(job.work, index))
    rows = {role: to_cpu(sums / calibrated.gradient_sweep.count).float() for role, sums in fisher.rows.items()}
    statistics = LayerStatistics(usage.tokens, rows, usage.channel_energy)
    sums = {} if regression is None else {role: Regression(*found) for role, found in regression.sums().items()}
    stored = calibrated.weights(index, layer)
    matrices: dict[Role, Tensor] = {}
    for role in reader.shape.roles:
        own = Matrices(stored, role, reader.shape.experts, job.device)
        base = merge(method, role, own, usage.tokens, (fisher.weighted, fisher.total), sums)
        matrices[role] = to_cpu(base.to(reader.dtype))
    return LayerBase(matrices, torch.arange(reader.shape.intermediate), reader.shape.intermediate, statistics)


def factored_base(calibrated: CalibratedJob, index: int, layer: nn.Module, base: LayerBase, ratio: float) -> LayerBase:
    """The base as low-rank factors with a share of `1 - ratio` of its parameters, by truncation-aware SVD (Table 6).

    The layer runs once more, to measure what the base is given.
    """
    reader, device = calibrated.source.experts, calibrated.job.device
    collector = BaseGramCollector(reader.shape, base.full("down").to(device))
    calibrated.gradient_sweep.forward(index, layer, [collector], keep=False)
    compact: dict[Role, tuple[Representation, dict[str, Tensor]]] = {}
    for role in reader.shape.roles:
        matrix = base.full(role).to(device)
        form = LowRank(base_rank(reader.shape.matrix(role), ratio))
        if role != "down":
            found = factorize(matrix, gram=collector.inputs.matrix(), rank=form.rank)
        elif collector.wide_down:
            found = factorize(matrix, output_gram=collector.down.matrix(), rank=form.rank)
        else:
            found = factorize(matrix, gram=collector.down.matrix(), rank=form.rank)
        encoded = form.encode(matrix, reader.dtype, Measured(factorization=found))
        compact[role] = form, {name: to_cpu(tensor) for name, tensor in encoded.items()}
    return base.stored_as(compact)


def base_tensors(
    reader: ExpertReader, layer: int, layout: LayerLayout, base: LayerBase
) -> Iterator[tuple[str, Tensor]]:
    """The base of every group that has one, and all experts of every group that has none, by full name on disk."""

    def own(role: Role, expert: int) -> Tensor:
        return reader.dense(layer, expert, role).to(reader.dtype)

    for roles in reader.shape.groups:
        if layout.weights[roles[0]] is None:
            yield from reader.native_tensors(layer, roles, reader.shape.experts, own)
        elif layout.has_dense_base(roles[0]):
            yield from reader.base_tensors(layer, roles, lambda role: base.matrices[role])
        else:
            yield from reader.placeholders(layer, roles)
    prefix = reader.architecture.experts_prefix(layer)
    if layout.is_pruned:
        yield prefix + BASE_CHANNELS, base.channels.int()
    for role, _ in layout.compact_bases():
        for name, tensor in base.compact[role][1].items():
            yield prefix + base_name(role, name), tensor


def stored_base(experts: ExpertReader, layer: int, statistics: LayerStatistics | None = None) -> LayerBase:
    """The base of a layer of a moetool checkpoint, for the roles that have one."""
    layout, prefix = experts.layout(layer), experts.architecture.experts_prefix(layer)
    matrices = {role: experts.base(layer, role) for role in experts.shape.roles if layout.weights[role] is not None}
    compact = {}
    for role, form in layout.compact_bases():
        names = form.tensors(layout.base_shape(role))
        compact[role] = form, {name: experts.checkpoint.read(prefix + base_name(role, name)) for name in names}
    return LayerBase(matrices, experts.base_channels(layer), experts.shape.intermediate, statistics, compact)


def base_rank(shape: tuple[int, int], ratio: float) -> int:
    """The rank whose factors have at most `1 - ratio` of the numbers of a matrix `[out, in]`, at least 1."""
    rows, columns = shape
    return max(1, int((1 - ratio) * rows * columns) // (rows + columns))
