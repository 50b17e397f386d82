"""Experts as pack-quantized tensors, their codes the nearest ones or chosen on a text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.peers import Owned
from moetool.checkpoint.writer import TensorSpec
from moetool.compress.coding_text import CodingText
from moetool.compress.encoded_layers import EncodedLayers, Named, write_encoded
from moetool.format.compressed_tensors import PACKED, SCALE, SHAPE, packed_name
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, to_cpu
from moetool.numerics.error_feedback import Coded
from moetool.numerics.output_codes import coded_for_outputs, coded_in_turn
from moetool.numerics.row_feedback import RowFeedback
from moetool.numerics.whole_codes import WholeCodes, decode_whole, pack_words, quantize_whole
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


def packed_matrix(codes: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """The tensors in the place of a matrix, by their part of the name, from its codes and scales (`whole_codes`)."""
    return {PACKED: pack_words(codes, bits), SCALE: scales, SHAPE: torch.tensor(codes.shape)}


def nearest_layer(job: Job, layer: int, bits: int, group: int) -> Named:
    """All experts of a layer with the nearest codes, by full name on disk."""
    reader = job.source.experts
    for expert in range(reader.shape.experts):
        for role in reader.shape.roles:
            matrix = reader.dense(layer, expert, role).to(job.device)
            coded = packed_matrix(*whole_codes(matrix, bits, group, reader.dtype), bits)
            yield from _named(reader.architecture.weight_name(layer, expert, role), coded)


class PackedLayers(EncodedLayers):
    """Layers whose codes are chosen on a text: on what each expert is given, for what the loss sees."""

    def __init__(
        self,
        job: Job,
        text: CodingText,
        calibrated: CalibratedJob,
        packed: Mapping[str, Sequence[TensorSpec]],
        bits: int,
        group: int,
    ) -> None:
        """`packed` are the tensors in the place of each matrix, by its name."""
        self._text, self._calibrated, self._packed, self._bits = text, calibrated, packed, bits
        self._code = partial(whole_codes, bits=bits, group=group, dtype=job.source.experts.dtype)
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
            for spec in self._packed[reader.architecture.weight_name(layer, expert, role)]
        ]
        write_encoded(job.work, layer, owned.peers.rank, specs, self._chosen(layer, module, grams, owned))

    def _chosen(self, layer: int, module: nn.Module, grams: InputGramCollector, owned: Owned) -> Named:
        calibrated, reader = self._calibrated, self._job.source.experts
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
                    codes, scales = self._code(target, measured=replace(given, outputs=own.rows(role)))
                    errors[role] = matrix - decode_whole(codes, scales)
                    coded = packed_matrix(codes, scales, self._bits)
                    yield from _named(reader.architecture.weight_name(layer, expert, role), coded)


def _named(weight: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for part, tensor in tensors.items():
        yield packed_name(weight, part), to_cpu(tensor)
