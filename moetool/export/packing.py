"""Experts as pack-quantized tensors, their codes the nearest ones or chosen on a text."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.peers import Owned
from moetool.checkpoint.writer import TensorSpec
from moetool.compress.encoded_layers import EncodedLayers, Named, write_encoded
from moetool.format.compressed_tensors import PACKED, SCALE, SHAPE, packed_name
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job, to_cpu
from moetool.numerics.error_feedback import Coded
from moetool.numerics.output_codes import coded_for_outputs
from moetool.numerics.whole_codes import WholeCodes, pack_words, quantize_whole
from moetool.representations.measured import NOTHING, Measured


def packed_matrix(
    matrix: Tensor, bits: int, group: int, dtype: torch.dtype, measured: Measured = NOTHING
) -> dict[str, Tensor]:
    """The tensors in the place of a matrix `[out, in]`, by their part of the name.

    Args:
        matrix: floating and finite.
        bits: of a code.
        group: inputs that share a scale.
        dtype: of the scales.
        measured: the inputs, on which codes then make good for each other's errors and scales are fitted to them.
    """
    codes, scales = quantize_whole(matrix, bits, group, dtype, importance=measured.energy)
    if (feedback := measured.with_feedback().feedback) is not None:
        [(codes, scales)] = coded_for_outputs(
            [Coded(matrix, scales, bits, codes)], WholeCodes(), feedback, keeps_size=measured.keeps_size
        )
    return {PACKED: pack_words(codes, bits), SCALE: scales, SHAPE: torch.tensor(matrix.shape)}


def nearest_layer(job: Job, layer: int, bits: int, group: int) -> Named:
    """All experts of a layer with the nearest codes, by full name on disk."""
    reader = job.source.experts
    for expert in range(reader.shape.experts):
        for role in reader.shape.roles:
            name = reader.architecture.weight_name(layer, expert, role)
            yield from _named(
                name, packed_matrix(reader.dense(layer, expert, role).to(job.device), bits, group, reader.dtype)
            )


class PackedLayers(EncodedLayers):
    """Layers whose codes are chosen on the inputs that a text gives each expert (see `numerics.error_feedback`)."""

    def __init__(
        self, job: Job, calibrated: CalibratedJob, packed: Mapping[str, Sequence[TensorSpec]], bits: int, group: int
    ) -> None:
        """`packed` are the tensors in the place of each matrix, by its name."""
        self._calibrated, self._packed = calibrated, packed
        self._code = partial(packed_matrix, bits=bits, group=group, dtype=job.source.experts.dtype)
        super().__init__(job, job.source.experts.moe_layers, calibrated)

    def _visit(self, layer: int, module: nn.Module) -> None:
        job, calibrated = self._job, self._calibrated
        reader = job.source.experts
        owned = Owned(reader.shape, job.ranks)
        grams = InputGramCollector(reader.shape, job.device, owned, calibrated.experts_at_once)
        calibrated.sweep.forward(layer, module, [grams])
        specs = [
            spec
            for expert in range(reader.shape.experts)
            for role in reader.shape.roles
            if owned.has(role, expert)
            for spec in self._packed[reader.architecture.weight_name(layer, expert, role)]
        ]
        write_encoded(job.work, layer, owned.peers.rank, specs, self._chosen(layer, module, grams, owned))

    def _chosen(self, layer: int, module: nn.Module, grams: InputGramCollector, owned: Owned) -> Named:
        reader, weights, device = self._job.source.experts, self._calibrated.weights(layer, module), self._job.device
        for experts in grams.sets():
            for expert in experts:
                for roles in reader.shape.groups:
                    if not owned.has(roles[0], expert):
                        continue
                    measured = Measured(gram=grams.gram(expert, roles[0])).with_feedback()
                    for role in roles:
                        coded = self._code(weights(expert, role).to(device), measured=measured)
                        yield from _named(reader.architecture.weight_name(layer, expert, role), coded)


def _named(weight: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for part, tensor in tensors.items():
        yield packed_name(weight, part), to_cpu(tensor)
