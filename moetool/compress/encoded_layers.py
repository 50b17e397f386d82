"""Encoded layers in files of the work directory, until their shards are written; and who encodes which deltas.

Which form each delta gets is known by now. The calibration text goes through the model once more; as it leaves a layer
its deltas are encoded into a file of the work directory, and when the layer's shard has been written that file is gone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.bases.layer_base import LayerBase, base_path, base_tensors
from moetool.calibration.peers import Owned, Peers
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.writer import CheckpointWriter, TensorSpec
from moetool.costs.matrix_work import factorize
from moetool.format.layout import LayerLayout, delta_name, shared_name
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job
from moetool.numerics.work import Work
from moetool.representations import Representation


def encoding_owners(layout: LayerLayout, peers: Peers, *, whole_experts: bool) -> Owned:
    """Assign the deltas of a layer to processes by the work that encoding each takes on a text. The first process gets
    all of them where they share a tensor; with `whole_experts` all matrices of an expert go to one process."""
    if any(layout.shared_tensors(role) for role in layout.shape.roles):
        return Owned.by_first(layout.shape, peers)
    if whole_experts:
        return Owned.by_expert(layout.shape, peers)
    costs: dict[tuple[Role, int], float] = {}
    for expert, role, form in layout.deltas():
        costs[role, expert] = _effort(_work(form, layout.shape.matrix(role)))
    return Owned(layout.shape, peers, costs)


def encoded_names(layout: LayerLayout, owned: Owned) -> set[str]:
    """Names of the tensors of those deltas that this process encodes, relative to the experts."""
    names = {
        delta_name(expert, role, name)
        for expert, role, form in layout.deltas()
        if owned.has(role, expert)
        for name in form.tensors(layout.shape.matrix(role))
    }
    return names | {
        shared_name(role, name)
        for role in layout.shape.roles
        if owned.has(role, 0)
        for name in layout.shared_tensors(role)
    }


def _work(form: Representation, matrix: tuple[int, int]) -> Work:
    if form.is_whole:
        return Work(moved=8.0 * matrix[0] * matrix[1])
    return form.work(matrix, fed_back=True) + (factorize(matrix, form.directions) if form.directions else Work())


def _effort(work: Work) -> float:
    """About how many multiply-adds of a product would take as long."""
    decomposed = sum(9.0 * n**3 * count for n, count in work.eigen.items())
    decomposed += sum(n**3 / 3 * count for n, count in work.cholesky.items())
    return decomposed + sum(work.products.values()) + work.moved


Named = Iterator[tuple[str, Tensor]]
# Encodes those deltas of a layer that this process has: number, loaded layer, layout, matrices of this process. Names
# are relative to the experts.
Encode = Callable[[int, nn.Module, LayerLayout, Owned], Named]


def write_encoded(work: Path, layer: int, rank: int, specs: Sequence[TensorSpec], encoded: Named) -> None:
    """Write what one process has encoded of a layer, which may be nothing: one tensor at a time, atomically."""
    if specs:
        CheckpointWriter(work / f"encoded-{layer:05d}-{rank}", [specs]).write_shard(0, encoded)
    else:
        assert not list(encoded)


def encoded_files(work: Path, layer: int) -> list[Path]:
    """The files of a layer's encoded deltas, by however many processes they were written."""
    return sorted(work.glob(f"encoded-{layer:05d}-*/*.safetensors"))


def encoded_bytes(reader: ExpertReader, output: int, shard_size: int) -> int:
    """Most bytes of encoded layers that wait on the disk at any time, for an `output` of so many bytes: those of one
    shard."""
    layer = reader.shape.experts * reader.shape.expert_parameters * reader.dtype.itemsize
    return min(output, max(shard_size, layer))


class EncodedLayers(ABC):
    """Encodes the layers of a job as their shards come to be written: a `Making`."""

    def __init__(self, job: Job, layers: Collection[int], calibrated: CalibratedJob | None) -> None:
        """With a text all processes encode each of `layers` together; without one each encodes those of its shards."""
        self._job, self._layers = job, layers
        self._pass = calibrated.forward_pass(self._visit, layers, name="encode") if calibrated else None
        self.steps = len(layers) if self._pass is None else self._pass.steps

    @abstractmethod
    def _visit(self, layer: int, module: nn.Module) -> None:
        """Encode a layer and `write_encoded` it. With a text it is loaded, and to be run here; else it is empty."""

    @property
    def is_chain(self) -> bool:
        return self._pass is not None

    def make(self, layer: int) -> None:
        """Encode a layer unless the journal lists it as done; on a text, all layers before it come first."""
        if layer not in self._layers:
            return
        if self._pass is not None:
            self._pass.through(layer)
        elif self._job.unit(f"encode/{layer}", steps=1):
            self._visit(layer, nn.Module())
            self._job.finish(f"encode/{layer}", made=self._made(layer))
            self._job.progress.advance()

    def _made(self, layer: int) -> list[Path]:
        """The files of the work directory that have the layer's number in their name."""
        tops = self._job.work.glob(f"*-{layer:05d}*")
        return [path for top in tops for path in [top, *top.rglob("*")] if path.is_file()]

    def spent(self, layer: int) -> list[Path]:
        """The files that are not needed any more once the layer has been written."""
        return encoded_files(self._job.work, layer)

    def encoded(self, layer: int) -> Named:
        """Read the encoded tensors of a layer from the work directory, by their full names on disk."""
        for path in encoded_files(self._job.work, layer):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    yield name, file.get_tensor(name).clone()


class Encoding(EncodedLayers):
    """Encoded layers whose deltas take the forms of given layouts, written to a checkpoint layer by layer."""

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
        an empty module. With `whole_experts` no process shares an expert with another."""
        self._layouts, self._encode, self._whole_experts = layouts, encode, whole_experts
        super().__init__(job, layouts, calibrated)

    def _visit(self, layer: int, module: nn.Module) -> None:
        job, layout = self._job, self._layouts[layer]
        reader, owned = job.source.experts, Owned(layout.shape, Peers())
        if self.is_chain:
            owned = encoding_owners(layout, job.ranks, whole_experts=self._whole_experts)
        prefix, own = reader.architecture.experts_prefix(layer), encoded_names(layout, owned)
        specs = [
            TensorSpec(prefix + name, stored.dtype or reader.dtype, stored.shape)
            for name, stored in layout.delta_tensors()
            if name in own
        ]
        encoded = self._encode(layer, module, layout, owned)
        full = ((prefix + name, tensor) for name, tensor in encoded)
        write_encoded(job.work, layer, owned.peers.rank, specs, full)

    def tensors(self, layer: int, layout: LayerLayout) -> Named:
        """Iterate over the tensors of a layer's base and encoded deltas, by their full names on disk."""
        job = self._job
        yield from base_tensors(job.source.experts, layer, layout, LayerBase.load(base_path(job.work, layer)))
        yield from self.encoded(layer)
