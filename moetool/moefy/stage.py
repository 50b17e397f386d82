"""What both kinds of MoEfication share: neurons into experts, statistics on a text, selectors, and what they cost."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.checkpoint.files import save_tensors, write_json
from moetool.checkpoint.manifest import DenseOrigin, Provenance
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.layers import parse_layers
from moetool.convert.stage import Conversion, ConversionOptions, MeasuredModel
from moetool.convert.told import Activations, Proof
from moetool.errors import InvalidInputError, UsageError
from moetool.format.entry import custom_entry
from moetool.format.kinds import custom_module
from moetool.format.kinds.moefied import MoefiedSpec, SelectorKind
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.job.phases import Phases, neuron_phases
from moetool.job.plan import CalibrationCost
from moetool.job.result import CalibrationFacts, Json
from moetool.moefy.clusters import (
    LayerPlan,
    Moefied,
    check_experts,
    chosen_experts,
    clustered_order,
    flops,
)
from moetool.moefy.selector import TrainedSelector, expert_scores, needed_tokens, side_by_side, train_selector
from moetool.moefy.statistics import CHUNK, NeuronStatistics
from moetool.numerics.seeding import generator

# Tokens of text that a token attends to, where FLOPs are counted: what reproduces Table 1 of G-MoEfication.
COUNTED_LENGTH = 128
# What counts as no activation (the ε of Eq. 12, as in Fig. 1 of G-MoEfication).
SOFT_ZERO = 0.03


class MoefyOptions(ConversionOptions):
    """How neurons are split, and which are computed."""

    experts: int = Field(64, ge=2, description="Experts per layer, each the same number of neurons.")
    keep: float = Field(0.75, gt=0, le=1, description="Share of the experts that one token uses; may be changed later.")
    layers: str = Field("all", description="Layers to split: all, every:N, or a list such as 0,4,8.")
    selector: Literal["mlp", "oracle", "random"] = Field(
        "mlp", description="What chooses: a small trained network, the true scores (no faster, for comparison), or "
        "chance, once for all tokens."
    )  # fmt: skip
    baseline: Literal["none", "snip"] = Field(
        "none", description="Instead of experts keep the single neurons that matter most to the loss (SNIP)."
    )
    representative: Literal["unselected", "mean"] = Field(
        "unselected", description="What neurons count with that are left out: their mean over the tokens that do "
        "without them, at this --keep, or over all tokens as published."
    )  # fmt: skip
    epochs: int = Field(30, ge=1, description="Passes of a selector's training.")
    selector_tokens: int = Field(32768, ge=1, description="Most tokens that a selector is trained on.")
    calibration: str | None = Field(
        None, description="Text for activations and selectors: a .txt, .jsonl or .parquet file, a folder of them, or a "
        "hub data set name[:config[:split[:column]]]; several with commas."
    )  # fmt: skip
    samples: int = Field(128, ge=1, description="Windows of calibration text.")


class Moefy(Conversion[MoefyOptions]):
    """A dense model that computes only a part of its feed-forward networks for each token.

    Attributes:
        keeps_means: whether neurons that are left out count with a representative value, or not at all.
    """

    keeps_means: ClassVar[bool]

    options_type: ClassVar[type[RunOptions]] = MoefyOptions
    method_of: ClassVar[str | None] = "moefy"
    takes_any_network: ClassVar[bool] = True

    @property
    def _selector(self) -> SelectorKind:
        if self.options.baseline == "snip" or self.options.selector == "random":
            return "fixed"
        return "oracle" if self.options.selector == "oracle" else "mlp"

    @property
    def _chosen(self) -> int:
        """Experts per token."""
        return chosen_experts(self.options.keep, self.options.experts)

    @property
    def preserves(self) -> bool:
        return True  # with all experts, which is what is proved

    @property
    def measures(self) -> bool:
        return True

    @cached_property
    def _layers(self) -> tuple[int, ...]:
        return parse_layers(self.options.layers, self.dense.layers)

    def planned(self) -> Moefied:
        return self._moefied(lambda layer: _NOTHING)

    def converted(self, job: Job[DenseSource]) -> MeasuredModel:
        facts = self._measure(job)
        found = {layer: _read_activations(_file(job, layer)) for layer in self._layers}
        return MeasuredModel(self._moefied(lambda layer: _read_plan(_file(job, layer))), facts, found)

    def _moefied(self, layer_plan: Callable[[int], LayerPlan]) -> Moefied:
        options = self.options
        if options.baseline == "snip" and options.selector != "mlp":
            raise UsageError("--baseline snip keeps the same neurons for every token: it takes no --selector.")
        check_experts(options.experts, self.dense.intermediate)
        chosen_experts(options.keep, options.experts)
        self._check_text()
        spec = MoefiedSpec(experts=options.experts, keep=options.keep, selector=self._selector, layers=self._layers)
        return Moefied(dense=self.dense, dtype=self.new_dtype, seed=options.seed, spec=spec, layer_plan=layer_plan)

    def _check_text(self) -> None:
        options = self.options
        tokens, needed = options.samples * options.sequence_length, needed_tokens(options.experts)
        if options.calibration is None and not self.source.checkpoint.is_imagined:
            raise UsageError("moefy needs a calibration text: --calibration FILE.")
        if self._selector == "mlp" and min(tokens, options.selector_tokens) < needed:
            raise UsageError(
                f"{min(tokens, options.selector_tokens):,} tokens are too few to train the selectors of "
                f"{options.experts} experts: {needed:,} are needed (--samples, --sequence-length, --selector-tokens)."
            )

    def details(self) -> dict[str, Json]:
        options, dense = self.options, self.dense
        means = dense.intermediate + dense.hidden if self.keeps_means else 0  # and the constant that follows from them
        added = len(self._layers) * (self.planned().spec.selector_size(dense.hidden) + means)
        share = flops(dense, len(self._layers), options.keep, options.experts, COUNTED_LENGTH, self._selector)
        return {
            "experts": options.experts,
            "experts_per_token": self._chosen,
            "moe_layers": len(self._layers),
            "flops": f"{share:.1%} of dense, reading {COUNTED_LENGTH} tokens",
            "added_as_published": f"{added / dense.parameters:.4f} of dense",
        }

    def measuring(self) -> Phases:
        options, dense = self.options, self.dense
        cost = CalibrationCost(options.samples, options.sequence_length, 4)
        tokens = min(options.selector_tokens, options.samples * options.sequence_length)
        epochs = options.epochs if self._selector == "mlp" else 0
        return neuron_phases(
            cost, dense, len(self._layers), tokens, options.experts, epochs, gradients=options.baseline == "snip"
        )

    def _scratch_bytes(self) -> int:
        if self.options.baseline == "snip":
            cost = CalibrationCost.of(self.options, torch.float32, self.dense.dtype)
            return cost.gradient_bytes(self.dense.hidden, self.dense.layers)
        return super()._scratch_bytes()

    def _memory_bytes(self) -> int:
        options, dense = self.options, self.dense
        tokens = min(options.selector_tokens, options.samples * options.sequence_length)
        sampled = 4 * tokens * (3 * dense.hidden + 2 * options.experts) + 4 * 4 * CHUNK * dense.intermediate
        clustering = 3 * 4 * dense.intermediate * 2 * dense.hidden
        return super()._memory_bytes() + sampled + clustering

    def provenance(self) -> Provenance:
        dtype = str(self.dense.dtype).removeprefix("torch.")
        return Provenance(moefied=DenseOrigin(source_config=self.dense.checkpoint.config, dtype=dtype))

    def notes(self, config: dict[str, object]) -> list[str]:
        return ["only transformers, after `import moetool`, runs a moefied model"]

    # What a text says.

    def _measure(self, job: Job[DenseSource]) -> CalibrationFacts:
        gradients = self.options.baseline == "snip"
        calibrated = CalibratedJob(job, self.options, encoder=self.dense.architecture.is_encoder, gradients=gradients)
        tokens = calibrated.sweep.windows.numel()
        if self._selector == "mlp" and tokens < needed_tokens(self.options.experts):
            raise InvalidInputError(
                f"The calibration text has {tokens:,} tokens; the selectors of {self.options.experts} experts need "
                f"{needed_tokens(self.options.experts):,}."
            )

        def forward(index: int, layer: nn.Module) -> None:
            statistics = NeuronStatistics(layer, self.dense.architecture, self.options.selector_tokens, tokens)
            with statistics.watching():
                calibrated.sweep.forward(index, layer)
            order = clustered_order(self.dense, index, self.options.experts, self.options.seed)
            self._settle(job, index, statistics, order)

        def backward(index: int, layer: nn.Module) -> None:
            statistics = NeuronStatistics(layer, self.dense.architecture, self.options.selector_tokens, tokens)
            with statistics.watching(gradients=True, loss_scale=calibrated.gradient_sweep.loss_scale):
                calibrated.gradient_sweep.backward(index, layer)
            self._settle(job, index, statistics, statistics.saliency.argsort(descending=True, stable=True))

        if gradients:
            calibrated.reverse(backward, 1, self._layers)
        else:
            calibrated.forward_visiting(forward, self._layers)
        return calibrated.facts

    def _settle(self, job: Job[DenseSource], index: int, statistics: NeuronStatistics, order: Tensor) -> None:
        """Everything that is to be known of one layer, into its file."""
        options = self.options
        mean = statistics.mean[order].float()
        tensors = {"order": order, "centre": mean if self.keeps_means else torch.zeros_like(mean)}
        scores, told = self._scores(statistics, tensors, mean)
        if self._selector == "mlp":
            told |= self._learn(index, statistics, tensors, mean, scores)
        elif self._selector == "fixed":
            ranking = torch.arange(options.experts)
            if options.baseline != "snip":
                ranking = torch.randperm(options.experts, generator=generator(options.seed, "ranking", index))
            tensors["ranking"] = ranking
            told["captured"] = round((scores[:, ranking[: self._chosen]].sum() / scores.sum()).item(), 6)
        save_tensors(_file(job, index), tensors)
        write_json(_file(job, index).with_suffix(".json"), told)

    def _scores(
        self, statistics: NeuronStatistics, tensors: Mapping[str, Tensor], mean: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """What every expert contributes to the sampled tokens, `[tokens, experts]`, and how sparse activations are."""
        order, parts, small, small_centred = tensors["order"].to(statistics.device), [], 0, 0
        for unordered in statistics.sampled_activations():
            activations = unordered[:, order]
            parts.append(expert_scores(activations, tensors["centre"].to(activations), self.options.experts))
            small += _count_small(activations)
            small_centred += _count_small(activations - mean.to(activations))
        scores = torch.cat(parts)
        count = len(scores) * len(order)
        return scores, {
            "soft_sparsity": round(small / count, 6),
            "soft_sparsity_centred": round(small_centred / count, 6),
        }

    def _learn(
        self, index: int, statistics: NeuronStatistics, tensors: dict[str, Tensor], mean: Tensor, scores: Tensor
    ) -> dict[str, float]:
        """Put experts side by side that belong together, train their selector, settle representative values."""
        options, experts = self.options, self.options.experts
        neighbours = side_by_side(scores, self._chosen)
        order, centre, mean = (
            whole.view(experts, -1)[neighbours].flatten() for whole in (tensors["order"], tensors["centre"], mean)
        )
        selector = train_selector(
            statistics.sampled_inputs(),
            scores[:, neighbours.to(scores.device)],
            statistics.input_rows()[order.to(statistics.device)].unflatten(0, (experts, -1)).mean(1),
            self._chosen,
            seed=options.seed,
            layer=index,
            epochs=options.epochs,
        )
        if self.keeps_means and options.representative == "unselected":
            centre = _mean_where_left_out(statistics, order, selector, self._chosen, mean)
        tensors |= {"order": order, "centre": centre, "first": selector.first.cpu(), "second": selector.second.cpu()}
        return _told(selector)

    # Evidence.

    def _proved(self, job: Job[DenseSource], made: Checkpoint, tokens: Tensor) -> Proof:
        """With all experts it computes what the dense model computes; with as many as were asked for, what it loses."""
        from moetool.calibration.streaming import StreamedModel
        from moetool.convert import proof

        found = replace(super()._proved(job, _keeping_all(made), tokens), with_all_experts=True)
        if not self.dense.architecture.is_encoder:
            model = StreamedModel(made, self.dense.architecture, torch.float32, job.device)
            kept = proof.run(model, tokens, lambda: None)
            found = replace(found, loss_kept=round(proof.mean_loss(kept.logits, tokens), 6))
        return found


class GMoefication(Moefy):
    """G-MoEfication: neurons that are left out count with their mean activation, whatever the activation function."""

    name: ClassVar[str] = "g-moefication"
    summary: ClassVar[str] = "split FFNs into experts; those left out count with their mean activation"
    keeps_means: ClassVar[bool] = True


class Moefication(Moefy):
    """MoEfication (arXiv:2110.01786): neurons that are left out count as zero, which suits ReLU."""

    name: ClassVar[str] = "moefication"
    summary: ClassVar[str] = "split FFNs into experts; those left out count as zero"
    keeps_means: ClassVar[bool] = False


_NOTHING = LayerPlan(torch.zeros(0, dtype=torch.int64), torch.zeros(0))


def _file(job: Job[DenseSource], layer: int) -> Path:
    return job.work / f"neurons-{layer:05d}.safetensors"


def _read_plan(file: Path) -> LayerPlan:
    return LayerPlan(**load_file(file))


def _read_activations(file: Path) -> Activations:
    return Activations(**json.loads(file.with_suffix(".json").read_text()))


def _mean_where_left_out(
    statistics: NeuronStatistics, order: Tensor, selector: TrainedSelector, chosen: int, mean: Tensor
) -> Tensor:
    """Mean activations `[intermediate]` over the sampled tokens whose selector leaves a neuron out; of neurons that are
    never left out, `mean`.

    Of all constants these lose least, and the network's mean output stays what it was.
    """
    experts = len(selector.first)
    total, times = torch.zeros(len(order), dtype=torch.float64), torch.zeros(experts, dtype=torch.float64)
    inputs = statistics.sampled_inputs().split(CHUNK)
    for rows, unordered in zip(inputs, statistics.sampled_activations(), strict=True):
        left_out = selector.left_out(rows, chosen)
        activations = unordered[:, order.to(statistics.device)].float().unflatten(-1, (experts, -1))
        total += (activations * left_out[..., None]).sum(0, dtype=torch.float64).flatten().cpu()
        times += left_out.sum(0).double().cpu()
    every = times.repeat_interleave(len(order) // experts)
    return torch.where(every > 0, total / every.clamp_min(1), mean.double()).float()


def _count_small(activations: Tensor) -> int:
    return int((activations.abs() <= SOFT_ZERO).sum())


def _told(selector: TrainedSelector) -> dict[str, float]:
    return {
        "captured": round(selector.captured, 6),
        "captured_by_oracle": round(selector.best, 6),
        "selector_accuracy": round(selector.accuracy, 6),
    }


def _keeping_all(made: Checkpoint) -> Checkpoint:
    """The same checkpoint, with all experts at work."""
    spec = custom_module(made.config)
    assert isinstance(spec, MoefiedSpec)
    return replace(made, config={**made.config, "quantization_config": custom_entry(spec.keeping(1.0))})
