"""Second moments of the inputs of every matrix of a GGUF file on a text, and of the gradients at its outputs.

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
from moetool.calibration.row_moments import RowMoments
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.words import EXPERTS, layer_in_file

_Apart = Callable[[Tensor], Sequence[Tensor]]  # gradients `[out, tokens]` of a module as those of the file's tensors


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

    @property
    def sensitivity(self) -> Tensor:
        """`[matrices, out]`, mean squared gradients; zeros for an expert that no token reached."""
        return self.gradient_energy / self.counts.clamp_min(1)[:, None]


class LayerMoments(Collector):
    """The moments of one loaded layer, all of whose experts are in memory.

    Attributes:
        by_name: of every tensor that can have few bits, by GGUF's name.
    """

    def __init__(
        self, source: GgufSource, layer: int, module: nn.Module, device: torch.device, length: int | None = None
    ) -> None:
        """Watch a layer; with the `length` of windows, the second moments of gradients at its projections, too."""
        self.by_name: dict[str, Moments] = {}
        self._modules: list[tuple[nn.Module, list[Moments], _Apart]] = []
        settings, changes = source.config.to_dict(), source.changes(layer)
        for path, names in source.projections(layer).items():
            projection, change = module.get_submodule(path), changes.get(path)
            weight = projection.weight
            assert isinstance(weight, Tensor)
            is_transposed = change is not None and change.is_transposed
            whole, columns = weight.shape[::-1] if is_transposed else weight.shape
            apart = partial(_chunks, len(names))
            if change is not None and not is_transposed:
                apart = partial(change.apart, settings)
            rows = [len(part) for part in apart(torch.empty(whole, 1, device="meta"))]
            own = {}
            for name, size in zip(names, rows, strict=True):
                linked = None if length is None else RowMoments(size, length, device)
                own[name] = Moments.none(1, (size, columns), device, linked)
            self._modules.append((projection, list(own.values()), partial(_in_file, source, names, apart)))
            self.by_name |= own
        if source.experts is not None and layer in source.experts.moe_layers:
            shape = source.experts.shape
            self._experts = {role: Moments.none(shape.experts, shape.matrix(role), device) for role in shape.roles}
            self._entering = shape.entering
            self.by_name |= {layer_in_file(layer, EXPERTS[role]): own for role, own in self._experts.items()}

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
        """`[matrices · out]`, mean squared gradients at what the file's rows give, in their order."""
        return self.by_name[name].sensitivity.flatten()

    @property
    def between_rows(self) -> dict[str, RowMoments]:
        """Of every projection's tensor, by GGUF's name, in the order of the file's rows."""
        return {name: own.between_rows for name, own in self.by_name.items() if own.between_rows is not None}


def _chunks(count: int, rows: Tensor) -> Sequence[Tensor]:
    return rows.chunk(count)


def _in_file(source: GgufSource, names: Sequence[str], apart: _Apart, gradients: Tensor) -> Sequence[Tensor]:
    """Gradients `[out, tokens]` at a module's rows as those at the rows of the file's tensors: what multiplies a row
    there divides the gradient at it."""
    parts = zip(names, apart(gradients), strict=True)
    return [source.turned(name, source.family.multiplied(name, source.config, own, power=-1)) for name, own in parts]


def _see(moments: Sequence[Moments], apart: _Apart, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    for own in moments:
        own.add(0, inputs[0])
    if output.requires_grad:
        output.register_hook(partial(_add_gradients, moments, 0, apart))


def _add_gradients(moments: Sequence[Moments], matrix: int, apart: _Apart, gradients: Tensor) -> None:
    for own, part in zip(moments, apart(gradients.flatten(0, -2).T), strict=True):
        own.add_gradients(matrix, part.T)
