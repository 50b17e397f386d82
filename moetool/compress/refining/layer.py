"""The experts of one layer, refined one after the other as they are encoded."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.bases.layer_base import LayerBase
from moetool.calibration.peers import Peers
from moetool.calibration.routed_tokens import RoutedTokens
from moetool.checkpoint.experts import ExpertReader, Weights
from moetool.checkpoint.files import save_tensors
from moetool.compress.refining.expert import Refinement, StoredMatrix
from moetool.compress.refining.metric import load_metric, metric_path
from moetool.compress.refining.running import run_expert
from moetool.compress.told import RefinedLayer
from moetool.format.layout import LayerLayout
from moetool.numerics.seeding import generator

_HELD_OUT = 8  # of so many windows one is not learnt from
_MOST, _MOST_HELD_OUT = 16_384, 4_096  # tokens of an expert
MOST_TOKENS = _MOST + _MOST_HELD_OUT


@dataclass(frozen=True, eq=False)
class Refining:
    """Refinement of the experts of every layer of a job.

    Attributes:
        reader: of the experts.
        work: directory.
        device: to work on.
        steps: per expert.
        seed: of which tokens come when.
    """

    reader: ExpertReader
    work: Path
    device: torch.device
    steps: int
    seed: int

    def told(self, layer: int) -> RefinedLayer:
        """Count of refined experts of a written layer, and their loss before and after."""
        costs = load_file(refined_path(self.work, layer))["costs"]
        before, after, changed = costs.sum(0).tolist()
        return RefinedLayer(int(changed), len(costs) - int(changed), float(f"{before:.4g}"), float(f"{after:.4g}"))


class LayerRefining:
    """The same for one layer, with transformers' fused experts `native`, whose matrices `weights` gives."""

    def __init__(
        self,
        refining: Refining,
        layer: int,
        native: nn.Module,
        weights: Weights,
        base: LayerBase | None,
        layout: LayerLayout,
        examples: RoutedTokens,
    ) -> None:
        self._all, self._layer, self._native, self._layout = refining, layer, native, layout
        self._examples = examples
        self._weights, shape, device = weights, refining.reader.shape, refining.device
        based = [role for role in shape.roles if base is not None and layout.weights[role] is not None]
        self._base = {role: base.full(role).to(device) for role in based if base is not None}
        path = metric_path(refining.work, layer)
        self._metric = load_metric(path, device) if path.exists() else torch.eye(shape.hidden, device=device)
        self._costs = torch.zeros(shape.experts, 3, dtype=torch.float64)

    def refined(self, expert: int, tensors: Mapping[Role, Mapping[str, Tensor]]) -> Mapping[Role, Mapping[str, Tensor]]:
        """The tensors of one expert, by role, moved."""
        shape, device, stored = self._all.reader.shape, self._all.device, dict[Role, StoredMatrix]()
        original = {role: self._weights(expert, role).to(device).float() for role in shape.roles}
        for role in shape.roles:
            form = (self._layout.weights[role] or ())[expert]
            base = self._base.get(role) if form.uses_base else None
            matrix, turn = original[role] if base is None else original[role] - base, self._layout.turning(role)
            own = {name: tensor.to(device) for name, tensor in tensors[role].items()}
            stored[role] = StoredMatrix(form, own, matrix if turn is None else turn(matrix), base, turn)
        task = Refinement(
            partial(run_expert, self._native, shape, expert),
            original,
            self._metric,
            self._all.steps,
            self._all.reader.dtype,
        )
        examples = self._examples
        count = examples.windows
        last = count - max(1, count // _HELD_OUT)
        given = examples.of(expert, range(last), _MOST, device)
        held_out = examples.of(expert, range(last, count), _MOST_HELD_OUT, device)
        found = task.refine(stored, given, held_out, generator(self._all.seed, "refine", self._layer, expert))
        tokens = examples.length * (count - last)
        self._costs[expert] = torch.tensor([found.before / tokens, found.after / tokens, float(found.is_better)])
        return found.tensors

    def save(self, peers: Peers) -> None:
        """Leave in the work directory what was done, by all processes together."""
        peers.all_reduce(self._costs)
        if peers.is_first:
            save_tensors(refined_path(self._all.work, self._layer), {"costs": self._costs})


def refined_path(work: Path, layer: int) -> Path:
    """Where what was done to a layer waits for the end of the job."""
    return work / f"refined-{layer:05d}.safetensors"
