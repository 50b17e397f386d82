"""Experts in whole codes as an engine stores them, the codes being the nearest ones or chosen on a text."""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from moetool.architectures import Architecture, Role
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.peers import Owned
from moetool.checkpoint.writer import TensorSpec
from moetool.compress.coding_text import CodingText
from moetool.compress.encoded_layers import EncodedLayers, Named, write_encoded
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, to_cpu
from moetool.numerics.error_feedback import Coded
from moetool.numerics.output_codes import coded_for_outputs, coded_in_turn
from moetool.numerics.row_feedback import RowFeedback
from moetool.numerics.whole_codes import WholeCodes, decode_whole, quantize_whole
from moetool.representations.measured import NOTHING, Measured


def whole_codes(
    matrix: Tensor, bits: int, group: int, dtype: torch.dtype, measured: Measured = NOTHING
) -> tuple[Tensor, Tensor]:
    """Codes `[out, in]` int8 and scales `[out, in / group]` of a matrix `[out, in]`.

    Args:
        matrix: floating and finite.
        bits: of a code.
        group: inputs that share a scale.
        dtype: of the scales.
        measured: the inputs, on which codes then make good for each other's errors and scales are fitted to them; with
            a metric of outputs, codes of other rows, too.
    """

    def start(rows: Tensor) -> Coded:
        codes, scales = quantize_whole(rows, bits, group, dtype, importance=measured.energy)
        return Coded(rows, scales, bits, codes)

    feedback, keeps_size = measured.with_feedback().feedback, measured.keeps_size
    if feedback is None:
        return quantize_whole(matrix, bits, group, dtype, importance=measured.energy)
    if measured.outputs is None:
        [found] = coded_for_outputs([start(matrix)], WholeCodes(), feedback, keeps_size=keeps_size)
        return found
    order = torch.arange(len(matrix), device=matrix.device)
    noise = torch.full((len(matrix),), WholeCodes.noise.get(bits, 0.0))
    rows = RowFeedback(measured.outputs, order, matrix.detach().float(), noise)
    return coded_in_turn(len(matrix), start, WholeCodes(), feedback, rows, keeps_size=keeps_size)


class Packing(ABC):
    """How an engine stores matrices in whole codes.

    Attributes:
        bits: of a code.
        group: inputs that share a scale.
        dtype: of the scales.
    """

    def __init__(self, architecture: Architecture, bits: int, group: int, dtype: torch.dtype) -> None:
        self.architecture, self.bits, self.group, self.dtype = architecture, bits, group, dtype

    @abstractmethod
    def name(self, layer: int, expert: int, role: Role) -> str:
        """Name of the tensor that would hold an expert's matrix in full; it ends in `weight`."""

    @abstractmethod
    def parts(self, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of the tensors of a matrix `[out, in]`, by what stands in a name for `weight`."""

    @abstractmethod
    def packed(self, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """The tensors of a matrix from its codes and scales (`whole_codes`)."""

    def specs(self, name: str, shape: tuple[int, int]) -> list[TensorSpec]:
        """The tensors in the place of a matrix `[out, in]` of that name."""
        return [TensorSpec(part_name(name, part), *own) for part, own in self.parts(shape).items()]

    def named(self, name: str, codes: Tensor, scales: Tensor) -> Named:
        """Yield the tensors in the place of a matrix of that name, on the CPU, from its codes and scales."""
        for part, tensor in self.packed(codes, scales).items():
            yield part_name(name, part), to_cpu(tensor)

    def nearest(self, name: str, matrix: Tensor) -> Named:
        """Yield the tensors in the place of a matrix `[out, in]` of that name, with the codes nearest to it."""
        return self.named(name, *whole_codes(matrix, self.bits, self.group, self.dtype))

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
        calibrated, reader, packing = self._calibrated, self._job.source.experts, self._packing
        code = partial(whole_codes, bits=packing.bits, group=packing.group, dtype=packing.dtype)
        weights = calibrated.weights(layer, module)
        metric = self._text.metric(calibrated, layer, grams, weights)
        for expert in (expert for experts in grams.sets() for expert in experts):
            own, errors = metric.of(expert), dict[Role, Tensor]()
            for roles in reader.shape.groups:
                if not owned.has(roles[0], expert):
                    continue
                given = Measured.on_inputs(grams.gram(expert, roles[0]))
                for role in roles:
                    matrix = weights(expert, role).to(self._job.device).float()
                    target = own.target(role, matrix, errors)
                    codes, scales = code(target, measured=replace(given, outputs=own.rows(role)))
                    errors[role] = matrix - decode_whole(codes, scales)
                    yield from packing.named(packing.name(layer, expert, role), codes, scales)
