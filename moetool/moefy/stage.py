"""Stages of MoEfication: neurons split into experts, statistics on a text, selectors, and their costs."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from moetool.checkpoint.manifest import DenseOrigin, Provenance
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.layers import parse_layers
from moetool.convert.results import Proof
from moetool.convert.stage import Conversion, MeasuredModel
from moetool.costs.building_blocks import calibration_backward, calibration_forward, dense_size, loading
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.coefficients import COEFFICIENTS
from moetool.costs.phases import BACKWARD, FORWARD, Phase, Phases
from moetool.errors import UsageError
from moetool.format.entry import custom_entry
from moetool.format.kinds import custom_module
from moetool.format.kinds.moefied import MoefiedSpec, SelectorKind
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.job.plan import text_cost
from moetool.job.processes import processes
from moetool.job.result import Json
from moetool.moefy.clusters import (
    CLUSTERED_TOKENS,
    DIRECTIONS,
    LayerPlan,
    Moefied,
    check_experts,
    chosen_experts,
    flops,
)
from moetool.moefy.measuring import LayerFiles, NeuronMeasuring
from moetool.moefy.options import MoefyOptions
from moetool.moefy.selector import needed_tokens
from moetool.moefy.settling import Settling
from moetool.moefy.statistics import CHUNK
from moetool.numerics.work import Work
from moetool.runtime.dense import DenseModel

# Tokens of text that a token attends to, where FLOPs are counted: what reproduces Table 1 of G-MoEfication.
COUNTED_LENGTH = 128

_EXPERTS = 64  # per layer, where no projection chooses
_COPIES, _COPIES_TO_JUDGE = 4, 12  # in fp32, of the activations of some tokens; the latter to judge projections
_SEEN = 6  # times that activations of the sample are computed, or what takes as long


class Moefy(Conversion[MoefyOptions]):
    """A dense model that computes only a part of its feed-forward networks for each token.

    Attributes:
        keeps_means: whether neurons that are left out count with a representative value, or not at all.
    """

    keeps_means: ClassVar[bool]

    options_type: ClassVar[type[RunOptions]] = MoefyOptions
    method_of: ClassVar[str | None] = "moefy"
    takes_encoders: ClassVar[bool] = True
    is_parallel: ClassVar[bool] = True

    @property
    def needs_text(self) -> bool:
        return True

    @property
    def _selector(self) -> SelectorKind:
        if self.options.baseline == "snip" or self.options.selector == "random":
            return "fixed"
        if self.options.selector == "oracle":
            return "oracle"
        is_led = self.options.experts is None and not self.options.as_published
        return self.options.selector or ("projection" if is_led else "mlp")

    @property
    def _experts(self) -> int:
        """Experts per layer: with a projection, its neurons."""
        given = self.options.experts
        return self.dense.intermediate if self._selector == "projection" else _EXPERTS if given is None else given

    @property
    def preserves(self) -> bool:
        return True  # with all experts, which is what is proved

    @property
    def measures(self) -> bool:
        return True

    @cached_property
    def _layers(self) -> tuple[int, ...]:
        return parse_layers(self.options.layers, self.dense.layers, self.dense.ffn_layers)

    def planned(self) -> Moefied:
        return self._moefied(lambda layer: _NOTHING)

    def converted(self, job: Job[DenseSource]) -> MeasuredModel:
        settling = Settling(self.options, self._selector, self.keeps_means, self._experts)
        facts = NeuronMeasuring(job, settling).run(self._layers)
        files = {layer: LayerFiles(job.work, layer) for layer in self._layers}
        found = {layer: files[layer].activations() for layer in self._layers}
        return MeasuredModel(self._moefied(lambda layer: files[layer].plan()), facts, found)

    def _moefied(self, layer_plan: Callable[[int], LayerPlan]) -> Moefied:
        options = self.options
        if options.baseline == "snip" and options.selector is not None:
            raise UsageError("--baseline snip keeps the same neurons for every token: it takes no --selector.")
        if options.selector == "projection" and (options.experts is not None or options.as_published):
            raise UsageError(
                "--selector projection chooses every neuron by itself: it takes no --experts and no --as-published."
            )
        check_experts(self._experts, self.dense.intermediate)
        chosen_experts(options.keep, self._experts, "neurons" if self._selector == "projection" else "experts")
        self._check_text()
        is_led = self._selector == "projection"
        spec = MoefiedSpec(
            experts=self._experts,
            keep=options.keep,
            selector=self._selector,
            layers=self._layers,
            leads=tuple(layer_plan(layer).lead for layer in self._layers) if is_led else (),
        )
        return Moefied(dense=self.dense, dtype=self.new_dtype, seed=options.seed, spec=spec, layer_plan=layer_plan)

    def _check_text(self) -> None:
        options = self.options
        tokens, needed = options.samples * options.sequence_length, needed_tokens(self._experts)
        if self._selector == "mlp" and min(tokens, options.selector_tokens) < needed:
            raise UsageError(
                f"{min(tokens, options.selector_tokens):,} tokens are too few to train the selectors of "
                f"{self._experts} experts: {needed:,} are needed (--samples, --sequence-length, --selector-tokens)."
            )

    def details(self) -> dict[str, Json]:
        options, dense, spec = self.options, self.dense, self.planned().spec
        means = dense.intermediate + dense.hidden if self.keeps_means else 0  # and the constant that follows from them
        added = len(self._layers) * (spec.selector_size(dense.hidden, dense.intermediate) + means)
        share = flops(dense, len(self._layers), options.keep, spec.experts, COUNTED_LENGTH, self._selector)
        return {
            "experts": spec.experts,
            "experts_per_token": spec.at_work,
            "moe_layers": len(self._layers),
            "flops": f"{share:.1%} of dense, reading {COUNTED_LENGTH} tokens",
            "added_as_published": f"{added / dense.parameters:.4f} of dense",
        }

    def measuring(self) -> Phases:
        options, dense = self.options, self.dense
        cost = CalibrationCost(options.samples, options.sequence_length, 4)
        tokens, epochs = self._sampled_tokens, options.epochs if self._selector == "mlp" else 0
        if self._selector == "projection":
            return led_phases(cost, dense, self._layers, tokens)
        return neuron_phases(
            cost, dense, self._layers, tokens, self._experts, epochs, self._clustered_width, self._clustered_tokens
        )

    @property
    def _clustered_width(self) -> int:
        """Length of the vector that k-means has of each neuron; 0 where there are no clusters."""
        if self.options.baseline == "snip" or self._selector == "projection":
            return 0
        return self.dense.hidden * (len(self.dense.architecture.roles) - 1) if self.options.as_published else DIRECTIONS

    @property
    def _clustered_tokens(self) -> int:
        """Number of tokens on which activations are measured to cluster neurons; 0 where weights are clustered."""
        return 0 if self.options.as_published else min(CLUSTERED_TOKENS, self._sampled_tokens)

    @property
    def _sampled_tokens(self) -> int:
        return min(self.options.selector_tokens, self.options.samples * self.options.sequence_length)

    def _scratch_bytes(self) -> int:
        """Boundaries, and the samples of layers that wait to be settled: one for every process."""
        dense, boundaries, waiting = self.dense, super()._scratch_bytes(), processes()
        if self.options.baseline == "snip":
            cost = text_cost(self.options, torch.float32, dense.dtype)
            boundaries, waiting = cost.gradient_bytes(dense.hidden, dense.layers), 1
        return boundaries + 4 * waiting * self._sampled_tokens * dense.hidden

    def _memory_bytes(self) -> int:
        dense, tokens = self.dense, self._sampled_tokens
        is_led = self._selector == "projection"
        scores, copies = (0, _COPIES_TO_JUDGE) if is_led else (2 * self._experts, _COPIES)
        sampled = 4 * tokens * (3 * dense.hidden + scores) + copies * 4 * CHUNK * dense.intermediate
        clustering = 3 * 4 * dense.intermediate * self._clustered_width
        return super()._memory_bytes() + sampled + clustering

    def provenance(self) -> Provenance:
        dtype = str(self.dense.dtype).removeprefix("torch.")
        return Provenance(moefied=DenseOrigin(source_config=self.dense.checkpoint.config, dtype=dtype))

    def notes(self, config: dict[str, object]) -> list[str]:
        return ["only transformers runs a moefied model, after `import moetool`"]

    # Evidence.

    def _proved(self, job: Job[DenseSource], made: Checkpoint, tokens: Tensor) -> Proof:
        """Check that all experts compute what the dense model does, and measure what those asked for lose."""
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


def _keeping_all(made: Checkpoint) -> Checkpoint:
    """A view of the moefied checkpoint that computes all experts."""
    spec = custom_module(made.config)
    assert isinstance(spec, MoefiedSpec)
    return replace(made, config={**made.config, "quantization_config": custom_entry(spec.keeping(1.0))})


def neuron_phases(
    cost: CalibrationCost,
    dense: DenseModel,
    layers: Collection[int],
    tokens: int,
    experts: int,
    epochs: int,
    clustered: int,
    by_tokens: int,
) -> Phases:
    """A text through a dense model, to put neurons into experts and to train what chooses them.

    Args:
        cost: of the text.
        dense: the model.
        layers: that are split.
        tokens: that selectors are trained on.
        experts: per layer.
        epochs: of a selector's training; 0 where there is none.
        clustered: length of the vector that k-means has of each neuron; 0 where gradients rank neurons instead.
        by_tokens: number of tokens on which activations are measured for these vectors; 0 where they are weights.
    """
    size = dense_size(dense)
    width = dense.hidden * (len(dense.architecture.roles) - 1)
    sampled = Work(read=4 * tokens * dense.hidden, written=4 * tokens * dense.hidden)
    learnt = (_selector_work(tokens, dense.hidden, width, dense.intermediate, experts, epochs) + sampled) * len(layers)
    if clustered:
        clustering = _clustering_work(dense.intermediate, clustered, experts)
        if by_tokens:
            clustering += _seen_work(by_tokens, width, dense.intermediate, clustered)
        run = calibration_forward(cost, size) * ((max(layers) + 1) / size.layers)
        return (Phase(FORWARD, run + loading(size) + clustering * len(layers) + learnt),)
    forward = calibration_forward(cost, size, size.layers)
    return Phase(FORWARD, forward), Phase(BACKWARD, calibration_backward(cost, size) + learnt)


def led_phases(cost: CalibrationCost, dense: DenseModel, layers: Collection[int], tokens: int) -> Phases:
    """A text through a dense model, to see which of a network's projections chooses neurons best.

    Args:
        cost: of the text.
        dense: the model.
        layers: whose neurons are to be chosen.
        tokens: that choices are judged on.
    """
    size, width = dense_size(dense), dense.hidden * (len(dense.architecture.roles) - 1)
    sampled = Work(read=4 * tokens * dense.hidden, written=4 * tokens * dense.hidden)
    seen = _seen_work(_SEEN * tokens, width, dense.intermediate) + sampled
    run = calibration_forward(cost, size) * ((max(layers) + 1) / size.layers)
    return (Phase(FORWARD, run + loading(size) + seen * len(layers)),)


def _clustering_work(neurons: int, width: int, clusters: int) -> Work:
    """Balanced k-means of the neurons of one network by so many numbers of each, `[neurons, width]`."""
    steps = COEFFICIENTS.kmeans_steps
    return Work(
        products={"float32": steps * neurons * width * clusters},
        moved=steps * 24 * neurons * width,
    )


def _seen_work(tokens: int, width: int, neurons: int, directions: int = 0) -> Work:
    """What the neurons `[neurons, width]` of one network do with tokens, projected to so many numbers."""
    return Work(products={"float32": tokens * neurons * (width + directions)}, moved=60 * tokens * neurons)


def _selector_work(tokens: int, hidden: int, width: int, neurons: int, experts: int, epochs: int) -> Work:
    """What every expert contributes to the tokens, and where there are epochs a network that predicts it, and then what
    the neurons `[neurons, width]` do that it leaves out."""
    passes = 2 if epochs else 1
    batches = epochs * -(-tokens // 512)
    network = 3 * epochs * tokens * experts * (hidden + experts)
    return Work(
        products={"float32": network},
        moved=epochs * tokens * (100 * hidden + 1000 * experts) + batches * 48 * experts * hidden,
        calls=COEFFICIENTS.judged_calls * (batches + epochs),
    ) + _seen_work(passes * tokens, width, neurons)
