"""Losses of all subsets of a layer's experts: how far its output then is from the original (NAEE, arXiv:2402.14800,
§3.2)."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from moetool.calibration.held_experts import HeldExperts, RoutedBatch
from moetool.calibration.observation import replaced
from moetool.job.job import Source
from moetool.reduce.choosing import Fewer
from moetool.reduce.plan import counted_config, rows_kept
from moetool.reduce.scores import Scores
from moetool.runtime.building import empty_model

LOSSES = "losses"
NUMBERS_AT_ONCE = 1 << 22  # in the outputs of all experts for some tokens

Subset = tuple[int, ...]
Weigh = Callable[
    [Tensor], Tensor
]  # what experts are given `[tokens, hidden]` → the router's weights `[tokens, experts + 1]`, the last of all others


def subset_count(fewer: Fewer) -> int:
    """Number of subsets of a layer's experts that could be kept: a product of binomials, one per router group."""
    return math.prod(math.comb(len(group), fewer.each) for group in fewer.ranges)


def subsets(fewer: Fewer, sample: int | None, seed: int) -> list[Subset]:
    """Enumerate all subsets that could be kept, or draw `sample` different ones of them; sorted."""
    if sample is None or sample >= subset_count(fewer):
        ways = (itertools.combinations(group, fewer.each) for group in fewer.ranges)
        return [tuple(itertools.chain(*parts)) for parts in itertools.product(*ways)]
    draw, found = random.Random(seed), set[Subset]()
    while len(found) < sample:
        found.add(tuple(itertools.chain(*(sorted(draw.sample(group, fewer.each)) for group in fewer.ranges))))
    return sorted(found)


class SubsetRouters:
    """Routers of some of a layer's experts, as transformers builds them for the config with so many."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._models: dict[int, nn.Module] = {}

    def _model(self, experts: int) -> nn.Module:
        if experts not in self._models:
            config, path = counted_config(self._source, experts), self._source.checkpoint.path
            self._models[experts] = empty_model(config, path, self._dtype).eval().requires_grad_(False)
        return self._models[experts]

    def of(self, index: int, layer: nn.Module, experts: Subset) -> Weigh:
        """The router of these experts, with the tensors of a loaded layer, until the next of as many is asked for."""
        architecture, count = self._source.architecture, self._source.experts.shape.experts
        place, _, inside = architecture.experts_module.rpartition(".")
        block = self._model(len(experts)).get_submodule(f"{architecture.layer_path(index)}.{place}")
        others = {inside, architecture.shared_expert_module.removeprefix(f"{place}.")}
        for other in others - {inside}:
            if hasattr(block, other):
                setattr(block, other, _Silent())
        own = layer.get_submodule(place)
        for name, tensor in itertools.chain(own.named_parameters(), own.named_buffers()):
            if name.partition(".")[0] not in others:
                _put(block, name, rows_kept(tensor, architecture, experts).detach())

        def weigh(hidden: Tensor) -> Tensor:
            weights = torch.zeros(len(hidden), count + 1, dtype=torch.float64, device=hidden.device)

            def note(states: Tensor, chosen: Tensor, taken: Tensor) -> Tensor:
                names = torch.tensor([*experts, count], device=chosen.device)
                weights.scatter_add_(1, names[chosen.clamp_max(len(experts))], taken.double())
                return torch.zeros_like(states)

            with torch.no_grad(), replaced(block.get_submodule(inside), note):
                block(hidden[None])
            return weights

        return weigh


class _Silent(nn.Module):
    """Stands for a shared expert, whose output does not matter."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def _put(block: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a block without weights one of them."""
    path, _, leaf = name.rpartition(".")
    module = block.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


class SubsetLosses(Scores):
    """‖Z − Z'‖² over all tokens, for the output Z of a layer's experts and that of each subset, Z'.

    Both are sums of the same outputs F `[experts, hidden]` of a token, whose weights differ by d: it loses dᵀ F Fᵀ d.
    So every expert runs once for all subsets.

    Attributes:
        losses: `[subsets]` fp64.
    """

    def __init__(
        self, experts: HeldExperts, whole: Weigh, each: Sequence[Subset], router: Callable[[Subset], Weigh]
    ) -> None:
        """`experts` are all of the layer's, in memory; `whole` is the layer's router, `router` that of a subset."""
        super().__init__(len(experts.experts))
        self._experts, self._whole, self._each, self._router = experts, whole, each, router
        self.losses = torch.zeros(len(each), dtype=torch.float64)

    def observe_inputs(self, inputs: Tensor, routing: RoutedBatch) -> None:
        products = torch.cat(list(self._products(inputs)))
        taken = self._whole(inputs)
        for place, subset in enumerate(self._each):
            lost = taken - self._router(subset)(inputs)
            self.losses[place] += torch.einsum("te,tef,tf->", lost, products, lost).cpu()

    def _products(self, inputs: Tensor) -> Iterator[Tensor]:
        """F Fᵀ of each token, `[tokens, experts + 1, experts + 1]` fp64. All others give nothing, or what they are
        given."""
        width = inputs.shape[1] * len(self._experts.experts)
        for rows in inputs.split(max(1, NUMBERS_AT_ONCE // width)):
            outputs = [self._experts.run(expert, rows).output for expert in self._experts.experts]
            others = rows if self._experts.gives_back else torch.zeros_like(rows)
            stacked = torch.stack([*outputs, others], dim=1).double()
            yield stacked @ stacked.transpose(1, 2)

    def sums(self) -> dict[str, Tensor]:
        return {LOSSES: self.losses}
