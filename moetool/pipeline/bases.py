"""The shared base of each layer and what was measured to make it, as files of the work directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import ROLES, Role
from moetool.calibration.collectors import FisherCollector, LayerStatistics, UsageCollector
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.files import save_tensors
from moetool.methods.choices import Merge
from moetool.methods.merging import merge
from moetool.methods.pruning import PruningPlan, kept_channels, prune_base, spread
from moetool.pipeline.calibrated import CalibratedJob
from moetool.pipeline.job import to_cpu
from moetool.representations import Representation, parse_representation
from moetool.representations.dense import Dense


@dataclass(frozen=True)
class LayerBase:
    """A layer's base as it will be stored.

    Attributes:
        matrices: by role `[out, in]`, in the storage dtype, without pruned channels; what a compact form stands for, in
            fp32.
        channels: `[kept]` int64, the intermediate channels that are left.
        intermediate: how many there were.
        statistics: `None` if nothing was measured.
        compact: by role, the form a base is stored in, and its tensors, for those that are not dense.
    """

    matrices: dict[Role, Tensor]
    channels: Tensor
    intermediate: int
    statistics: LayerStatistics | None
    compact: Mapping[Role, tuple[Representation, dict[str, Tensor]]] = field(default_factory=dict)

    def full(self, role: Role) -> Tensor:
        """The base in fp32, with zeros where channels are gone: what differences are taken against."""
        return spread(self.matrices[role].float(), self.channels, self.intermediate, 1 if role == "down" else 0)

    def pruned(self, plan: PruningPlan) -> "LayerBase":
        """Without the statically weakest channels."""
        if not plan.static:
            return self
        assert self.statistics is not None
        energy = self.statistics.channel_energy[self.channels]
        kept = kept_channels(self.matrices["down"], energy, plan.static)
        matrices = prune_base(self.matrices, kept)
        return replace(self, matrices=matrices, channels=self.channels[kept])

    def stored_as(self, compact: Mapping[Role, tuple[Representation, dict[str, Tensor]]]) -> "LayerBase":
        """In compact forms; the matrices become what these stand for, so that differences make up for their errors."""
        decoded = {
            role: representation.decode(tensors, self._shape(role), self.matrices[role].dtype).float()
            for role, (representation, tensors) in compact.items()
        }
        return replace(self, matrices={**self.matrices, **decoded}, compact={**self.compact, **compact})

    def _shape(self, role: Role) -> tuple[int, int]:
        rows, columns = self.matrices[role].shape
        return rows, columns

    @property
    def representations(self) -> dict[Role, Representation]:
        """How the base of each role is stored."""
        return {role: self.compact[role][0] if role in self.compact else Dense() for role in ROLES}

    def save(self, path: Path) -> None:
        """Write atomically."""
        tensors: dict[str, Tensor] = {f"base.{role}": matrix for role, matrix in self.matrices.items()}
        tensors["channels"] = self.channels
        tensors["intermediate"] = torch.tensor(self.intermediate)
        for role, (representation, own) in self.compact.items():
            tensors.update({f"compact.{role}.{representation.spec}/{name}": tensor for name, tensor in own.items()})
        if self.statistics is not None:
            tensors.update(self.statistics.tensors())
        save_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path) -> "LayerBase":
        """Inverse of `save`."""
        tensors = load_file(path)
        statistics = LayerStatistics.from_tensors(tensors) if "tokens" in tensors else None
        matrices = {role: tensors[f"base.{role}"] for role in ROLES}
        compact: dict[Role, tuple[Representation, dict[str, Tensor]]] = {}
        for role in ROLES:
            own = {name.removeprefix(f"compact.{role}."): name for name in tensors if f"compact.{role}." in name}
            if own:
                spec = next(iter(own)).partition("/")[0]
                parts = {name.partition("/")[2]: tensors[full] for name, full in own.items()}
                compact[role] = parse_representation(spec), parts
        return cls(matrices, tensors["channels"], int(tensors["intermediate"]), statistics, compact)


BASE_FILES = "base-*.safetensors"


def base_path(work: Path, layer: int) -> Path:
    """Where a layer's base waits for the end of the job."""
    return work / f"base-{layer:05d}.safetensors"


def unweighted_base(experts: ExpertReader, layer: int) -> LayerBase:
    """The plain mean of a layer's experts; nothing is measured."""
    count = experts.shape.experts
    matrices = {
        role: merge("mean", role, [experts.dense(layer, expert, role) for expert in range(count)]).to(experts.dtype)
        for role in ROLES
    }
    return LayerBase(matrices, torch.arange(experts.shape.intermediate), experts.shape.intermediate, None)


def measured_base(calibrated: CalibratedJob, index: int, layer: nn.Module, method: Merge) -> LayerBase:
    """Run a loaded layer backwards, measure it, and merge its experts.

    The base is rounded to the storage dtype here, before any difference is taken against it, so that the differences
    absorb the rounding.
    """
    reader, experts = calibrated.job.source.experts, calibrated.experts(layer)
    usage = UsageCollector(reader.shape)
    fisher = FisherCollector(experts, reader.shape)
    calibrated.sweep.backward(index, layer, [usage, fisher])
    rows = {role: to_cpu(sums / calibrated.sweep.count).float() for role, sums in fisher.rows.items()}
    statistics = LayerStatistics(usage.tokens, rows, usage.channel_energy)
    matrices: dict[Role, Tensor] = {}
    for role in ROLES:
        weights = [
            reader.dense(index, expert, role).to(calibrated.job.device) for expert in range(reader.shape.experts)
        ]
        base = merge(method, role, weights, usage.tokens, (fisher.weighted, fisher.total))
        matrices[role] = to_cpu(base.to(reader.dtype))
    return LayerBase(matrices, torch.arange(reader.shape.intermediate), reader.shape.intermediate, statistics)
