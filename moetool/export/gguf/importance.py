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
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.words import EXPERTS, layer_in_file

_Apart = Callable[[Tensor], Sequence[Tensor]]  # rows of a module's weight `[out, …]` as those of the file's tensors


@dataclass(frozen=True)
class Moments:
    """Second moments of the inputs of the matrices `[out, in]` of one tensor: of all experts, or of one.

    Attributes:
        given: `[matrices, in]` fp64, Σ over tokens of the squared inputs.
        counts: `[matrices]` fp64, how many tokens.
        gradient_energy: `[matrices, out]` fp64, Σ over tokens of the squared gradients at the outputs; zeros if none
            were taken.
    """

    given: Tensor
    counts: Tensor
    gradient_energy: Tensor

    @classmethod
    def none(cls, matrices: int, shape: Sequence[int], device: torch.device) -> "Moments":
        """Make moments of no tokens: zeros for so many matrices of this shape."""
        rows, columns = shape
        sizes = (matrices, columns), (matrices,), (matrices, rows)
        return cls(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))

    def add(self, matrix: int, inputs: Tensor) -> None:
        """Add inputs `[…, in]` of one matrix to its second moments and count."""
        rows = inputs.detach().flatten(0, -2)
        self.given[matrix] += rows.double().square().sum(0)
        self.counts[matrix] += len(rows)

    def add_gradients(self, matrix: int, gradients: Tensor) -> None:
        """Add the gradients `[…, out]` at the outputs that belong to these inputs."""
        self.gradient_energy[matrix] += gradients.flatten(0, -2).double().square().sum(0)

    @property
    def sensitivity(self) -> Tensor:
        """`[matrices, out]`, mean squared gradients; zeros for an expert that no token reached."""
        return self.gradient_energy / self.counts.clamp_min(1)[:, None]


class LayerMoments(Collector):
    """The moments of one loaded layer, all of whose experts are in memory.

    Attributes:
        by_name: of every tensor that can have few bits, by GGUF's name.
    """

    def __init__(self, source: GgufSource, layer: int, module: nn.Module, device: torch.device) -> None:
        self._source, self._layer = source, layer
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
            own = {name: Moments.none(1, (size, columns), device) for name, size in zip(names, rows, strict=True)}
            self._modules.append((projection, list(own.values()), apart))
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
        found = self.by_name[name].sensitivity
        if len(found) > 1:
            return found.flatten()
        own = self._source.family.multiplied(name, self._source.config, found[0], power=-2)
        return self._source.turned(name, own)


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
