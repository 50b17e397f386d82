"""Cost model of the parts that jobs are made of, calibration, statistics and writing, from tensor shapes alone.

Products and decompositions follow from the maths; what cannot be derived stands in `COEFFICIENTS`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from moetool.architectures import MoEShape
from moetool.architectures.base import whole_number
from moetool.calibration.boundaries import batch_size
from moetool.calibration.input_grams import keeps_each_down
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.coefficients import COEFFICIENTS
from moetool.numerics.work import Precision, Work, altogether
from moetool.representations.quantized import WHOLE, QuantizedMatrix
from moetool.runtime.dense import DenseModel


@dataclass(frozen=True)
class ModelSize:
    """Widths, weights and bytes of a model as it runs, all layers together.

    Attributes:
        layers: decoder layers, of which `moe_layers` have experts of `shape`.
        hidden, vocabulary, heads: widths.
        numbers: in the layers' weights, once they are loaded.
        active: of these, what one token is multiplied by.
        nbytes: of the weight files.
        tensors: in the weight files.
        in_sets: whether the experts of a layer are not in memory together, but one set of them after the other.
    """

    layers: int
    hidden: int
    vocabulary: int
    numbers: int
    active: int
    nbytes: int
    tensors: int
    heads: int
    moe_layers: int = 0
    shape: MoEShape | None = None
    in_sets: bool = False

    @property
    def moe(self) -> MoEShape:
        """The shape of the model's experts; only for a model that has some."""
        assert self.shape is not None, "a model with experts"
        return self.shape

    @property
    def experts(self) -> int:
        """Number of routed experts over all MoE layers; 0 for a dense model."""
        return 0 if self.shape is None else self.shape.experts * self.moe_layers

    @property
    def expert_numbers(self) -> int:
        """Number of weights in the matrices of all routed experts of all layers; 0 for a dense model."""
        return 0 if self.shape is None else self.experts * self.shape.expert_parameters

    @property
    def active_in_experts(self) -> int:
        """The number of expert weights that one token is multiplied by."""
        return 0 if self.shape is None else self.moe_layers * self.shape.top_k * self.shape.expert_parameters


def moe_size(reader: ExpertReader, at_once: int | None = None) -> ModelSize:
    """The size of an MoE model, of whose layers all experts are in memory together, or so many `at_once`."""
    checkpoint, shape, count = reader.checkpoint, reader.shape, len(reader.moe_layers)
    layers = reader.architecture.layers
    prefixes = reader.architecture.layer_prefixes
    rest = _numbers(checkpoint, prefixes) - _numbers(checkpoint, prefixes, among=reader.names)
    experts, hidden = count * shape.expert_parameters, reader.architecture.hidden
    size = _size(checkpoint, layers, hidden, rest + experts * shape.experts, rest + experts * shape.top_k)
    in_sets = at_once is not None and at_once < shape.experts
    return replace(size, moe_layers=count, shape=shape, in_sets=in_sets)


def dense_size(dense: DenseModel) -> ModelSize:
    """Count the parameters of a dense model, per layer and in all, from its headers alone."""
    numbers = _numbers(dense.checkpoint, dense.architecture.layer_prefixes)
    return _size(dense.checkpoint, dense.layers, dense.hidden, numbers, numbers)


def _size(checkpoint: Checkpoint, layers: int, hidden: int, numbers: int, active: int) -> ModelSize:
    vocabulary = whole_number(checkpoint.settings, "vocab_size") or 0
    heads = whole_number(checkpoint.settings, "num_attention_heads", "n_head") or -(-hidden // 64)
    nbytes, tensors = checkpoint.weight_bytes, len(checkpoint.tensors)
    return ModelSize(layers, hidden, vocabulary, numbers, active, nbytes, tensors, heads)


def _numbers(checkpoint: Checkpoint, prefixes: tuple[str, ...], among: Collection[str] | None = None) -> int:
    return sum(
        math.prod(info.shape)
        for name, info in checkpoint.tensors.items()
        if name.startswith(prefixes) and (among is None or name in among)
    )


# Running the model.


def _precision(cost: CalibrationCost) -> Precision:
    return "bfloat16" if cost.itemsize == 2 else "float32"


def _widened(cost: CalibrationCost) -> Precision:
    """The precision of products in fp32 of what the model computes."""
    return "widened" if cost.itemsize == 2 else "float32"


def _gram_precision(cost: CalibrationCost) -> Precision:
    """The precision in which Gram matrices of rows of this dtype are multiplied."""
    return "widened" if cost.itemsize == 2 else "float64"


def loading(size: ModelSize) -> Work:
    """The work of reading every layer's weights from the disk and putting them in place, once the model is built."""
    each, expert = COEFFICIENTS.load_calls
    calls = COEFFICIENTS.open_calls + size.layers * each + size.experts * expert
    return Work(moved=COEFFICIENTS.load_bytes * size.numbers, calls=calls, read=size.nbytes)


def _pass(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of running all windows through all layers that are there."""
    return _around(cost, size) + _inside(cost, size)


def _around(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of running all windows through all layers, experts left out."""
    tokens, made = cost.samples * cost.length, COEFFICIENTS
    products = tokens * (size.active - size.active_in_experts + size.layers * cost.length * size.hidden)
    scores = made.score_bytes * size.layers * size.heads * cost.length
    return Work(
        products={_precision(cost): made.narrow * products},
        moved=tokens * (4 * size.layers * made.passes * size.hidden + scores),
        calls=_batches(cost) * size.layers * made.layer_calls,
    )


def _inside(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of running all windows through the experts of all layers."""
    if size.shape is None:
        return Work()
    made = COEFFICIENTS
    return Work(
        products={_precision(cost): made.narrow * cost.samples * cost.length * size.active_in_experts},
        moved=4 * made.passes * _routed(cost, size) * size.shape.intermediate,
        calls=_batches(cost) * size.experts * made.expert_calls,
    )


def calibration_forward(cost: CalibrationCost, size: ModelSize, kept: int = 1, *, measures: bool = False) -> Work:
    """The work of one forward pass of the text. The hidden states at `kept` layer boundaries are written to the disk
    and read again. A pass that only `measures` does not need the outputs of its layers."""
    boundaries = kept * cost.boundary_bytes(size.hidden)
    work = loading(size) + _pass(cost, size) + Work(read=boundaries, written=boundaries)
    if not size.in_sets:
        return work
    # Layers run to note what experts are given, and once more with what these gave.
    return work + (_noted(cost, size) if measures else _around_experts(cost, size) + _noted(cost, size) * 2)


def head_gradients(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of computing the losses and their gradients at the last layer's output."""
    tokens = cost.samples * cost.length
    logits = tokens * size.vocabulary
    return Work(
        products={_precision(cost): 3 * logits * size.hidden},
        moved=12 * 4 * logits,
        calls=cost.samples * 3 * COEFFICIENTS.layer_calls,
    )


def calibration_backward(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of the backward pass from the loss to the first layer, in which every layer runs forwards again and then
    backwards."""
    both = _pass(cost, size) * (1 + COEFFICIENTS.backward)
    boundaries = size.layers * cost.boundary_bytes(size.hidden)
    work = head_gradients(cost, size) + loading(size) + both + Work(read=2 * boundaries, written=boundaries)
    if not size.in_sets:
        return work
    # Layers run to note what experts are given, and for the gradients of what these gave before they run backwards;
    # experts run for what they give, and are there again for their gradients. All four are noted.
    return work + _around_experts(cost, size) * 2 + _experts_again(cost, size) + _noted(cost, size) * 4


# Where the experts of a layer are not in memory together.


def _around_experts(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of running all windows through the layers that have experts, experts left out."""
    return _around(cost, size) * (size.moe_layers / size.layers)


def _experts_again(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of reading all experts from the disk and running them again on their inputs."""
    return _reading_experts(size) + _inside(cost, size)


def _reading_experts(size: ModelSize) -> Work:
    """The work of reading every expert from the disk."""
    calls = size.experts * COEFFICIENTS.load_calls[1]
    share = size.expert_numbers / max(1, size.numbers)
    return Work(moved=COEFFICIENTS.load_bytes * size.expert_numbers, calls=calls, read=share * size.nbytes)


def _noted(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of writing one vector as wide as a hidden state per token and MoE layer to the disk and reading it
    back."""
    nbytes = cost.samples * cost.length * size.hidden * cost.itemsize * size.moe_layers
    return Work(moved=4 * nbytes, read=nbytes, written=nbytes)


def weights_again(size: ModelSize) -> Work:
    """The work of reading every expert's matrices again after the text has passed, where they did not stay in
    memory."""
    return _reading_experts(size) if size.in_sets else Work()


# What is measured on the way.


def fisher(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of squaring the gradients of every expert's matrices window by window, and of merging all experts by
    them."""
    if size.shape is None:
        return Work()
    shape = size.shape
    tokens = cost.samples * cost.length * shape.top_k * size.moe_layers
    reached = min(shape.experts, cost.length * shape.top_k) * cost.samples * size.moe_layers
    return merging(size) + Work(
        products={_widened(cost): COEFFICIENTS.narrow * tokens * shape.expert_parameters},
        moved=COEFFICIENTS.fisher_bytes * reached * shape.expert_parameters,
        calls=reached * len(shape.roles) * 6,
    )


def output_moments(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of summing the second moments of the gradients at the output of every layer's experts, in fp64."""
    tokens = cost.samples * cost.length * size.moe_layers
    return Work(products={"float64": COEFFICIENTS.narrow * tokens * size.hidden**2 / 2})


def codes_beside(cost: CalibrationCost, layers: Sequence[Sequence[tuple[int, int]]]) -> Work:
    """The work of summing the second moments of the inputs of matrices `[out, in]` beside the experts, those of a layer
    with inputs of one width together, and of choosing their codes by these."""
    inputs = sum(width**2 for matrices in layers for width in {columns for _, columns in matrices})
    given = Work(products={_widened(cost): COEFFICIENTS.narrow * cost.samples * cost.length * inputs / 2})
    form = QuantizedMatrix(WHOLE, 0)
    return given + altogether(form.work(matrix, fed_back=True) for matrices in layers for matrix in matrices)


def merging(size: ModelSize) -> Work:
    """Work of merging the experts of every layer into one base, their weights being read once more."""
    return Work(moved=COEFFICIENTS.merge_bytes * size.expert_numbers) + weights_again(size)


def factor_grams(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of summing the second moments of every expert's inputs, and of the outputs of its down delta where these
    are narrower."""
    shape, routed = size.moe, _routed(cost, size)
    narrow = min(shape.hidden, shape.intermediate)
    lost = shape.hidden * shape.intermediate if shape.intermediate > shape.hidden else 0
    symmetric = (shape.hidden**2 + narrow**2) / 2
    work = Work(products={"float32": COEFFICIENTS.narrow * routed * lost}) + Work(
        products={_gram_precision(cost): COEFFICIENTS.narrow * routed * symmetric},
        moved=COEFFICIENTS.gram_bytes * routed * (shape.hidden + shape.intermediate),
        calls=_batches(cost) * size.experts * 60,
    )
    return work + _grams_in_sets(cost, size, _gram_precision(cost), down=not lost)


def decoding(size: ModelSize) -> Work:
    """Work of decoding the matrices of every expert to dense ones."""
    return Work(moved=COEFFICIENTS.load_bytes * size.experts * size.moe.expert_parameters)


def input_grams(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of summing the second moments of the inputs of every matrix of every expert."""
    shape, routed = size.moe, _routed(cost, size)
    work = Work(
        products={_widened(cost): COEFFICIENTS.narrow * routed * (shape.hidden**2 + shape.intermediate**2) / 2},
        moved=COEFFICIENTS.gram_bytes * routed * (shape.hidden + shape.intermediate),
        calls=_batches(cost) * size.experts * 30,
    )
    return work + _grams_in_sets(cost, size, _widened(cost), down=keeps_each_down(shape))


def _grams_in_sets(cost: CalibrationCost, size: ModelSize, precision: Precision, *, down: bool) -> Work:
    """The additional work where experts are in memory set by set: they run once for the means of second moments that
    they share, `down`'s among them, and once more for their own."""
    if not size.in_sets:
        return Work()
    shape, tokens = size.moe, cost.samples * cost.length * size.moe_layers
    means = (tokens * shape.hidden**2 + down * _routed(cost, size) * shape.intermediate**2) / 2
    common = Work(products={precision: COEFFICIENTS.narrow * means})
    return _experts_again(cost, size) + common


def router_moments(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of the second moments of the input of every layer's feed-forward network."""
    tokens = cost.samples * cost.length * size.layers
    return Work(products={_gram_precision(cost): tokens * size.hidden**2 / 2}, eigen={size.hidden: size.layers})


def usage(cost: CalibrationCost, size: ModelSize) -> Work:
    """The work of summing the energy of every intermediate channel."""
    return Work(moved=_routed(cost, size) * 24 * size.moe.intermediate)


def _routed(cost: CalibrationCost, size: ModelSize) -> int:
    """The number of tokens that experts are given, summed over all layers."""
    return cost.samples * cost.length * size.moe.top_k * size.moe_layers


def _batches(cost: CalibrationCost) -> int:
    return -(-cost.samples // batch_size(max(1, cost.samples), cost.length))


# Experts of a layer together.


def refine_together(size: ModelSize, steps: int, tokens: int, share: float) -> Work:
    """The work of moving bases and deltas, which have a `share` of the experts' numbers, in so many steps of so many
    tokens: outputs and gradients of the experts, and a dozen numbers read and written for each that is moved."""
    shape = size.moe
    numbers = share * shape.experts * shape.expert_parameters
    products = 3.0 * tokens * (shape.top_k * shape.expert_parameters + shape.hidden**2)
    products += 3 * numbers * min(shape.hidden, shape.intermediate) / 2  # factors with each other
    moved = 48 * numbers + 24 * shape.experts * shape.expert_parameters
    each = Work({"coarse": products}, moved=moved, calls=60 * shape.experts)
    return each * (steps * size.moe_layers)


# Results.


def writing(read: int, written: int, tensors: int) -> Work:
    """The work of writing weight files: bytes that are `read` for them and `written`, hashed as they are written and
    once more for the manifest."""
    return Work(
        moved=COEFFICIENTS.write_bytes * written,
        calls=COEFFICIENTS.write_calls * tensors,
        hashed=written,
        read=read,
        written=written,
    )
