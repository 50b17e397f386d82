"""The deltas of a layer that are about to be written, refined together with their base."""

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
from moetool.calibration.peers import Owned, Peers
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.files import save_tensors
from moetool.compress.factors.refining import JointTask, MatrixKey, MovableExperts, outputs
from moetool.compress.factors.routed_text import RoutedText
from moetool.compress.owning import encoded_names
from moetool.compress.refining.layer import refined_path
from moetool.compress.refining.metric import load_metric, metric_path
from moetool.compress.refining.running import run_expert
from moetool.compress.told import JointlyRefined
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.job import to_cpu
from moetool.numerics.seeding import generator

EncodedDeltas = Mapping[str, Tensor]  # of the deltas of a layer, relative to its experts


@dataclass(frozen=True, eq=False)
class JointRefining:
    """Options and inputs of refining a layer's base and factors together.

    Attributes:
        work: directory.
        layer: its number.
        layout: of its experts.
        device: to work on.
        dtype: of what is stored.
        steps: how many.
        seed: of which tokens come when.
    """

    work: Path
    layer: int
    layout: LayerLayout
    device: torch.device
    dtype: torch.dtype
    steps: int
    seed: int

    def base(self, peers: Peers) -> LayerBase:
        """The base as it was measured, however often the layer has been refined."""
        path = self.work / f"unmoved-{self.layer:05d}.safetensors"
        kept = LayerBase.load(path if path.exists() else base_path(self.work, self.layer))
        return agreed(peers, path, kept)

    def refined(
        self,
        native: nn.Module,
        weights: Weights,
        base: LayerBase,
        text: RoutedText,
        encoded: Iterator[tuple[str, Tensor]],
        owned: Owned,
    ) -> Iterator[tuple[str, Tensor]]:
        """The deltas that this process has, moved; the moved base lies in its place in the work directory.

        Args:
            native: transformers' fused experts, for their biases and activation function.
            weights: the matrices that the experts were made of.
            base: as deltas were taken to it.
            text: what the experts are given.
            encoded: the deltas that this process has.
            owned: which these are.
        """
        peers, own = owned.peers, encoded_names(self.layout, owned)
        every = dict(chain.from_iterable(peers.gather(list(encoded))))
        if peers.is_first:
            every, base = self._moved(native, weights, base, text, every)
            base.save(base_path(self.work, self.layer))
        every = peers.broadcast(every)
        return ((name, tensor) for name, tensor in every.items() if name in own)

    def _moved(
        self, native: nn.Module, weights: Weights, base: LayerBase, text: RoutedText, encoded: EncodedDeltas
    ) -> tuple[dict[str, Tensor], LayerBase]:
        shape, device = self.layout.shape, self.device
        run = partial(run_expert, native, shape)

        def original(expert: int) -> dict[Role, Tensor]:
            return {role: weights(expert, role).to(device).float() for role in shape.roles}

        with torch.no_grad():
            target = outputs(run, original, text)
        task = JointTask(run, text, target, load_metric(metric_path(self.work, self.layer), device), self.dtype)
        found = task.refine(
            self._movable(weights, base, encoded), self.steps, generator(self.seed, "refine", self.layer)
        )
        save_tensors(refined_path(self.work, self.layer), {"costs": torch.tensor([found.before, found.after]).double()})
        moved = dict(encoded)
        for (role, expert), (u, v) in found.experts.factors.items():
            moved[delta_name(expert, role, "u")] = to_cpu(u.to(self.dtype))
            moved[delta_name(expert, role, "v")] = to_cpu(v.to(self.dtype))
        bases = {role: self._kept(role, found.experts.bases[role], base) for role in found.experts.masks}
        return moved, base.moved(bases)

    def _kept(self, role: Role, full: Tensor, base: LayerBase) -> Tensor:
        """A base `[out, in]` as it is stored, without the channels that are gone."""
        channels = base.channels.to(full.device)
        return to_cpu(full.index_select(1 if role == "down" else 0, channels).to(self.dtype))

    def _movable(self, weights: Weights, base: LayerBase, encoded: EncodedDeltas) -> MovableExperts:
        shape, device = self.layout.shape, self.device
        based = [role for role in shape.roles if self.layout.weights[role] is not None]
        factors: dict[MatrixKey, tuple[Tensor, Tensor]] = {}
        whole: dict[MatrixKey, Tensor] = {}
        for role in shape.roles:
            forms = self.layout.weights[role]
            for expert in range(shape.experts):
                if forms is None or not forms[expert].uses_base:
                    whole[role, expert] = weights(expert, role).to(device).float()
                elif forms[expert].directions:
                    u, v = (encoded[delta_name(expert, role, name)].to(device).float() for name in ("u", "v"))
                    factors[role, expert] = u, v
        bases = {role: base.full(role).to(device) for role in based}
        masks = {
            role: spread(
                torch.ones_like(base.matrices[role], dtype=torch.float32),
                base.channels,
                base.intermediate,
                1 if role == "down" else 0,
            ).to(device)
            for role in based
            if role not in base.compact
        }
        return MovableExperts(shape.roles, bases, masks, factors, whole)


def told(work: Path, layer: int) -> JointlyRefined:
    """Loss of a written layer before and after refinement."""
    before, after = load_file(refined_path(work, layer))["costs"].tolist()
    return JointlyRefined(float(f"{before:.4g}"), float(f"{after:.4g}"))
