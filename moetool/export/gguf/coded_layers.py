"""Layers of a GGUF file whose codes are chosen on what a text gives to every matrix.

The text goes through the model once, layer by layer. As it leaves a layer, the Gram matrices of all inputs in it are
known: the experts' by the tokens that each was given (`calibration.input_grams`), the others' by all. Where gradients
were taken to choose types, rows are coded in turn, each making good for the errors of those before it
(`numerics.row_feedback`). The layer's blocks wait in a file of the work directory until they are written.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.output_metric import ExpertMetric, LayerMetric
from moetool.calibration.projection_grams import ProjectionGrams
from moetool.calibration.row_moments import row_moments_path
from moetool.calibration.slopes import SlopeSamples
from moetool.checkpoint.files import save_tensors
from moetool.checkpoint.writer import check_finite
from moetool.export.blocks.coding import block_codes, expert_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.choosing.ends import Ends
from moetool.export.choosing.projections import projection_codes
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.packing import packed
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType
from moetool.format.gguf.words import EXPERTS, layer_in_file, layer_of
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job


def grams_of_experts(
    source: GgufSource, layer: int, device: torch.device, *, slopes: SlopeSamples | None = None
) -> InputGramCollector | None:
    """A collector of the inputs of a layer's experts, and of the `slopes` of their activations, if it is given those;
    `None` for a layer without."""
    if source.experts is None or layer not in source.experts.moe_layers:
        return None
    return InputGramCollector(source.experts.shape, device, slopes=slopes)


class CodedLayers:
    """Blocks of the tensors of a job's layers, chosen layer by layer as they come to be written.

    Attributes:
        steps: batches in all layers, for a progress bar.
    """

    def __init__(
        self,
        job: Job[GgufSource],
        calibrated: CalibratedJob,
        tensors: Sequence[GgufTensor],
        ends: Ends | None = None,
    ) -> None:
        """Of these tensors, which have types of blocks, on the job's text; with `ends`, embeddings and head are among
        them, and gradients were taken."""
        self._ends = ends
        self._job, self._sweep, self._tensors = job, calibrated.sweep, {tensor.name: tensor for tensor in tensors}
        self._pass = calibrated.forward_pass(self._visit, range(job.source.layers), name="encode")
        self.steps = self._pass.steps

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Iterate over the coded blocks of a tensor, `[rows, bytes]` uint8, after coding all layers up to its own."""
        layer = layer_of(name)
        if layer < 0:
            assert self._ends is not None
            kind = self._kind(name)
            yield from (packed(blocked, kind) for blocked in self._ends.coded(self._tensors[name], kind))
            return
        self._pass.through(layer)
        with safe_open(self._file(layer), "pt") as file:
            yield file.get_tensor(name)

    def spent(self, layer: int) -> list[Path]:
        """The files that are not needed once a layer's tensors are in the output: their blocks, and what these were
        chosen by."""
        return [path for path in (self._file(layer), row_moments_path(self._job.work, layer)) if path.exists()]

    def _file(self, layer: int) -> Path:
        return self._job.work / f"blocks-{layer:05d}.safetensors"

    def _kind(self, name: str) -> BlockType:
        return BLOCK_TYPES[self._tensors[name].type]

    def _visit(self, layer: int, module: nn.Module) -> None:
        job, source = self._job, self._job.source
        watched = source.watched(layer, module)
        named = {path: [name for name in own.shapes if name in self._tensors] for path, own in watched.items()}
        named = {path: names for path, names in named.items() if names}
        grams = ProjectionGrams(layer, {path: watched[path].module for path in named}, self._sweep, job.device)
        in_turn = self._ends is not None
        experts = grams_of_experts(source, layer, job.device, slopes=SlopeSamples() if in_turn else None)
        with grams.watching():
            self._sweep.forward(layer, module, [] if experts is None else [experts])
        moments = row_moments_path(job.work, layer) if in_turn else None
        coded = projection_codes(grams, named, self._matrix, moments, job.device)
        found = {name: packed(blocked, self._kind(name)) for name, blocked in coded}
        if experts is not None:
            found |= self._coded_experts(layer, experts)
        save_tensors(self._file(layer), found)

    def _matrix(self, name: str) -> tuple[Tensor, BlockType]:
        return torch.cat(list(self._tensors[name].parts())), self._kind(name)

    def _coded_experts(self, layer: int, grams: InputGramCollector) -> dict[str, Tensor]:
        reader, found = self._job.source.experts, defaultdict[str, list[Tensor]](list)
        assert reader is not None
        metric = None
        if grams.slopes is not None:
            job, weights = self._job, partial(reader.dense, layer)
            metric = LayerMetric.of_layer(job.work, layer, job.device, grams, reader.shape, weights)
        for roles in (reader.shape.entering, ("down",)):
            names = {role: name for role in roles if (name := layer_in_file(layer, EXPERTS[role])) in self._tensors}
            tensors = [self._tensors[name].parts() for name in names.values()]
            for expert, matrices in enumerate(zip(*tensors, strict=True)):
                inputs = PreparedGram.of(grams.gram(expert, roles[0]))
                if metric is None:
                    coded = self._coded(list(names.values()), matrices, inputs)
                else:
                    coded = self._coded_in_turn(names, matrices, inputs, metric.of(expert))
                for name, blocks in zip(names.values(), coded, strict=True):
                    found[name].append(blocks)
        return {name: torch.cat(blocks) for name, blocks in found.items()}

    def _coded_in_turn(
        self, names: Mapping[Role, str], matrices: Sequence[Tensor], inputs: PreparedGram | None, metric: ExpertMetric
    ) -> list[Tensor]:
        """Blocks of an expert's matrices on the same inputs, by role, of which each makes good for those before it."""
        placed = (
            (name, role, matrix.to(self._job.device), self._kind(name))
            for (role, name), matrix in zip(names.items(), matrices, strict=True)
        )
        return [packed(blocked, self._kind(name)) for name, blocked in expert_codes(placed, inputs, metric)]

    def _coded(self, names: Sequence[str], matrices: Sequence[Tensor], inputs: PreparedGram | None) -> list[Tensor]:
        """Blocks of matrices on the same inputs; those of one type go together."""
        found: dict[str, Tensor] = {}
        for kind in dict.fromkeys(map(self._kind, names)):
            own = {name: matrix for name, matrix in zip(names, matrices, strict=True) if self._kind(name) == kind}
            for name, matrix in own.items():
                check_finite(name, matrix)
            whole = torch.cat([matrix.to(self._job.device).float() for matrix in own.values()])
            blocks = packed(block_codes(whole, kind, inputs), kind)
            found |= zip(own, blocks.split([len(matrix) for matrix in own.values()]), strict=True)
        return [found[name] for name in names]
