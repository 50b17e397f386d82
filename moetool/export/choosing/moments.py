"""Second moments of the inputs of every matrix of an export on a text, and of the gradients at its outputs.

The first is llama.cpp's importance matrix: Σ x² of every input, by expert. With gradients δ at the outputs, an error E
in a matrix then costs about `Σ_j mean(δ_j²) Σ_i Σ(x_i²) E_ji²` in loss, as in `compress.factors.sensitivity`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.observation import Collector
from moetool.calibration.peers import Peers
from moetool.calibration.row_moments import RowMoments
from moetool.export.choosing.written import WrittenModel

_Apart = Callable[[Tensor], Sequence[Tensor]]  # gradients `[out, tokens]` of a module as those of the matrices


@dataclass(frozen=True)
class Moments:
    """Second moments of the inputs of the matrices `[out, in]` of one tensor: of all experts, or of one.

    Attributes:
        given: `[matrices, in]` fp64, Σ over tokens of the squared inputs.
        counts: `[matrices]` fp64, how many tokens.
        gradient_energy: `[matrices, out]` fp64, Σ over tokens of the squared gradients at the outputs; zeros if none
            were taken.
        between_rows: of these gradients, of one matrix; `None` where they are not kept.
    """

    given: Tensor
    counts: Tensor
    gradient_energy: Tensor
    between_rows: RowMoments | None = None

    @classmethod
    def none(
        cls, matrices: int, shape: Sequence[int], device: torch.device, between_rows: RowMoments | None = None
    ) -> "Moments":
        """Make moments of no tokens: zeros for so many matrices of this shape."""
        rows, columns = shape
        given, counts, energy = (
            torch.zeros(size, dtype=torch.float64, device=device)
            for size in ((matrices, columns), (matrices,), (matrices, rows))
        )
        return cls(given, counts, energy, between_rows)

    def add(self, matrix: int, inputs: Tensor) -> None:
        """Add inputs `[…, in]` of one matrix to its second moments and count."""
        rows = inputs.detach().flatten(0, -2)
        self.given[matrix] += rows.double().square().sum(0)
        self.counts[matrix] += len(rows)

    def add_gradients(self, matrix: int, gradients: Tensor) -> None:
        """Add the gradients `[…, out]` at the outputs that belong to these inputs."""
        rows = gradients.flatten(0, -2)
        self.gradient_energy[matrix] += rows.double().square().sum(0)
        if self.between_rows is not None:
            self.between_rows.add(rows)

    def reduce(self, peers: Peers) -> None:
        """Add up what each process has seen of the windows that are its own."""
        for sums in (self.given, self.counts, self.gradient_energy):
            peers.all_reduce(sums)
        if self.between_rows is not None:
            self.between_rows.reduce(peers.all_reduce)

    @property
    def sensitivity(self) -> Tensor:
        """`[matrices, out]`, mean squared gradients; zeros for an expert that no token reached."""
        return self.gradient_energy / self.counts.clamp_min(1)[:, None]


class LayerMoments(Collector):
    """The moments of one loaded layer.

    Attributes:
        by_name: of every tensor that can have few bits, by its name in the result.
    """

    def __init__(
        self,
        written: WrittenModel,
        layer: int,
        module: nn.Module,
        device: torch.device,
        length: int | None = None,
        first: int = 0,
    ) -> None:
        """Watch a layer; with the `length` of windows, the second moments of gradients at its projections, too. `first`
        is the number of windows that other processes run before those of this one."""
        self.by_name: dict[str, Moments] = {}
        self._modules: list[tuple[nn.Module, list[Moments], _Apart]] = []
        for projection in written.watched(layer, module).values():
            own = {}
            for name, matrix in projection.shapes.items():
                linked = None if length is None else RowMoments(matrix[0], length, device, first)
                own[name] = Moments.none(1, matrix, device, linked)
            self._modules.append((projection.module, list(own.values()), projection.apart))
            self.by_name |= own
        if written.experts is not None and layer in written.experts.moe_layers:
            shape = written.experts.shape
            self._experts = {role: Moments.none(shape.experts, shape.matrix(role), device) for role in shape.roles}
            self._entering = shape.entering
            self.by_name |= {written.expert_tensor(layer, role): own for role, own in self._experts.items()}

    def observe(self, expert: int, windows: Tensor, inputs: Tensor, work: ExpertRun) -> None:
        entering = [self._experts[role] for role in self._entering]
        for own in entering:
            own.add(expert, inputs)
        self._experts["down"].add(expert, work.activation)
        if work.gate_up.requires_grad:
            work.gate_up.register_hook(partial(_add_gradients, entering, expert, partial(_chunks, len(entering))))
            work.product.register_hook(partial(_add_gradients, [self._experts["down"]], expert, partial(_chunks, 1)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what runs through the projections beside the experts, and what comes back."""
        handles = [module.register_forward_hook(partial(_see, own, apart)) for module, own, apart in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def sensitivity(self, name: str) -> Tensor:
        """`[matrices · out]`, mean squared gradients at what the rows of a tensor give, in their order."""
        return self.by_name[name].sensitivity.flatten()

    def reduce(self, peers: Peers) -> None:
        for own in self.by_name.values():
            own.reduce(peers)

    @property
    def between_rows(self) -> dict[str, RowMoments]:
        """Of every projection's matrix, by its name, in the order of its rows."""
        return {name: own.between_rows for name, own in self.by_name.items() if own.between_rows is not None}


def _chunks(count: int, rows: Tensor) -> Sequence[Tensor]:
    return rows.chunk(count)


def _see(moments: Sequence[Moments], apart: _Apart, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    for own in moments:
        own.add(0, inputs[0])
    if output.requires_grad:
        output.register_hook(partial(_add_gradients, moments, 0, apart))


def _add_gradients(moments: Sequence[Moments], matrix: int, apart: _Apart, gradients: Tensor) -> None:
    for own, part in zip(moments, apart(gradients.flatten(0, -2).T), strict=True):
        own.add_gradients(matrix, part.T)
