"""Refinement of the experts of a layer between being encoded and being written.

A layer keeps what its experts were given on the disk (`RoutedTokens`). Coded experts are refined one after the other,
each by the process that encodes it; base and factors of a layer together, by the first process.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import Role
from moetool.bases.layer_base import LayerBase, agreed, base_path
from moetool.bases.pruning import spread
from moetool.calibration.output_gradients import load_metric, metric_path
from moetool.calibration.peers import Owned, Peers
from moetool.calibration.routed_tokens import RoutedTokens
from moetool.checkpoint.experts import ExpertReader, Weights
from moetool.checkpoint.files import save_tensors
from moetool.compress.encoded_layers import encoded_names
from moetool.compress.refining.codes import CodedExpert, MovingCodes, StoredMatrix
from moetool.compress.refining.factors import FactoredExperts, MatrixKey, MovingFactors
from moetool.compress.refining.refinement import MovingExperts, RefinableT, Refinement, held_out_windows, run_expert
from moetool.compress.results import RefinedLayer
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.job import to_cpu
from moetool.job.result import significant
from moetool.numerics.seeding import generator
from moetool.representations import Representation

_OF_EXPERT = 16_384, 4_096  # most tokens that codes of an expert learn from, and that are held out
_OF_LAYER = 57_344, 8_192  # most tokens that base and factors of a layer learn from, and that are held out
MOST_TOKENS, MOST_KEPT = sum(_OF_EXPERT), sum(_OF_LAYER)


@dataclass(frozen=True, eq=False)
class Refining:
    """Refinement of the experts of every layer of a job.

    Attributes:
        reader: reader of the original experts.
        work: the work directory.
        device: the device to work on.
        steps: steps per expert, or per layer where its experts are refined together.
        seed: seed of the order of tokens.
    """

    reader: ExpertReader
    work: Path
    device: torch.device
    steps: int
    seed: int

    def result(self, layer: int) -> RefinedLayer:
        """Count of refined experts of a written layer, and their loss before and after."""
        costs = load_file(refined_path(self.work, layer))["costs"]
        before, after, changed = costs.sum(0).tolist()
        return RefinedLayer(int(changed), len(costs) - int(changed), significant(before), significant(after))

    def unmoved_base(self, layer: int, peers: Peers) -> LayerBase:
        """The base of a layer as it was measured, however often the layer has been refined."""
        path = self.work / f"unmoved-{layer:05d}.safetensors"
        kept = LayerBase.load(path if path.exists() else base_path(self.work, layer))
        return agreed(peers, path, kept)


class LayerRefining:
    """Refinement of one layer, with transformers' fused experts `native`, whose matrices `weights` gives."""

    def __init__(
        self,
        refining: Refining,
        layer: int,
        native: nn.Module,
        weights: Weights,
        base: LayerBase,
        layout: LayerLayout,
        examples: RoutedTokens,
    ) -> None:
        self._all, self._layer, self._layout, self._examples = refining, layer, layout, examples
        self._weights, self._stored_base = weights, base
        shape, device = refining.reader.shape, refining.device
        self._shape, self._device, self._dtype = shape, device, refining.reader.dtype
        self._run = partial(run_expert, native, shape)
        self._bases = {role: base.full(role).to(device) for role in shape.roles if layout.weights[role] is not None}
        self._metric = load_metric(metric_path(refining.work, layer), device)
        self._costs = torch.zeros(shape.experts, 3, dtype=torch.float64)  # before, after, whether it was changed

    def refined(
        self, expert: int, tensors: Mapping[Role, Mapping[str, Tensor]]
    ) -> Mapping[Role, Mapping[str, Tensor]] | None:
        """The stored tensors of one expert, by role, with codes and scales moved; `None` if that makes the expert no
        better on the windows held out."""
        stored = dict[Role, StoredMatrix]()
        for role, original in self._original(expert).items():
            form = (self._layout.weights[role] or ())[expert]
            base = self._bases.get(role) if form.uses_base else None
            matrix, turn = original if base is None else original - base, self._layout.input_rotation(role)
            own = {name: tensor.to(self._device) for name, tensor in tensors[role].items()}
            stored[role] = StoredMatrix(form, own, matrix if turn is None else turn(matrix), base, turn)
        coded = CodedExpert(stored, self._dtype)
        stream = generator(self._all.seed, "refine", self._layer, expert)
        found = self._refine(range(expert, expert + 1), _OF_EXPERT, coded, MovingCodes(coded), stream)
        return {role: own.tensors for role, own in found.roles.items()} if self._costs[expert, 2] else None

    def refined_together(self, encoded: Iterator[tuple[str, Tensor]], owned: Owned) -> Iterator[tuple[str, Tensor]]:
        """Refine the factors of all experts of a layer together, and return those deltas that this process owns. The
        refined base is written to its file in the work directory."""
        peers, own = owned.peers, encoded_names(self._layout, owned)
        every = dict(chain.from_iterable(peers.gather(list(encoded))))
        if peers.is_first:
            experts = self._factored(every)
            stream = generator(self._all.seed, "refine", self._layer)
            found = self._refine(range(self._shape.experts), _OF_LAYER, experts, MovingFactors(experts), stream)
            if found is not experts:
                for (role, expert), (u, v) in found.factors.items():
                    for name, tensor in found.forms[role, expert].encode_factors(u, v, self._dtype).items():
                        every[delta_name(expert, role, name)] = to_cpu(tensor)
            moved = {role: self._kept_channels(role, found.bases[role]) for role in found.masks}
            self._stored_base.moved(moved).save(base_path(self._all.work, self._layer))
        every = peers.broadcast(every)
        self.save(peers)
        return ((name, tensor) for name, tensor in every.items() if name in own)

    def _refine(
        self,
        experts: range,
        most: tuple[int, int],
        stored: RefinableT,
        moving: MovingExperts[RefinableT],
        stream: torch.Generator,
    ) -> RefinableT:
        """Some experts, refined on at most so many tokens and held to at most so many others."""
        examples, held_out = self._examples, held_out_windows(self._examples.windows)
        learnt, judged = (
            examples.text(experts, windows, count, self._device)
            for windows, count in zip((~held_out, held_out), most, strict=True)
        )
        task = Refinement(self._run, self._original, learnt, judged, self._metric)
        found = task.refine(stored, moving, self._all.steps, stream)
        tokens = examples.length * int(held_out.sum())
        self._costs[experts.start, :2] = torch.tensor([found.before / tokens, found.after / tokens])
        self._costs[experts.start : experts.stop, 2] = float(found.is_better)
        return found.stored

    def _original(self, expert: int) -> dict[Role, Tensor]:
        return {role: self._weights(expert, role).to(self._device).float() for role in self._shape.roles}

    def _factored(self, encoded: Mapping[str, Tensor]) -> FactoredExperts:
        base, shape, device = self._stored_base, self._shape, self._device
        factors: dict[MatrixKey, tuple[Tensor, Tensor]] = {}
        whole: dict[MatrixKey, Tensor] = {}
        deltas: dict[MatrixKey, Tensor] = {}
        stored: dict[MatrixKey, Representation] = {}
        for role in shape.roles:
            forms = self._layout.weights[role]
            for expert in range(shape.experts):
                if forms is None or not forms[expert].uses_base:
                    whole[role, expert] = self._weights(expert, role).to(device).float()
                    continue
                form, matrix = forms[expert], shape.matrix(role)
                own = {name: encoded[delta_name(expert, role, name)].to(device) for name in form.tensors(matrix)}
                if (pair := form.decode_factors(own, matrix, self._dtype)) is not None:
                    factors[role, expert], stored[role, expert] = pair, form
                elif own:
                    deltas[role, expert] = form.decode(own, matrix, self._dtype).float()
        masks = {
            role: spread(
                torch.ones_like(base.matrices[role], dtype=torch.float32),
                base.channels,
                base.intermediate,
                1 if role == "down" else 0,
            ).to(device)
            for role in self._bases
            if role not in base.compact
        }
        return FactoredExperts(shape.roles, self._bases, masks, factors, whole, deltas, stored, self._dtype)

    def _kept_channels(self, role: Role, full: Tensor) -> Tensor:
        """A base `[out, in]` as it is stored, without the channels that are gone."""
        channels = self._stored_base.channels.to(full.device)
        return to_cpu(full.index_select(1 if role == "down" else 0, channels).to(self._dtype))

    def save(self, peers: Peers) -> None:
        """Write the losses and counts of all processes to the work directory."""
        peers.all_reduce(self._costs)
        if peers.is_first:
            save_tensors(refined_path(self._all.work, self._layer), {"costs": self._costs})


def refined_path(work: Path, layer: int) -> Path:
    """File where losses and counts of a refined layer wait for the end of the job."""
    return work / f"refined-{layer:05d}.safetensors"
