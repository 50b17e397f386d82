"""Matrices in codes on even grids as an engine stores them, the codes being the nearest ones or chosen on a text."""

from abc import ABC, abstractmethod
from itertools import product

import torch
from torch import Tensor, nn

from moetool.architectures import Architecture, Role
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.peers import Owned
from moetool.checkpoint.writer import TensorSpec, check_finite
from moetool.compress.coding_text import CodingText
from moetool.compress.encoded_layers import EncodedLayers, Named, write_encoded
from moetool.export.blocks.blocked import Blocked
from moetool.export.blocks.coding import block_codes, expert_codes
from moetool.export.blocks.prepared_gram import PreparedGram
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

    def nearest_layer(self, job: Job, layer: int) -> Named:
        """Yield the tensors of all experts of a layer, with the codes nearest to their matrices."""
        reader = job.source.experts
        for expert, role in product(range(reader.shape.experts), reader.shape.roles):
            yield from self.nearest(self.name(layer, expert, role), reader.dense(layer, expert, role).to(job.device))


def part_name(weight: str, part: str) -> str:
    """`model.layers.0.mlp.experts.3.up_proj.weight_packed`, of the matrix `….up_proj.weight`."""
    return weight.removesuffix("weight") + part


class PackedLayers(EncodedLayers):
    """Layers whose codes are chosen on a text: on what each expert is given, for what the loss sees."""

    def __init__(self, job: Job, text: CodingText, calibrated: CalibratedJob, packing: Packing) -> None:
        """Layers of the job's input, each expert's matrix by itself."""
        self._text, self._calibrated, self._packing = text, calibrated, packing
        super().__init__(job, job.source.experts.moe_layers, calibrated)

    def _visit(self, layer: int, module: nn.Module) -> None:
        job, calibrated = self._job, self._calibrated
        reader = job.source.experts
        owned = Owned(reader.shape, job.ranks)
        grams = self._text.grams(calibrated, layer, module, owned)
        specs = [
            spec
            for expert in range(reader.shape.experts)
            for role in reader.shape.roles
            if owned.has(role, expert)
            for spec in self._packing.specs(self._packing.name(layer, expert, role), reader.shape.matrix(role))
        ]
        write_encoded(job.work, layer, owned.peers.rank, specs, self._chosen(layer, module, grams, owned))

    def _chosen(self, layer: int, module: nn.Module, grams: InputGramCollector, owned: Owned) -> Named:
        reader, packing = self._job.source.experts, self._packing
        weights = self._calibrated.weights(layer, module)
        metric = self._text.metric(self._calibrated, layer, grams, weights)

        def matrix(expert: int, role: Role) -> tuple[str, Role, Tensor, BlockLayout]:
            name, whole = packing.name(layer, expert, role), weights(expert, role)
            return name, role, whole.to(self._job.device), packing.layout

        for expert in (expert for experts in grams.sets() for expert in experts):
            own = metric.of(expert)
            for roles in (roles for roles in reader.shape.groups if owned.has(roles[0], expert)):
                inputs = PreparedGram.of(grams.gram(expert, roles[0]))
                for name, blocked in expert_codes((matrix(expert, role) for role in roles), inputs, own):
                    yield from packing.named(name, blocked)
