"""Layers between being encoded and being written.

Which form each delta gets is known by now. The calibration text goes through the model once more; as it leaves a layer
its deltas are encoded into a file of the work directory, and when the layer's shard has been written that file is gone.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from moetool.bases.layer_base import LayerBase, base_path, base_tensors
from moetool.calibration.peers import Owned, Peers
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.writer import CheckpointWriter, TensorSpec
from moetool.compress.owning import encoded_names, encoding_owners
from moetool.format.layout import LayerLayout
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job

Named = Iterator[tuple[str, Tensor]]
# Of a layer, the same loaded, those deltas that this process has; names relative to the experts.
Encode = Callable[[int, nn.Module, LayerLayout, Owned], Named]


class EncodedFile:
    """The encoded deltas of one layer, those that one process has."""

    def __init__(self, work: Path, reader: ExpertReader, layer: int, layout: LayerLayout, owned: Owned) -> None:
        self._prefix, own = reader.architecture.experts_prefix(layer), encoded_names(layout, owned)
        specs = [
            TensorSpec(self._prefix + name, stored.dtype or reader.dtype, stored.shape)
            for name, stored in layout.delta_tensors()
            if name in own
        ]
        self._writer = CheckpointWriter(work / f"encoded-{layer:05d}-{owned.peers.rank}", [specs]) if specs else None

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return 0 if self._writer is None else self._writer.nbytes

    def write(self, encoded: Named) -> None:
        """Write all, one tensor at a time, atomically."""
        tensors = ((self._prefix + name, tensor) for name, tensor in encoded)
        if self._writer is None:
            assert not list(tensors)
        else:
            self._writer.write_shard(0, tensors)


def encoded_files(work: Path, layer: int) -> list[Path]:
    """The files of a layer's encoded deltas, by however many processes they were written."""
    return sorted(work.glob(f"encoded-{layer:05d}-*/*.safetensors"))


def encoded_bytes(reader: ExpertReader, output: int, shard_size: int) -> int:
    """Most bytes of encoded layers that wait at any time, for an `output` of so many: those of one shard."""
    layer = reader.shape.experts * reader.shape.expert_parameters * reader.dtype.itemsize
    return min(output, max(shard_size, layer))


class Encoding:
    """Encodes the layers of a job as their shards come to be written: a `Making`."""

    def __init__(
        self,
        job: Job,
        layouts: Mapping[int, LayerLayout],
        encode: Encode,
        calibrated: CalibratedJob | None = None,
        *,
        whole_experts: bool = False,
    ) -> None:
        """`encode` runs a layer that is loaded for it (`sweep.forward`); without a text none is, and it is given
        an empty module. With a text all processes encode each layer together, else each those of its shards.
        With `whole_experts` none of them shares an expert with another."""
        self._job, self._layouts, self._encode = job, layouts, encode
        self._whole_experts = whole_experts
        self._pass = calibrated.forward_pass(self._visit, layouts, name="encode") if calibrated else None
        self.steps = len(layouts) if self._pass is None else self._pass.steps

    @property
    def is_chain(self) -> bool:
        return self._pass is not None

    def _visit(self, layer: int, module: nn.Module) -> None:
        job, layout = self._job, self._layouts[layer]
        owned = Owned(layout.shape, Peers())
        if self._pass is not None:
            owned = encoding_owners(layout, job.ranks, whole_experts=self._whole_experts)
        file = EncodedFile(job.work, job.source.experts, layer, layout, owned)
        file.write(self._encode(layer, module, layout, owned))

    def make(self, layer: int) -> None:
        """Encode a layer, and all before it, if that is not done."""
        if layer not in self._layouts:
            return
        if self._pass is not None:
            self._pass.through(layer)
        elif self._job.unit(f"encode/{layer}", steps=1):
            self._visit(layer, nn.Module())
            self._job.finish(f"encode/{layer}", made=self._made(layer))
            self._job.progress.advance()

    def _made(self, layer: int) -> list[Path]:
        """All that lies in the work directory with the layer's number in its name."""
        tops = self._job.work.glob(f"*-{layer:05d}*")
        return [path for top in tops for path in [top, *top.rglob("*")] if path.is_file()]

    def spent(self, layer: int) -> list[Path]:
        """What the file that the layer is written to makes superfluous."""
        return encoded_files(self._job.work, layer)

    def tensors(self, layer: int, layout: LayerLayout) -> Named:
        """All tensors of a layer's experts, by full name on disk."""
        job = self._job
        yield from base_tensors(job.source.experts, layer, layout, LayerBase.load(base_path(job.work, layer)))
        for path in encoded_files(job.work, layer):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    yield name, file.get_tensor(name).clone()
