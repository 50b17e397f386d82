"""Matrices in codes on even grids as an engine stores them, the codes being the nearest ones or chosen on a text."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from moetool.architectures import Architecture, Role
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.peers import Owned, owners
from moetool.calibration.projection_grams import ProjectionGrams
from moetool.calibration.row_moments import row_moments_path
from moetool.checkpoint.writer import TensorSpec, check_finite
from moetool.compress.coding_text import CodingText
from moetool.compress.encoded_layers import EncodedLayers, Named, write_encoded
from moetool.export.blocks.blocked import Blocked
from moetool.export.blocks.coding import block_codes, expert_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.choosing.projections import projection_codes
from moetool.export.choosing.written import WatchedModule
from moetool.format.blocks import BlockLayout
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, to_cpu


class Packing(ABC):
    """How an engine stores matrices in codes on even grids.

    Attributes:
        bits: of a code.
        group: inputs that share a scale.
        dtype: of the scales.
    """

    def __init__(self, architecture: Architecture, bits: int, group: int, dtype: torch.dtype) -> None:
        self.architecture, self.bits, self.group, self.dtype = architecture, bits, group, dtype

    @property
    @abstractmethod
    def layout(self) -> BlockLayout:
        """Return the layout of the codes: their levels, and what the numbers of a group share."""

    @abstractmethod
    def name(self, layer: int, expert: int, role: Role) -> str:
        """Name of the tensor that would hold an expert's matrix in full; it ends in `weight`."""

    @abstractmethod
    def parts(self, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of the tensors of a matrix `[out, in]`, by what stands in a name for `weight`."""

    @abstractmethod
    def packed(self, codes: Tensor, scales: Tensor, minima: Tensor) -> dict[str, Tensor]:
        """The tensors of a matrix.

        Args:
            codes: `[out, in]` uint8, the indices of their levels.
            scales: `[out, in / group]`, in the dtype in which they are stored.
            minima: of the same shape and dtype.
        """

    def specs(self, name: str, shape: tuple[int, int]) -> list[TensorSpec]:
        """The tensors in the place of a matrix `[out, in]` of that name."""
        return [TensorSpec(part_name(name, part), *own) for part, own in self.parts(shape).items()]

    def named(self, name: str, blocked: Blocked) -> Named:
        """Yield the tensors in the place of a matrix of that name, on the CPU."""
        codes, scales, minima = (own.T.contiguous() for own in (blocked.codes, blocked.d, blocked.dmin))
        for part, tensor in self.packed(codes, scales.to(self.dtype), minima.to(self.dtype)).items():
            yield part_name(name, part), to_cpu(tensor)

    def nearest(self, name: str, matrix: Tensor) -> Named:
        """Yield the tensors in the place of a matrix `[out, in]` of that name, with the codes nearest to it. Raises
        `InvalidInputError` for numbers that are not finite."""
        check_finite(name, matrix)
        return self.named(name, block_codes(matrix, self.layout))


def part_name(weight: str, part: str) -> str:
    """`model.layers.0.mlp.experts.3.up_proj.weight_packed`, of the matrix `….up_proj.weight`."""
    return weight.removesuffix("weight") + part


PackingIn = Callable[[int, Role], Packing]  # of the experts of a layer in a role


class PackedBeside(Protocol):
    """The matrices beside the experts that go into codes on a text, too."""

    def seen(self, layer: int) -> Sequence[str]:
        """Names of those of a layer."""

    def watched(self, layer: int, module: nn.Module) -> Mapping[str, WatchedModule]:
        """Return, by path, the linear modules of a loaded layer that they are the weights of."""

    def read(self, name: str) -> Tensor:
        """The matrix `[out, in]` of a name, as it is stored."""

    def packing(self, name: str) -> Packing:
        """How the matrix of a name is stored."""


class PackedLayers(EncodedLayers):
    """Layers whose codes are chosen on a text: on what each expert is given, for what the loss sees; and so those of
    matrices beside the experts, if there are any."""

    def __init__(
        self,
        job: Job,
        text: CodingText,
        calibrated: CalibratedJob,
        packing: PackingIn,
        beside: PackedBeside | None = None,
    ) -> None:
        """Layers of the job's input, each expert's matrix by itself. With matrices `beside` these, gradients have told
        how errors in their rows count together (`row_moments_path`)."""
        self._text, self._calibrated, self._packing, self._beside = text, calibrated, packing, beside
        layers = job.source.experts.moe_layers if beside is None else range(job.source.architecture.layers)
        super().__init__(job, layers, calibrated)

    def spent(self, layer: int) -> list[Path]:
        moments = row_moments_path(self._job.work, layer)
        return [*super().spent(layer), *([moments] if moments.exists() else [])]

    def _visit(self, layer: int, module: nn.Module) -> None:
        job, calibrated = self._job, self._calibrated
        reader, sweep = job.source.experts, calibrated.sweep
        watched = {} if self._beside is None else self._beside.watched(layer, module)
        inputs = ProjectionGrams(layer, {path: own.module for path, own in watched.items()}, sweep, job.device)
        owned, grams, specs = Owned(reader.shape, job.ranks), None, list[TensorSpec]()
        with inputs.watching():
            if reader.has(layer):
                grams = self._text.grams(calibrated, layer, module, owned)
            else:
                sweep.forward(layer, module)
        inputs.reduce(job.ranks)
        if grams is not None:
            for expert, role in product(range(reader.shape.experts), reader.shape.roles):
                if owned.has(role, expert):
                    packing = self._packing(layer, role)
                    specs += packing.specs(packing.name(layer, expert, role), reader.shape.matrix(role))
        mine = self._shared_out(watched)
        for name, matrix in (pair for path in mine for pair in watched[path].shapes.items()):
            assert self._beside is not None
            specs += self._beside.packing(name).specs(name, matrix)
        experts = iter(()) if grams is None else self._experts(layer, module, grams, owned)
        beside = self._matrices(layer, {path: list(watched[path].shapes) for path in mine}, inputs)
        write_encoded(job.work, layer, owned.peers.rank, specs, chain(beside, experts))

    def _shared_out(self, watched: Mapping[str, WatchedModule]) -> list[str]:
        """Paths of the modules whose matrices this process codes."""
        ranks = self._job.ranks
        costs = [float(sum(map(math.prod, own.shapes.values()))) for own in watched.values()]
        shares = zip(watched, owners(costs, ranks.size), strict=True)
        return [path for path, rank in shares if rank == ranks.rank]

    def _matrices(self, layer: int, named: Mapping[str, Sequence[str]], inputs: ProjectionGrams) -> Named:
        """Matrices beside the experts; of a module that never runs the nearest codes."""
        job, beside = self._job, self._beside
        if beside is None:
            return
        left = [name for names in named.values() for name in names]

        def matrix(name: str) -> tuple[Tensor, BlockLayout]:
            return beside.read(name), beside.packing(name).layout

        for name, blocked in projection_codes(inputs, named, matrix, row_moments_path(job.work, layer), job.device):
            left.remove(name)
            yield from beside.packing(name).named(name, blocked)
        for name in left:
            yield from beside.packing(name).nearest(name, beside.read(name).to(job.device))

    def _experts(self, layer: int, module: nn.Module, grams: InputGramCollector, owned: Owned) -> Named:
        reader = self._job.source.experts
        weights = self._calibrated.weights(layer, module)
        metric = self._text.metric(self._calibrated, layer, grams, weights)

        def matrix(expert: int, role: Role) -> tuple[str, Role, Tensor, BlockLayout]:
            packing, whole = self._packing(layer, role), weights(expert, role)
            return packing.name(layer, expert, role), role, whole.to(self._job.device), packing.layout

        for expert in (expert for experts in grams.sets() for expert in experts):
            own = metric.of(expert)
            for roles in (roles for roles in reader.shape.groups if owned.has(roles[0], expert)):
                inputs = PreparedGram.of(grams.gram(expert, roles[0]))
                coded = expert_codes((matrix(expert, role) for role in roles), inputs, own)
                for role, (name, blocked) in zip(roles, coded, strict=True):
                    yield from self._packing(layer, role).named(name, blocked)
