"""Every delta of a layer, factorised but not yet cut to a rank, as files of the work directory.

Which rank a matrix gets depends on all others, in all layers. So each layer leaves its spectra and bases here, and the
cut is made when the output is written.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moetool.architectures import ROLES, MoEShape, Role
from moetool.calibration.collectors import GramCollector
from moetool.checkpoint.writer import CheckpointWriter, TensorSpec
from moetool.compress.base.layer_base import LayerBase
from moetool.compress.choices import Sensitivity, SharedFactor, Svd
from moetool.compress.delta import Deltas, delta
from moetool.compress.factors.sensitivity import LayerSensitivity, MatrixSensitivity
from moetool.compress.factors.svd import LayerSvd
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import to_cpu
from moetool.numerics.factorize import Factorization, Side
from moetool.representations import Measured
from moetool.representations.low_rank import break_even_rank


class FactorChoices(Protocol):
    """The options that decide a factorisation."""

    @property
    def svd(self) -> Svd: ...

    @property
    def sensitivity(self) -> Sensitivity: ...

    @property
    def share(self) -> SharedFactor: ...


FactoredMatrix = tuple[Role, int, Factorization, MatrixSensitivity]

ENERGY = "energy"  # [3, experts] fp64: Σ over an expert's tokens of the squared norm of each role's input


def joint_shape(shape: tuple[int, int], experts: int, share: SharedFactor) -> tuple[int, int]:
    """Shape of what is factorised at once: one matrix `[out, in]`, or all experts' below or beside each other."""
    rows, columns = shape
    return {"none": (rows, columns), "v": (experts * rows, columns), "u": (rows, experts * columns)}[share]


class FactorFile:
    """The factorisations of one layer in one file: one per role and expert, or per role if experts share a factor."""

    def __init__(self, work: Path, layer: int, shape: MoEShape, share: SharedFactor = "none") -> None:
        self.share, self._shape = share, shape
        self._writer = CheckpointWriter(work / f"factors-{layer:05d}", [list(self._specs())])

    @property
    def count(self) -> int:
        """Factorisations per role."""
        return self._shape.experts if self.share == "none" else 1

    def matrix(self, role: Role) -> tuple[int, int]:
        """Shape of what was factorised."""
        return joint_shape(self._shape.matrix(role), self._shape.experts, self.share)

    def _side(self, role: Role) -> Side:
        """Which of its two sides a factorisation leaves a basis of."""
        rows, columns = self.matrix(role)
        return "left" if self.share == "u" or rows <= columns else "right"

    def _specs(self) -> Iterator[TensorSpec]:
        for role in self._shape.roles:
            matrix = self.matrix(role)
            cap = break_even_rank(matrix)
            length = matrix[0] if self._side(role) == "left" else matrix[1]
            for expert in range(self.count):
                yield TensorSpec(f"{role}.{expert}.spectrum", torch.float64, (cap,))
                yield TensorSpec(f"{role}.{expert}.energy", torch.float64, (2,))
                yield TensorSpec(f"{role}.{expert}.basis", torch.float32, (length, cap))
                yield TensorSpec(f"{role}.{expert}.scale", torch.float32, (matrix[0],))
        yield TensorSpec(ENERGY, torch.float64, (len(ROLES), self._shape.experts))

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return self._writer.nbytes

    def write(self, factored: Iterator[FactoredMatrix], energy: Tensor) -> None:
        """Write all factorisations, one at a time, atomically."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for role, expert, factorization, sensitivity in factored:
                cap = break_even_rank(self.matrix(role))
                scale = sensitivity.row_scale
                yield f"{role}.{expert}.spectrum", to_cpu(factorization.spectrum[:cap]).double()
                yield (
                    f"{role}.{expert}.energy",
                    torch.tensor([factorization.energy, sensitivity.weight], dtype=torch.float64),
                )
                yield f"{role}.{expert}.basis", to_cpu(factorization.basis[:, :cap]).float()
                rows = self.matrix(role)[0]
                yield f"{role}.{expert}.scale", torch.ones(rows) if scale is None else to_cpu(scale)
            yield ENERGY, energy

        self._writer.write_shard(0, tensors())

    def _read(self, name: str) -> Tensor:
        with safe_open(self._writer.file(0), "pt") as file:
            return file.get_tensor(name).clone()

    def input_energy(self) -> Tensor:
        """`[3, experts]` fp64; zero where no token came."""
        return self._read(ENERGY)

    def spectrum(self, role: Role, expert: int) -> tuple[Tensor, float]:
        """Losses that each rank removes, descending, and their sum including those that were not kept."""
        energy, weight = self._read(f"{role}.{expert}.energy").tolist()
        return self._read(f"{role}.{expert}.spectrum") * weight, energy * weight

    def measured(self, role: Role, expert: int, device: torch.device) -> Measured:
        """The factorisation, to cut what was factorised to any rank."""
        factorization = Factorization(
            spectrum=self._read(f"{role}.{expert}.spectrum"),
            energy=self._read(f"{role}.{expert}.energy")[0].item(),
            basis=self._read(f"{role}.{expert}.basis").to(device),
            side=self._side(role),
        )
        scale = self._read(f"{role}.{expert}.scale").to(device)
        return Measured(row_scale=scale, factorization=factorization)


def measured_grams(
    calibrated: CalibratedJob, index: int, layer: nn.Module, base: LayerBase, *, keep: bool
) -> GramCollector:
    """Run a loaded layer forwards and collect the second moments its factors need; `keep` writes its output."""
    shape, device = calibrated.source.experts.shape, calibrated.job.device
    weights: Tensor = calibrated.experts(layer).down_proj  # type: ignore[assignment]
    down = base.full("down").to(device)
    grams = GramCollector(shape, lambda expert: delta(weights[expert], down), calibrated.tokens_routed(), device)
    calibrated.sweep.forward(index, layer, [grams], keep=keep)
    return grams


def write_factors(
    shape: MoEShape,
    work: Path,
    layer: int,
    deltas: Deltas,
    options: FactorChoices,
    grams: GramCollector | None,
) -> None:
    """Factorise every delta of a layer, one at a time, and leave the result in the work directory."""
    count = shape.experts
    energy = grams.energy if grams is not None else torch.zeros(len(ROLES), count, dtype=torch.float64)
    tokens = grams.tokens() if grams is not None else torch.zeros(count, dtype=torch.int64)
    svd = LayerSvd(options.svd, grams)
    sensitivity = LayerSensitivity(options.sensitivity, deltas.base.statistics, energy, tokens)

    def factored() -> Iterator[FactoredMatrix]:
        for role in shape.roles:
            for expert in range(count):
                own = deltas.of(role, expert)
                counts = sensitivity.of(role, expert, own.shape[1], whitened=svd.is_whitened)
                yield role, expert, svd.factorize(role, expert, own, counts.row_scale), counts

    def jointly_factored() -> Iterator[FactoredMatrix]:
        for role in shape.roles:
            own = [deltas.of(role, expert) for expert in range(count)]
            counts = sensitivity.jointly(role, own[0].shape[1], options.share, whitened=svd.is_whitened)
            scale = counts.row_scale
            if scale is None:
                scales: list[Tensor | None] = [None] * count
            else:
                scales = list(scale.chunk(count)) if options.share == "v" else [scale] * count
            yield role, 0, svd.factorize_jointly(role, own, options.share, scales), counts

    file = FactorFile(work, layer, shape, options.share)
    file.write(factored() if options.share == "none" else jointly_factored(), energy)
