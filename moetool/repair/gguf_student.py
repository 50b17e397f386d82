"""A GGUF file that is repaired: its codes and types stay, and its scales, norms and routers learn."""

import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from moetool.checkpoint.files import save_tensors, write_bytes
from moetool.checkpoint.gguf_model import GgufModel
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.phases import WRITE
from moetool.errors import UsageError, VerificationError
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.modelfile import generation_defaults, modelfile
from moetool.export.gguf.options import layer_types
from moetool.export.gguf.rescaling import block_type, prove_rescaled, write_rescaled
from moetool.format.gguf.words import EMBEDDINGS, EXPERTS, GATE_AND_UP, HEAD, MODEL, MODELFILE, layer_in_file
from moetool.job.job import Job, Source
from moetool.job.options import context_length
from moetool.job.progress import phase
from moetool.job.result import CalibrationFacts, Sizes
from moetool.job.workspace import REBUILT
from moetool.job.writing import record_origin
from moetool.repair.costs import TrainedModel
from moetool.repair.options import RepairOptions, Trained
from moetool.repair.sources import GgufInput
from moetool.repair.students import Student
from moetool.repair.teaching import TaughtByDense, TaughtByMoE, Teaching
from moetool.runtime.building import recomputes
from moetool.runtime.loading import loading_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moetool.repair.trainee import Trainee
    from moetool.training.masters import Blocks

_ROUTER = "ffn_gate_inp.weight"


class GgufStudent(Student):
    """Trains scales, norms and routers of a GGUF file, and writes the file again with these."""

    def __init__(self, source: GgufInput, original: Checkpoint, options: RepairOptions) -> None:
        super().__init__(source.checkpoint, _teaching(source, original, options), options)
        self.source, self._original = source, original

    @cached_property
    def _file(self) -> GgufModel:
        return GgufModel(self.source.path, is_exact=True)

    @property
    def trains(self) -> Trained:
        wanted = self.options.train
        if wanted in ("lora", "all"):
            raise UsageError(
                f"--train {wanted}: codes in a GGUF file stay as they are. Use --train small, or leave it out."
            )
        if wanted == "routers" and not self.teaching.has_routers:
            raise UsageError("--train routers: this model has no routers. Leave it out.")
        return "routers" if wanted == "routers" else "small"

    @cached_property
    def trained(self) -> TrainedModel:
        trained, routers = 0, self.trains == "routers"
        for name, tensor in self._file.tensors.items():
            kind, size = block_type(tensor), int(tensor.n_elements)
            if routers:
                trained += size * name.endswith(_ROUTER)
            else:
                trained += size // kind.numbers if kind is not None else size * (tensor.tensor_type.name == "F32")
        # Beside the model the gradient of a matrix, and its product with that: of all experts of a layer together.
        largest = max(int(tensor.n_elements) for tensor in self._file.tensors.values())
        together = len(self.source.model.moe.shape.entering) if self.source.model.moe is not None else 1
        loaded = loading_memory(self.source.checkpoint, torch.float32).needed
        return TrainedModel(loaded + 2 * torch.float32.itemsize * together * largest, trained, 0)

    @property
    def input_bytes(self) -> int:
        return self.source.path.stat().st_size

    @property
    def output_bytes(self) -> int:
        return self.input_bytes

    @property
    def scratch_bytes(self) -> int:
        return sum(4 * math.prod(info.shape) for info in self.source.checkpoint.tensors.values())

    @cached_property
    def streamed(self) -> TrainedModel | None:
        if not recomputes(self.checkpoint):
            return None
        changes = self.trains == "small"
        found = TrainedModel.streamed(self.checkpoint, self.trained.trained, changes=changes)
        ends = 2 * loading_memory(self.checkpoint, torch.float32).outside  # embeddings and head are changed, too
        return replace(found, loaded=found.loaded + ends * changes)

    def trainee(self, job: Job[Any], *, streams: bool) -> "Trainee":
        from moetool.repair.trainee import Trainee
        from moetool.repair.training import choose
        from moetool.training.masters import block_factors, copies
        from moetool.training.weights import open_weights

        source, directory = self.source.model, self._directory(job)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._file.write(directory, weights=True)
        family = source.dense if source.experts is None else source.experts
        assert family is not None
        weights = open_weights(
            Checkpoint.open(directory), family.architecture, self._paths, job.device, streams=streams
        )
        told = {*source.constants, *chain(*source.numbers.values())}  # which stay in the metadata
        chosen = {name: own for name, own in choose(weights.model, self.trains).items() if name not in told}
        masters = copies(weights.keep(chosen), torch.float32)
        if self.trains == "small":
            masters |= block_factors(weights.model, self._blocks(weights.model))
        return Trainee(weights, masters)

    @property
    def _paths(self) -> list[str]:
        source = self.source.model
        return [source.layer.format(layer=layer) for layer in range(source.layers)]

    def _blocks(self, model: "PreTrainedModel") -> "Iterator[Blocks]":
        """Iterate over the model's matrices that the file can hold in block types, with the block size of each in
        numbers, `None` where it has another type there."""
        from moetool.runtime.modules.insertion import fused_experts, paths_in
        from moetool.training.masters import Blocks

        source, moe = self.source.model, self.source.model.moe
        places = paths_in(model, self._paths)
        for layer, path in enumerate(self._paths):
            module, changes = model.get_submodule(places[path]), source.changes(layer)
            for inside, names in source.projections(layer).items():
                is_transposed = inside in changes and changes[inside].is_transposed
                yield Blocks(module.get_submodule(inside).weight, self._block(names), is_transposed)
        for layer, roles, weight in fused_experts(model, moe) if moe is not None else ():
            names = [layer_in_file(layer, EXPERTS[role]) for role in roles]
            if (joined := layer_in_file(layer, GATE_AND_UP)) in self._file.tensors and "down" not in roles:
                names = [joined]
            yield Blocks(weight, self._block(names), moe is not None and moe.in_memory.is_transposed)
        yield Blocks(model.get_input_embeddings().weight, self._block([EMBEDDINGS]))
        yield Blocks(getattr(model.get_output_embeddings(), "weight", None), self._block([HEAD]))

    def _block(self, names: Collection[str]) -> int | None:
        """Numbers of the largest blocks of some tensors of the file; `None` unless all are there and have blocks."""
        kinds = [block_type(self._file.tensors[name]) for name in names if name in self._file.tensors]
        sizes = [kind.numbers for kind in kinds if kind is not None]
        return max(sizes) if sizes and len(sizes) == len(names) else None

    def write(self, job: Job[Any], trainee: "Trainee", facts: CalibrationFacts) -> None:
        directory, file = self._directory(job), job.output / MODEL
        trained = self._trained(directory, trainee)
        with phase(job.progress, WRITE, len(self._file.tensors), "tensors"):
            write_rescaled(self.source.path, GgufSource.of(trained), file, job.progress)
        if self.options.proof:
            worst = prove_rescaled(file, trained)
            job.progress.log(
                f"Read back, all tensors of the file are what was trained, within {worst:.1e} of their size."
            )
        given = generation_defaults(self._original.path)  # of which a file says nothing
        has_template = (directory / "chat_template.jinja").exists()
        said = modelfile(MODEL, context_length(trained.settings), given, has_template=has_template)
        write_bytes(job.output / MODELFILE, said.encode())
        shutil.rmtree(directory)
        files = [file, job.output / MODELFILE]
        types = layer_types({name: tensor.tensor_type.name.lower() for name, tensor in self._file.tensors.items()})
        record_origin(job, files=files, calibration=facts, layers=types)

    def _trained(self, directory: Path, trainee: "Trainee") -> Checkpoint:
        """The file's model in a directory, each part of which is written again with what has been trained of it."""
        for layer, part in enumerate(Checkpoint.open(directory).weight_files, -1):
            held, tensors = trainee.trained(layer), load_file(part)
            # What transformers renames is not always so called in files: Kimi Linear's first layer, without experts.
            made = {**held, **trainee.on_disk(held)}
            if changed := made.keys() & tensors.keys():
                tensors |= {name: made[name].contiguous() for name in changed}
                part.unlink()
                save_tensors(part, tensors)
        return Checkpoint.open(directory)

    @staticmethod
    def _directory(job: Job[Any]) -> Path:
        """The file's model as a checkpoint in fp32, for as long as the job takes."""
        return job.work / REBUILT

    def verify(self, output: Path) -> Sizes:
        after = GgufModel(output / MODEL).tensors
        for name, tensor in self._file.tensors.items():
            found = after.get(name)
            if (
                found is None
                or found.tensor_type != tensor.tensor_type
                or found.shape.tolist() != tensor.shape.tolist()
            ):
                raise VerificationError(f"{output / MODEL} lacks {name} as it is in {self.source.path}.")
        return Sizes(self.input_bytes, (output / MODEL).stat().st_size)


def _teaching(source: GgufInput, original: Checkpoint, options: RepairOptions) -> Teaching:
    if (reader := source.model.experts) is None:
        return TaughtByDense(source.checkpoint, original, options)
    return TaughtByMoE(Source(source.model.checkpoint, reader.architecture, reader), original, options)
