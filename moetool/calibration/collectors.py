"""The statistics that D²-MoE needs of one layer: usage, Fisher information, and Gram matrices of what is lost."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from moetool.architectures import ROLES, MoEShape, Role
from moetool.calibration.expert_grams import ExpertGrams, GramsInSets
from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Owned, Peers
from moetool.calibration.slopes import SlopeSamples
from moetool.checkpoint.experts import Weights
from moetool.numerics.gram import Gram
from moetool.numerics.precision import bf16_products, has_fast_bf16

_CHUNK = 1 << 18  # elements of a gradient formed at a time
_KEPT_DELTAS = 12  # as many numbers as their factorisation has in memory afterwards, in fp64


@dataclass
class LayerStatistics:
    """Statistics of one MoE layer on the calibration windows. Tensors are on the CPU.

    Attributes:
        tokens: `[experts]` int64, routed tokens.
        fisher: by role `[experts, out]` fp32: the diagonal Fisher information summed over each row of the matrix, that
            is the mean over windows of the squared gradient of the window's mean next-token loss, by output channel.
            Zeros where no gradients were computed.
        channel_energy: `[intermediate]` fp64, Σ over tokens of the squared routing-weighted activation.
    """

    tokens: Tensor
    fisher: dict[Role, Tensor]
    channel_energy: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return all statistics as named tensors, which `from_tensors` reads back from a safetensors file."""
        fisher = {f"fisher.{role}": rows for role, rows in self.fisher.items()}
        return {"tokens": self.tokens, "channel_energy": self.channel_energy, **fisher}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "LayerStatistics":
        """Make the statistics of a layer from the named tensors of `tensors`."""
        fisher = {role: tensors[f"fisher.{role}"] for role in ROLES if f"fisher.{role}" in tensors}
        return cls(tensors["tokens"], fisher, tensors["channel_energy"])

    @classmethod
    def from_usage(cls, usage: "UsageCollector", shape: MoEShape) -> "LayerStatistics":
        """Statistics of a forward pass alone: the Fisher information is zero."""
        fisher = {role: torch.zeros(shape.experts, shape.matrix(role)[0]) for role in shape.roles}
        return cls(usage.tokens, fisher, usage.channel_energy)

    @property
    def has_fisher(self) -> bool:
        """Whether there are Fisher sums, that is, gradients were taken on some window."""
        return any(bool(rows.any()) for rows in self.fisher.values())


class UsageCollector(Collector):
    """Collector of the number of tokens that reach each expert, and of the energy of each intermediate channel."""

    wants_sums: ClassVar[bool] = True

    def __init__(self, shape: MoEShape) -> None:
        self.tokens = torch.zeros(shape.experts, dtype=torch.int64)
        self.channel_energy = torch.zeros(shape.intermediate, dtype=torch.float64)

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        self.tokens[expert] += len(inputs)

    def observe_sum(self, activations: Tensor) -> None:
        self.channel_energy += activations.detach().double().square().sum(0).cpu()

    def reduce(self, peers: Peers) -> None:
        peers.all_reduce(self.tokens)
        peers.all_reduce(self.channel_energy)


class FisherCollector(Collector):
    """Fisher-weighted sums of the experts' weights (D²-MoE, Eq. 4 and 5).

    The diagonal Fisher information of an expert's matrix is the mean over windows of the squared gradient of the
    window's mean next-token loss. The base `Σ_j F_j W_j / Σ_j F_j` is linear in F above and below the line, so both
    sums are accumulated directly, in fp32: two matrices per role instead of a Fisher matrix per expert. Gradients are
    formed one expert, role and window at a time, from the inputs and the gradients of the outputs, and never for the
    whole layer at once.
    """

    def __init__(
        self,
        weights: Weights,
        shape: MoEShape,
        device: torch.device,
        scale: Tensor | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        """`weights` gives the matrices of the experts that are at work; `scale` `[experts]` multiplies each expert's
        part in the two sums (not in `rows`); `loss_scale` is what the gradients that will come are too large by
        (`Sweep.loss_scale`)."""
        self._loss_scale = loss_scale
        self._weights, self._shape = weights, shape
        self._scale = [1.0] * shape.experts if scale is None else scale.tolist()
        self.weighted = {role: torch.zeros(shape.matrix(role), device=device) for role in shape.roles}
        self.total = {role: torch.zeros(shape.matrix(role), device=device) for role in shape.roles}
        self.rows = {
            role: torch.zeros(shape.experts, shape.matrix(role)[0], dtype=torch.float64, device=device)
            for role in shape.roles
        }

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        counts = windows.unique_consecutive(return_counts=True)[1].tolist()
        inputs, activation = inputs.detach(), work.activation.detach()

        def gate_up_gradient(gradient: Tensor) -> None:
            roles = self._shape.entering
            for role, own in zip(roles, gradient.chunk(len(roles), dim=-1), strict=True):
                self._add(role, expert, own, inputs, counts)

        work.gate_up.register_hook(gate_up_gradient)
        work.product.register_hook(lambda gradient: self._add("down", expert, gradient, activation, counts))

    def reduce(self, peers: Peers) -> None:
        for sums in (self.weighted, self.total, self.rows):
            for role in self._shape.roles:
                peers.all_reduce(sums[role])

    @torch.no_grad()
    def _add(self, role: Role, expert: int, gradients: Tensor, inputs: Tensor, counts: list[int]) -> None:
        weight = self._weights(expert, role).float()
        scale = self._scale[expert]
        exact = gradients.dtype == inputs.dtype == torch.bfloat16 and inputs.device.type == "cpu" and has_fast_bf16()
        pairs = list(zip(gradients.float().split(counts), inputs.float().split(counts), strict=True))
        # Some outputs after the other, so that their sums are in the cache when the next window comes.
        step = max(1, _CHUNK // weight.shape[1])
        for start in range(0, len(weight), step):
            part = slice(start, start + step)
            squared = torch.zeros_like(weight[part])
            with bf16_products() if exact else nullcontext():
                for gradient, rows in pairs:
                    product = gradient[:, part].T @ rows
                    squared.addcmul_(product, product, value=self._loss_scale**-2)
            self.rows[role][expert, part] += squared.sum(1, dtype=torch.float64)
            self.total[role][part].add_(squared, alpha=scale)
            self.weighted[role][part].addcmul_(squared, weight[part], value=scale)


class RegressionCollector(Collector):
    """Collector of the sums that RegMean needs: input Gram matrices over all experts, and their products with the
    matrices.

    `W_j G_j` is the sum over tokens of output times input, so no Gram matrix per expert is kept. That of down is
    `[intermediate, intermediate]`, which is what makes RegMean the most expensive of the merges.
    """

    def __init__(self, shape: MoEShape, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self._shape = shape
        self._products: dict[Role, Tensor] = {role: zeros(shape.matrix(role)) for role in shape.roles}
        self._diagonals: dict[Role, Tensor] = {
            role: zeros((shape.experts, shape.matrix(role)[1])) for role in shape.roles
        }
        self._inputs, self._activations = Gram(shape.hidden, device), Gram(shape.intermediate, device)

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        roles = self._shape.entering
        given: dict[Role, tuple[Tensor, Tensor]] = {"down": (work.activation.detach(), work.product.detach())}
        for role, own in zip(roles, work.gate_up.detach().chunk(len(roles), dim=-1), strict=True):
            given[role] = inputs.detach(), own
        self._inputs.add(inputs)
        self._activations.add(work.activation)
        for role, (rows, results) in given.items():
            self._products[role] += (results.float().T @ rows.float()).double()
            self._diagonals[role][expert] += rows.double().square().sum(0)

    def reduce(self, peers: Peers) -> None:
        for role in self._shape.roles:
            peers.all_reduce(self._products[role])
            peers.all_reduce(self._diagonals[role])
        for gram in (self._inputs, self._activations):
            peers.all_reduce(gram.matrix())

    def sums(self) -> dict[Role, tuple[Tensor, Tensor, Tensor]]:
        """Return `Σ_j W_j G_j` `[out, in]`, `Σ_j G_j` `[in, in]`, and the diagonals of the G_j `[experts, in]`, by
        role."""
        return {
            role: (
                self._products[role],
                (self._activations if role == "down" else self._inputs).matrix(),
                self._diagonals[role],
            )
            for role in self._shape.roles
        }


class BaseGramCollector(Collector):
    """Second moments of what the shared base is given, for its own truncation-aware SVD (Table 6).

    Gate and up see every token that any of the experts sees; down sees the routing-weighted sums of activations. As for
    the experts, where down is wide it is the Gram matrix of its output that is kept.
    """

    wants_sums: ClassVar[bool] = True

    def __init__(self, shape: MoEShape, down: Tensor) -> None:
        """`down` `[hidden, intermediate]` fp32 is the base's own matrix."""
        self._down, self.wide_down = down, shape.intermediate > shape.hidden
        self.inputs = Gram(shape.hidden, down.device)
        self.down = Gram(shape.hidden if self.wide_down else shape.intermediate, down.device)

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        self.inputs.add(inputs)

    def observe_sum(self, activations: Tensor) -> None:
        activations = activations.float()
        self.down.add(activations @ self._down.T if self.wide_down else activations)

    def reduce(self, peers: Peers) -> None:
        for gram in (self.inputs, self.down):
            peers.all_reduce(gram.matrix())


class GramCollector(GramsInSets):
    """Second moments of what each expert's matrices are given, in the cheapest form that determines the factors.

    Gate and up share the Gram matrix of their input, `Σ x xᵀ [hidden, hidden]`. For down, whose input is wider than its
    output, it is the Gram matrix of the lost output that is accumulated, `Σ (Δh)(Δh)ᵀ [hidden, hidden]`; the Gram
    matrix of h would be 12 times larger at Mixtral's size. A regular sample of all activations stands for the layer's
    mean, towards which the matrices of rarely used experts are shrunk.
    """

    def __init__(
        self,
        shape: MoEShape,
        down_delta: Callable[[int], Tensor],
        tokens: int,
        device: torch.device,
        owned: Owned | None = None,
        before: int = 0,
        at_once: int | None = None,
        *,
        slopes: SlopeSamples | None = None,
    ) -> None:
        """`down_delta(expert)` gives Δ of the down matrix in fp32, of those at work; `tokens` is how many will be
        routed in all, by all processes, `before` of them by those before this one."""
        self.inputs: ExpertGrams
        super().__init__(shape, ExpertGrams(shape.experts, shape.hidden, device, at_once), owned, at_once, slopes)
        self._device = device
        self.wide_down = shape.intermediate > shape.hidden
        size = shape.hidden if self.wide_down else shape.intermediate
        self.down = ExpertGrams(shape.experts, size, device, at_once)
        self.energy = torch.zeros(len(ROLES), shape.experts, dtype=torch.float64)
        self.magnitude = {
            "input": torch.zeros(shape.experts, shape.hidden, dtype=torch.float64),
            "activation": torch.zeros(shape.experts, shape.intermediate, dtype=torch.float64),
        }
        self._down_delta, self._deltas = down_delta, dict[int, Tensor]()
        self._stride = max(1, tokens // (2 * size)) if self.wide_down else 0
        self._before = self._next = before
        self._sample: list[tuple[int, Tensor]] = []

    def at(self, position: int) -> None:
        super().at(position)
        self._next = self._before + position

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        super().observe(expert, windows, inputs, work)
        self.inputs.add(expert, inputs.detach())
        if not self.wide_down:
            self.down.add(expert, work.activation)
        elif self.down.holds(expert):
            self.down.add(expert, work.activation.float() @ self._delta(expert).T)
        if self.is_first:
            self._observe_first(expert, inputs, work.activation)

    def _delta(self, expert: int) -> Tensor:
        """Δ of an expert's down matrix, kept from batch to batch."""
        if (own := self._deltas.get(expert)) is not None:
            return own
        own = self._down_delta(expert)
        if len(self._deltas) < _KEPT_DELTAS:
            self._deltas[expert] = own
        return own

    def seen(self) -> None:
        self._deltas.clear()

    def _observe_first(self, expert: int, inputs: Tensor, activation: Tensor) -> None:
        energy = _energy(inputs)
        self.energy[0, expert] += energy
        self.energy[1, expert] += energy
        self.energy[2, expert] += _energy(activation)
        self.magnitude["input"][expert] += _wide(inputs).abs().sum(0).double().cpu()
        self.magnitude["activation"][expert] += _wide(activation).abs().sum(0).double().cpu()
        if not self.wide_down:
            return self.down.add_to_all(activation)
        first = -self._next % self._stride
        # A copy: a view of a few rows would keep all of them in memory until the layer is done.
        rows = activation[first :: self._stride].to(torch.float32, copy=True)
        self._sample.append((self._next, rows))
        self._next += len(activation)

    def hold(self, experts: range) -> None:
        super().hold(experts)
        self.down.hold(experts)

    def reduce(self, peers: Peers) -> None:
        self.seen()
        super().reduce(peers)
        if peers.size == 1:
            return
        self.down.reduce(partial(self._owned.owner, "down"), peers, sums=not self.wide_down)
        for sums in (self.energy, *self.magnitude.values()):
            peers.all_reduce(sums)
        sampled = peers.gather([(position, rows.cpu()) for position, rows in self._sample])
        self._sample = [(position, rows.to(self._device)) for others in sampled for position, rows in others]

    def sample(self) -> Tensor:
        """`[rows, intermediate]`: every n-th activation of the layer, whichever expert it went to."""
        return torch.cat([rows for _, rows in sorted(self._sample, key=itemgetter(0))])


def _wide(rows: Tensor) -> Tensor:
    """In fp32 at least, in which sums over a batch are as exact as anybody needs them; those over batches are fp64."""
    return rows if rows.dtype == torch.float64 else rows.float()


def _energy(rows: Tensor) -> float:
    """Sum of the squares of all numbers of a batch, as a Python float."""
    return _wide(rows).square().sum().item()
