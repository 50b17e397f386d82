"""Last step for a measured layer: order of experts, representative values, selector."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.format.kinds.moefied import SelectorKind
from moetool.moefy.clusters import chosen_experts
from moetool.moefy.leading import leading_projection
from moetool.moefy.options import MoefyOptions
from moetool.moefy.selector import TrainedSelector, captured_share, expert_scores, side_by_side, train_selector
from moetool.moefy.statistics import CHUNK, SampledNetwork
from moetool.numerics.seeding import generator

# What counts as no activation (the ε of Eq. 12, as in Fig. 1 of G-MoEfication).
SOFT_ZERO = 0.03


@dataclass(frozen=True)
class Settling:
    """Maker of a measured layer's clusters and selector.

    Attributes:
        options: of the job.
        selector: what chooses experts.
        keeps_means: whether neurons that are left out count with a representative value, or not at all.
        experts: per layer.
    """

    options: MoefyOptions
    selector: SelectorKind
    keeps_means: bool
    experts: int

    def settled(
        self, index: int, network: SampledNetwork, mean: Tensor, order: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The fields of a `LayerPlan`, and of `Activations`, for layer `index`.

        Args:
            index: of the layer.
            network: of it, with a sample of the text.
            mean: `[intermediate]` fp64, mean activations on the whole text.
            order: `[intermediate]` int64, neurons expert by expert.
        """
        if self.selector == "projection":
            return self._led(network, mean)
        options, ordered = self.options, mean[order].float()
        tensors = {"order": order, "centre": self.centre(mean)[order]}
        scores, told = self._scores(network, tensors, ordered)
        if self.selector == "mlp":
            told |= self._learn(index, network, tensors, ordered, scores)
        elif self.selector == "fixed":
            ranking = torch.arange(self.experts)
            if options.baseline != "snip":
                ranking = torch.randperm(self.experts, generator=generator(options.seed, "ranking", index))
            tensors["ranking"] = ranking
            told["captured"] = round(captured_share(scores[:, ranking[: self._chosen]], scores), 6)
        return tensors, told

    def centre(self, mean: Tensor) -> Tensor:
        """Representative values `[intermediate]` fp32, as they are at first, given mean activations."""
        return mean.float() if self.keeps_means else torch.zeros_like(mean, dtype=torch.float32)

    @property
    def _chosen(self) -> int:
        """Number of experts computed per token."""
        return chosen_experts(self.options.keep, self.experts)

    def _scores(
        self, network: SampledNetwork, tensors: Mapping[str, Tensor], mean: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """What every expert contributes to the sampled tokens, `[tokens, experts]`, and how sparse activations are."""
        order, parts, sparsity = tensors["order"].to(network.device), [], _Sparsity(mean)
        for unordered in network.activations():
            activations = unordered[:, order]
            parts.append(expert_scores(activations, tensors["centre"].to(activations), self.experts))
            sparsity.see(activations)
        return torch.cat(parts), sparsity.told()

    def _led(self, network: SampledNetwork, mean: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Neurons as they are, each an expert, and the projection that chooses among them."""
        sparsity = _Sparsity(mean.float())
        for activations in network.activations():
            sparsity.see(activations)
        found = leading_projection(network, self._chosen)
        return {
            "order": torch.arange(len(mean)),
            "centre": found.centre.float().cpu() if self.keeps_means else torch.zeros(len(mean)),
            f"{found.lead}_price": found.price.cpu(),
        }, sparsity.told() | {
            "captured": found.captured,
            "captured_by_oracle": found.best,
            "selector_accuracy": found.accuracy,
        }

    def _learn(
        self, index: int, network: SampledNetwork, tensors: dict[str, Tensor], mean: Tensor, scores: Tensor
    ) -> dict[str, float]:
        """Put experts side by side that belong together, train their selector, settle representative values."""
        options, experts = self.options, self.experts
        neighbours = side_by_side(scores, self._chosen)
        order, centre, mean = (
            whole.view(experts, -1)[neighbours].flatten() for whole in (tensors["order"], tensors["centre"], mean)
        )
        selector = train_selector(
            network.inputs,
            scores[:, neighbours.to(scores.device)],
            network.input_rows()[order.to(network.device)].unflatten(0, (experts, -1)).mean(1),
            self._chosen,
            seed=options.seed,
            layer=index,
            epochs=options.epochs,
            as_published=options.as_published,
        )
        if self.keeps_means and not options.as_published:
            centre = mean_where_left_out(network, order, selector, self._chosen, mean)
        tensors |= {"order": order, "centre": centre, "first": selector.first.cpu(), "second": selector.second.cpu()}
        return {
            "captured": round(selector.captured, 6),
            "captured_by_oracle": round(selector.best, 6),
            "selector_accuracy": round(selector.accuracy, 6),
        }


def mean_where_left_out(
    network: SampledNetwork, order: Tensor, selector: TrainedSelector, chosen: int, mean: Tensor
) -> Tensor:
    """Mean activations `[intermediate]` over the sampled tokens whose selector leaves a neuron out; of neurons that are
    never left out, `mean`.

    Of all constants these lose least, and the network's mean output stays what it was.
    """
    experts = len(selector.first)
    total, times = torch.zeros(len(order), dtype=torch.float64), torch.zeros(experts, dtype=torch.float64)
    for rows, unordered in zip(network.inputs.split(CHUNK), network.activations(), strict=True):
        left_out = selector.left_out(rows, chosen)
        activations = unordered[:, order.to(network.device)].float().unflatten(-1, (experts, -1))
        total += (activations * left_out[..., None]).sum(0, dtype=torch.float64).flatten().cpu()
        times += left_out.sum(0).double().cpu()
    every = times.repeat_interleave(len(order) // experts)
    return torch.where(every > 0, total / every.clamp_min(1), mean.double()).float()


class _Sparsity:
    """Counter of activations near zero, and near their neuron's mean `[intermediate]`."""

    def __init__(self, mean: Tensor) -> None:
        self._mean = mean
        self._count = self._small = self._small_centred = 0

    def see(self, activations: Tensor) -> None:
        """Count those of some tokens, `[tokens, intermediate]`."""
        self._count += activations.numel()
        self._small += _count_small(activations)
        self._small_centred += _count_small(activations - self._mean.to(activations))

    def told(self) -> dict[str, float]:
        """Shares of all, by the names of `Activations`."""
        return {
            "soft_sparsity": round(self._small / self._count, 6),
            "soft_sparsity_centred": round(self._small_centred / self._count, 6),
        }


def _count_small(activations: Tensor) -> int:
    return int((activations.abs() <= SOFT_ZERO).sum())
