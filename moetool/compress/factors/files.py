"""The spectra of a layer's deltas, in a file of the work directory, and their factors, once ranks are chosen.

Which rank a matrix gets depends on all others, in all layers. So each layer leaves its spectra here, and is factorised
again when the ranks are known.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moetool.architectures import ROLES, MoEShape, Role
from moetool.bases.delta import Deltas, delta
from moetool.bases.layer_base import LayerBase
from moetool.calibration.collectors import GramCollector
from moetool.calibration.observation import Collector
from moetool.calibration.output_gradients import metric_path
from moetool.calibration.output_metric import ExpertMetric, LayerMetric
from moetool.calibration.peers import Owned, Peers
from moetool.calibration.slopes import SlopeSamples
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.files import save_tensors
from moetool.compress.factors.sensitivity import LayerSensitivity, Sensitivity
from moetool.compress.factors.svd import LayerSvd, SharedFactor, Svd, Whitened
from moetool.format.layout import LayerLayout, delta_name, shared_name
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import to_cpu
from moetool.numerics.output_norm import ChannelNorm, LinkedNorm, OutputNorm
from moetool.representations import Measured, Representation
from moetool.representations.low_rank import break_even_rank


class FactorChoices(Protocol):
    """The options that decide the low-rank factors of a delta: kind of SVD, weights of errors, common factor."""

    @property
    def svd(self) -> Svd: ...

    @property
    def sensitivity(self) -> Sensitivity: ...

    @property
    def share(self) -> SharedFactor: ...

    @property
    def links_outputs(self) -> bool: ...


ENERGY = "energy"  # [3, experts] fp64: Σ over an expert's tokens of the squared norm of each role's input
TOKENS = "tokens"  # [experts] int64


def joint_shape(shape: tuple[int, int], experts: int, share: SharedFactor) -> tuple[int, int]:
    """The shape of the matrix that is factorized: one expert's `[out, in]`, or all experts' below (`v`) or beside (`u`)
    each other."""
    rows, columns = shape
    return {"none": (rows, columns), "v": (experts * rows, columns), "u": (rows, experts * columns)}[share]


class SpectrumFile:
    """The spectra of one layer's deltas: one per role and expert, or per role if experts share a factor."""

    def __init__(self, work: Path, layer: int, shape: MoEShape, share: SharedFactor = "none") -> None:
        self.share, self._shape = share, shape
        self.path = work / f"spectra-{layer:05d}.safetensors"

    @property
    def count(self) -> int:
        """Number of spectra per role: one per expert, or one where the experts have a factor in common."""
        return self._shape.experts if self.share == "none" else 1

    def matrix(self, role: Role) -> tuple[int, int]:
        """The shape `[out, in]` of the matrix behind one spectrum: a delta, or the deltas of all experts joined."""
        return joint_shape(self._shape.matrix(role), self._shape.experts, self.share)

    @property
    def nbytes(self) -> int:
        """Bytes of the file's numbers, without the header of the safetensors format."""
        ranks = sum(break_even_rank(self.matrix(role)) + 1 for role in self._shape.roles)
        return 8 * (self.count * ranks + (len(ROLES) + 1) * self._shape.experts)

    def write(self, spectra: Iterable[tuple[Role, int, Tensor, float]], energy: Tensor, tokens: Tensor) -> None:
        """Write the file atomically.

        Args:
            spectra: role, expert, the loss that each rank removes, descending, and the loss without any rank.
            energy: `[3, experts]` fp64, Σ over an expert's tokens of the squared norm of each role's input.
            tokens: `[experts]` int64, the number of tokens of each expert.
        """
        tensors = {ENERGY: energy, TOKENS: tokens}
        for role, expert, spectrum, total in spectra:
            tensors[f"{role}.{expert}.spectrum"] = to_cpu(spectrum[: break_even_rank(self.matrix(role))]).double()
            tensors[f"{role}.{expert}.total"] = torch.tensor(total, dtype=torch.float64)
        save_tensors(self.path, tensors)

    def _read(self, name: str) -> Tensor:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name).clone()

    def input_energy(self) -> Tensor:
        """The summed squared norms of each role's input by expert, `[3, experts]` fp64; zero where no token came."""
        return self._read(ENERGY)

    def tokens(self) -> Tensor:
        """The number of tokens of each expert, `[experts]` int64; zeros if nothing was measured."""
        return self._read(TOKENS)

    def spectrum(self, role: Role, expert: int) -> tuple[Tensor, float]:
        """Read the losses that each further rank of a delta removes, descending, and their sum over all ranks, stored
        or not."""
        return self._read(f"{role}.{expert}.spectrum"), self._read(f"{role}.{expert}.total").item()


def measuring_owners(shape: MoEShape, share: SharedFactor, peers: Peers) -> Owned:
    """Assign the deltas of a layer to processes for factorization: all to the first if experts share a factor."""
    return Owned(shape, peers) if share == "none" else Owned.by_first(shape, peers)


class LayerFactors:
    """The deltas of one layer, whose spectra are measured or which are encoded as factors."""

    def __init__(
        self,
        shape: MoEShape,
        deltas: Deltas,
        options: FactorChoices,
        grams: GramCollector | None,
        owned: Owned | None = None,
        metric: LayerMetric | None = None,
    ) -> None:
        """Take the `grams` that were collected on this layer, if there is a text; `owned` says which process has which
        deltas, by default this one all. Errors at outputs count together by the `metric`, if there is one."""
        self._owned = owned or Owned(shape, Peers())
        self._shape, self._deltas, self._share = shape, deltas, options.share
        count = shape.experts
        self._energy = torch.zeros(len(ROLES), count, dtype=torch.float64) if grams is None else grams.energy
        self._tokens = torch.zeros(count, dtype=torch.int64) if grams is None else grams.tokens()
        self._svd, self._grams, self._metric = LayerSvd(options.svd, grams), grams, metric
        self._last: tuple[int, ExpertMetric] | None = None  # of the expert in hand, whose gate and up have it in common
        self._sensitivity = LayerSensitivity(options.sensitivity, deltas.base.statistics, self._energy, self._tokens)

    @classmethod
    def on_text(
        cls,
        calibrated: CalibratedJob,
        sweep: Sweep,
        index: int,
        layer: nn.Module,
        base: LayerBase,
        owned: Owned,
        options: FactorChoices,
        *,
        keep: bool,
        others: Sequence[Collector] = (),
    ) -> Self:
        """Run a loaded layer forwards and collect what its factors need, each delta's for the process that has it.

        Args:
            calibrated: the job, with the model, and a metric of the layer in its work directory if it was measured.
            sweep: the windows to run.
            index: the number of the layer.
            layer: the loaded layer.
            base: the base that deltas are taken to.
            owned: the deltas of each process.
            options: kind of SVD, weights of errors, common factor.
            keep: whether the layer's output is written.
            others: collectors that observe the same pass.
        """
        job, shape, matrix = calibrated.job, calibrated.source.experts.shape, calibrated.model.matrix
        down = base.full("down").to(job.device)
        each = sweep.length * shape.top_k  # of a window

        def down_delta(expert: int) -> Tensor:
            return delta(matrix(expert, "down"), down)

        before, at_once = sweep.own.start * each, calibrated.experts_at_once
        linked = options.links_outputs and metric_path(job.work, index).exists()
        slopes = SlopeSamples.within(sweep, shape) if linked else None
        grams = GramCollector(shape, down_delta, sweep.count * each, job.device, owned, before, at_once, slopes=slopes)
        sweep.forward(index, layer, [grams, *others], keep=keep)
        weights = calibrated.weights(index, layer)
        metric = LayerMetric.of_layer(job.work, index, job.device, grams, shape, weights) if linked else None
        return cls(shape, Deltas(weights, base, job.device), options, grams, owned, metric)

    def measure(self, file: SpectrumFile) -> None:
        """Compute the spectra of the layer's deltas, shared among all processes, and write them to a file."""
        peers = self._owned.peers
        spectra = chain.from_iterable(peers.gather(list(self._spectra())))
        if peers.is_first:
            file.write(spectra, self._energy, self._tokens)

    def _spectra(self) -> Iterator[tuple[Role, int, Tensor, float]]:
        for role, expert in self._each(() if self._share == "none" else self._shape.roles):
            counted = self._counted(role, expert)
            spectrum, energy = counted.whitened.spectrum()
            yield role, expert, to_cpu(spectrum * counted.weight), energy * counted.weight

    def encode(self, layout: LayerLayout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Encode every delta that this process has; gives tensors by their name relative to the experts."""
        jointly = [role for role in self._shape.roles if layout.shared_tensors(role)]
        for role, expert in self._each(jointly):
            if role in jointly:
                yield from self._encoded_jointly(role, layout, dtype)
            elif forms := layout.weights[role]:
                for name, tensor in self._encoded(role, expert, forms[expert], dtype).items():
                    yield delta_name(expert, role, name), to_cpu(tensor)

    def _each(self, jointly: Collection[Role]) -> Iterator[tuple[Role, int]]:
        """The role and expert of every delta that this process has, in the order in which Gram matrices come into
        memory; of roles that are factorized `jointly`, expert 0 alone."""
        sets = iter([range(self._shape.experts)]) if self._grams is None else self._grams.sets()
        for experts in sets:
            for roles in self._shape.groups:
                for expert in experts:
                    for role in roles:  # gate and up of an expert are given the same
                        if self._owned.has(role, expert) and not (expert and role in jointly):
                            yield role, expert

    def _encoded(self, role: Role, expert: int, form: Representation, dtype: torch.dtype) -> dict[str, Tensor]:
        """Encode one delta in the form chosen for it."""
        if not form.directions:
            return form.encode(self._deltas.target(role, expert, form), dtype)
        counted = self._counted(role, expert)
        [own] = counted.deltas
        return form.encode(own, dtype, counted.measured(form.directions, dtype))

    def _encoded_jointly(self, role: Role, layout: LayerLayout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Encode the factor that all experts of a role share, and the factor of each."""
        [form] = set(layout.weights[role] or ())
        counted = self._counted(role, 0)
        common, own = form.encode_jointly(counted.deltas, dtype, counted.measured(form.directions, dtype))
        for name, tensor in common.items():
            yield shared_name(role, name), to_cpu(tensor)
        for expert, encoded in enumerate(own):
            for name, tensor in encoded.items():
                yield delta_name(expert, role, name), to_cpu(tensor)

    def _counted(self, role: Role, expert: int) -> "_Counted":
        """A delta, or the deltas of all experts, and how errors in it count."""
        svd, inputs = self._svd, self._shape.matrix(role)[1]
        if self._share == "none":
            own = self._deltas.of(role, expert)
            counts = self._sensitivity.of(role, expert, inputs, whitened=svd.is_whitened)
            norm = self._norm(role, expert, ChannelNorm.of(counts.row_scale))
            return _Counted(svd.whitened(role, expert, own, norm), norm, counts.weight, [own])
        count = self._shape.experts
        all_ = [self._deltas.of(role, expert) for expert in range(count)]
        counts = self._sensitivity.jointly(role, inputs, self._share, whitened=svd.is_whitened)
        each: list[OutputNorm | None] = [ChannelNorm.of(counts.row_scale)] * count
        if counts.row_scale is not None and self._share == "v":
            each = [ChannelNorm(own) for own in counts.row_scale.chunk(count)]
        whitened = svd.whitened_jointly(role, all_, self._share, each)
        return _Counted(whitened, ChannelNorm.of(counts.row_scale), counts.weight, all_)

    def _norm(self, role: Role, expert: int, channels: ChannelNorm | None) -> OutputNorm | None:
        """How errors at the outputs of a delta count: together if that was measured, else by channel."""
        if self._metric is None or channels is None:
            return channels
        if self._last is None or self._last[0] != expert:
            self._last = expert, self._metric.of(expert)
        rows = self._last[1].alone(role)
        if rows is None:
            return channels
        return LinkedNorm.of(rows, len(channels.scale), self._deltas.device).like(channels)


@dataclass(frozen=True, eq=False)
class _Counted:
    """A delta, or the deltas of all experts, and how errors in it count.

    Attributes:
        whitened: what is factorized.
        norm: of errors at the outputs.
        weight: factor from squared singular values to loss.
        deltas: as they are, `[out, in]`.
    """

    whitened: Whitened
    norm: OutputNorm | None
    weight: float
    deltas: list[Tensor]

    def measured(self, rank: int, dtype: torch.dtype) -> Measured:
        """What the encoding of so many directions in a model of `dtype` uses."""
        found = self.whitened.factorize(rank, coarse=dtype == torch.bfloat16)
        return Measured(norm=self.norm, factorization=found)
