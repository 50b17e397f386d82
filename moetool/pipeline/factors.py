"""Every difference of a layer, factorised but not yet cut to a rank, as files of the work directory.

Which rank a matrix gets depends on all others, in all layers. So each layer leaves its spectra and bases here, and the
cut is made when the output is written.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moetool.architectures import ROLES, MoEShape, Role
from moetool.calibration.collectors import GramCollector
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.writer import CheckpointWriter, TensorSpec
from moetool.methods.choices import Svd
from moetool.methods.svd import LayerSvd
from moetool.numerics.factorize import Factorization
from moetool.pipeline.bases import LayerBase
from moetool.pipeline.calibrated import CalibratedJob
from moetool.pipeline.job import to_cpu
from moetool.representations.low_rank import break_even_rank

ENERGY = "energy"  # [3, experts] fp64: Σ over an expert's tokens of the squared norm of each role's input


class FactorFile:
    """The factorisations of one layer in one file."""

    def __init__(self, work: Path, layer: int, shape: MoEShape) -> None:
        self._writer = CheckpointWriter(work / f"factors-{layer:05d}", [list(_specs(shape))])
        self._shape = shape

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return self._writer.nbytes

    def write(self, factorizations: Iterator[tuple[Role, int, Factorization]], energy: Tensor) -> None:
        """Write all factorisations, one at a time, atomically."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for role, expert, factorization in factorizations:
                cap = break_even_rank(self._shape.matrix(role))
                yield f"{role}.{expert}.spectrum", to_cpu(factorization.spectrum[:cap]).double()
                yield f"{role}.{expert}.energy", torch.tensor([factorization.energy], dtype=torch.float64)
                yield f"{role}.{expert}.basis", to_cpu(factorization.basis[:, :cap]).float()
            yield ENERGY, energy

        self._writer.write_shard(0, tensors())

    def _read(self, name: str) -> Tensor:
        with safe_open(self._writer.file(0), "pt") as file:
            return file.get_tensor(name).clone()

    def input_energy(self) -> Tensor:
        """`[3, experts]` fp64; zero where no token came."""
        return self._read(ENERGY)

    def spectrum(self, role: Role, expert: int) -> tuple[Tensor, float]:
        """Squared whitened singular values, descending, and their sum including those that were not kept."""
        return self._read(f"{role}.{expert}.spectrum"), self._read(f"{role}.{expert}.energy").item()

    def read(self, role: Role, expert: int) -> Factorization:
        """One factorisation, up to break-even rank."""
        rows, columns = self._shape.matrix(role)
        spectrum, energy = self.spectrum(role, expert)
        return Factorization(
            spectrum=spectrum,
            energy=energy,
            basis=self._read(f"{role}.{expert}.basis"),
            side="left" if rows <= columns else "right",
        )


def _specs(shape: MoEShape) -> Iterator[TensorSpec]:
    for role in ROLES:
        matrix = shape.matrix(role)
        cap = break_even_rank(matrix)
        for expert in range(shape.experts):
            yield TensorSpec(f"{role}.{expert}.spectrum", torch.float64, (cap,))
            yield TensorSpec(f"{role}.{expert}.energy", torch.float64, (1,))
            yield TensorSpec(f"{role}.{expert}.basis", torch.float32, (min(matrix), cap))
    yield TensorSpec(ENERGY, torch.float64, (len(ROLES), shape.experts))


def measured_grams(
    calibrated: CalibratedJob, index: int, layer: nn.Module, base: LayerBase, *, keep: bool
) -> GramCollector:
    """Run a loaded layer forwards and collect the second moments its factors need; `keep` writes its output."""
    shape, device = calibrated.job.source.experts.shape, calibrated.job.device
    weights: Tensor = calibrated.experts(layer).down_proj  # type: ignore[assignment]
    down = base.full("down").to(device)
    grams = GramCollector(shape, lambda expert: weights[expert].float() - down, calibrated.tokens_routed(), device)
    calibrated.sweep.forward(index, layer, [grams], keep=keep)
    return grams


def factorizations(
    reader: ExpertReader, layer: int, base: LayerBase, svd: LayerSvd, device: torch.device
) -> Iterator[tuple[Role, int, Factorization]]:
    """Factorise every difference of a layer, one at a time."""
    for role in ROLES:
        full = base.full(role)
        for expert in range(reader.shape.experts):
            delta = (reader.dense(layer, expert, role).float() - full).to(device)
            yield role, expert, svd.factorize(role, expert, delta)


def write_factors(
    calibrated: CalibratedJob | None,
    reader: ExpertReader,
    work: Path,
    layer: int,
    base: LayerBase,
    method: Svd,
    grams: GramCollector | None,
) -> None:
    """Factorise a layer and leave the result in the work directory."""
    device = calibrated.job.device if calibrated is not None else torch.device("cpu")
    energy = grams.energy if grams is not None else torch.zeros(len(ROLES), reader.shape.experts, dtype=torch.float64)
    svd = LayerSvd(method, grams)
    FactorFile(work, layer, reader.shape).write(factorizations(reader, layer, base, svd, device), energy)
