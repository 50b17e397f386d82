"""What the deltas of a layer lose by rank, as a file of the work directory, and their factors once ranks are chosen.

Which rank a matrix gets depends on all others, in all layers. So each layer leaves its spectra here, and is factorised
again when the ranks are known.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moetool.architectures import ROLES, MoEShape, Role
from moetool.bases.delta import Deltas, delta
from moetool.bases.layer_base import LayerBase
from moetool.calibration.collectors import GramCollector
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Owned, Peers
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import save_tensors
from moetool.compress.choices import Sensitivity, SharedFactor, Svd
from moetool.compress.factors.sensitivity import LayerSensitivity, MatrixSensitivity
from moetool.compress.factors.svd import LayerSvd, Whitened
from moetool.format.layout import LayerLayout, delta_name, shared_name
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import to_cpu
from moetool.representations import Measured, Representation
from moetool.representations.low_rank import break_even_rank


class FactorChoices(Protocol):
    """The options that decide a factorisation."""

    @property
    def svd(self) -> Svd: ...

    @property
    def sensitivity(self) -> Sensitivity: ...

    @property
    def share(self) -> SharedFactor: ...


ENERGY = "energy"  # [3, experts] fp64: Σ over an expert's tokens of the squared norm of each role's input
TOKENS = "tokens"  # [experts] int64


def joint_shape(shape: tuple[int, int], experts: int, share: SharedFactor) -> tuple[int, int]:
    """Shape of what is factorised at once: one matrix `[out, in]`, or all experts' below or beside each other."""
    rows, columns = shape
    return {"none": (rows, columns), "v": (experts * rows, columns), "u": (rows, experts * columns)}[share]


class SpectrumFile:
    """The spectra of one layer's deltas: one per role and expert, or per role if experts share a factor."""

    def __init__(self, work: Path, layer: int, shape: MoEShape, share: SharedFactor = "none") -> None:
        self.share, self._shape = share, shape
        self.path = work / f"spectra-{layer:05d}.safetensors"

    @property
    def count(self) -> int:
        """Spectra per role."""
        return self._shape.experts if self.share == "none" else 1

    def matrix(self, role: Role) -> tuple[int, int]:
        """Shape of what has a spectrum."""
        return joint_shape(self._shape.matrix(role), self._shape.experts, self.share)

    @property
    def nbytes(self) -> int:
        """Size on disk, without the header."""
        ranks = sum(break_even_rank(self.matrix(role)) + 1 for role in self._shape.roles)
        return 8 * (self.count * ranks + (len(ROLES) + 1) * self._shape.experts)

    def write(self, spectra: Iterable[tuple[Role, int, Tensor, float]], energy: Tensor, tokens: Tensor) -> None:
        """Write all, atomically: by role and expert what each rank removes of the loss, descending, and all of it."""
        tensors = {ENERGY: energy, TOKENS: tokens}
        for role, expert, spectrum, total in spectra:
            tensors[f"{role}.{expert}.spectrum"] = to_cpu(spectrum[: break_even_rank(self.matrix(role))]).double()
            tensors[f"{role}.{expert}.total"] = torch.tensor(total, dtype=torch.float64)
        save_tensors(self.path, tensors)

    def _read(self, name: str) -> Tensor:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name).clone()

    def input_energy(self) -> Tensor:
        """`[3, experts]` fp64; zero where no token came."""
        return self._read(ENERGY)

    def tokens(self) -> Tensor:
        """`[experts]` int64: how many tokens came; zeros if nothing was measured."""
        return self._read(TOKENS)

    def spectrum(self, role: Role, expert: int) -> tuple[Tensor, float]:
        """Losses that each rank removes, descending, and their sum including those that were not kept."""
        return self._read(f"{role}.{expert}.spectrum"), self._read(f"{role}.{expert}.total").item()


def measured_grams(
    calibrated: CalibratedJob,
    sweep: Sweep,
    index: int,
    layer: nn.Module,
    base: LayerBase,
    owned: Owned,
    *,
    keep: bool,
    others: Sequence[Collector] = (),
) -> GramCollector:
    """Run a loaded layer forwards and collect the second moments its factors need, and what `others` do; `keep` writes
    its output. What a delta's factors need is gathered for the process that has it."""
    shape, device, matrix = calibrated.source.experts.shape, calibrated.job.device, calibrated.model.matrix
    down = base.full("down").to(device)
    each = sweep.length * shape.top_k  # of a window

    def down_delta(expert: int) -> Tensor:
        return delta(matrix(expert, "down"), down)

    before, at_once = sweep.own.start * each, calibrated.experts_at_once
    grams = GramCollector(shape, down_delta, sweep.count * each, device, owned, before, at_once)
    sweep.forward(index, layer, [grams, *others], keep=keep)
    return grams


def _down_delta(weights: Tensor, base: Tensor, expert: int) -> Tensor:
    return delta(weights[expert], base)


def measuring_owners(shape: MoEShape, share: SharedFactor, peers: Peers) -> Owned:
    """Who factorises which delta of a layer; the first all of them where they are factorised at once."""
    return Owned(shape, peers) if share == "none" else Owned.by_first(shape, peers)


class LayerFactors:
    """The deltas of one layer, to be measured, or encoded as factors."""

    def __init__(
        self,
        shape: MoEShape,
        deltas: Deltas,
        options: FactorChoices,
        grams: GramCollector | None,
        owned: Owned | None = None,
    ) -> None:
        """`grams` as collected on this layer, if there is a text, by the processes that have `owned` the deltas."""
        self._owned = owned or Owned(shape, Peers())
        self._shape, self._deltas, self._share = shape, deltas, options.share
        count = shape.experts
        self._energy = torch.zeros(len(ROLES), count, dtype=torch.float64) if grams is None else grams.energy
        self._tokens = torch.zeros(count, dtype=torch.int64) if grams is None else grams.tokens()
        self._svd, self._grams = LayerSvd(options.svd, grams), grams
        self._sensitivity = LayerSensitivity(options.sensitivity, deltas.base.statistics, self._energy, self._tokens)

    def measure(self, file: SpectrumFile) -> None:
        """Leave the spectra in a file, those of all processes."""
        peers = self._owned.peers
        spectra = chain.from_iterable(peers.gather(list(self._spectra())))
        if peers.is_first:
            file.write(spectra, self._energy, self._tokens)

    def _spectra(self) -> Iterator[tuple[Role, int, Tensor, float]]:
        for role, expert in self._each(() if self._share == "none" else self._shape.roles):
            whitened, sensitivity, _ = self._whitened(role, expert)
            spectrum, energy = whitened.spectrum()
            yield role, expert, to_cpu(spectrum * sensitivity.weight), energy * sensitivity.weight

    def encode(self, layout: LayerLayout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The tensors of every delta that this process has, by name relative to the experts."""
        jointly = [role for role in self._shape.roles if layout.shared_tensors(role)]
        for role, expert in self._each(jointly):
            if role in jointly:
                yield from self._encoded_jointly(role, layout, dtype)
            elif forms := layout.weights[role]:
                for name, tensor in self._encoded(role, expert, forms[expert], dtype).items():
                    yield delta_name(expert, role, name), to_cpu(tensor)

    def _each(self, jointly: Collection[Role]) -> Iterator[tuple[Role, int]]:
        """Every delta that this process has, those together whose Gram matrices are in memory together; of the roles
        that are factorised `jointly` the first."""
        sets = iter([range(self._shape.experts)]) if self._grams is None else self._grams.sets()
        for experts in sets:
            for roles in self._shape.groups:
                for expert in experts:
                    for role in roles:  # gate and up of an expert are given the same
                        if self._owned.has(role, expert) and not (expert and role in jointly):
                            yield role, expert

    def _encoded(self, role: Role, expert: int, form: Representation, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors of one delta in the form chosen for it."""
        if not form.directions:
            return form.encode(self._deltas.target(role, expert, form), dtype)
        whitened, sensitivity, [own] = self._whitened(role, expert)
        found = whitened.factorize(form.directions, coarse=dtype == torch.bfloat16)
        return form.encode(own, dtype, Measured(row_scale=sensitivity.row_scale, factorization=found))

    def _encoded_jointly(self, role: Role, layout: LayerLayout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The factor that all experts share, and each one's own."""
        [form] = set(layout.weights[role] or ())
        whitened, sensitivity, deltas = self._whitened(role, 0)
        found = whitened.factorize(form.directions, coarse=dtype == torch.bfloat16)
        measured = Measured(row_scale=sensitivity.row_scale, factorization=found)
        common, own = form.encode_jointly(deltas, dtype, measured)
        for name, tensor in common.items():
            yield shared_name(role, name), to_cpu(tensor)
        for expert, encoded in enumerate(own):
            for name, tensor in encoded.items():
                yield delta_name(expert, role, name), to_cpu(tensor)

    def _whitened(self, role: Role, expert: int) -> tuple[Whitened, MatrixSensitivity, list[Tensor]]:
        """What is factorised for a delta, or for all experts' together, and the deltas themselves."""
        svd, inputs = self._svd, self._shape.matrix(role)[1]
        if self._share == "none":
            own = self._deltas.of(role, expert)
            counts = self._sensitivity.of(role, expert, inputs, whitened=svd.is_whitened)
            return svd.whitened(role, expert, own, counts.row_scale), counts, [own]
        count = self._shape.experts
        all_ = [self._deltas.of(role, expert) for expert in range(count)]
        counts = self._sensitivity.jointly(role, inputs, self._share, whitened=svd.is_whitened)
        scales: list[Tensor | None] = [counts.row_scale] * count
        if counts.row_scale is not None and self._share == "v":
            scales = list(counts.row_scale.chunk(count))
        return svd.whitened_jointly(role, all_, self._share, scales), counts, all_
