"""Costs of splitting a dense model's neurons into experts, beyond the pass over the text."""

from collections.abc import Collection

from moetool.costs.building_blocks import calibration_backward, calibration_forward, dense_size, loading
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.coefficients import COEFFICIENTS
from moetool.costs.phases import BACKWARD, FORWARD, Phase, Phases
from moetool.numerics.work import Work
from moetool.runtime.dense import DenseModel


def neuron_phases(
    cost: CalibrationCost,
    dense: DenseModel,
    layers: Collection[int],
    tokens: int,
    experts: int,
    epochs: int,
    *,
    gradients: bool,
) -> Phases:
    """A text through a dense model, to put neurons into experts and to train what chooses them.

    Args:
        cost: of the text.
        dense: the model.
        layers: that are split.
        tokens: that selectors are trained on.
        experts: per layer.
        epochs: of a selector's training; 0 where there is none.
        gradients: whether neurons are ranked by these, and put in no clusters.
    """
    size = dense_size(dense)
    width = dense.hidden * (len(dense.architecture.roles) - 1)
    sampled = Work(read=4 * tokens * dense.hidden, written=4 * tokens * dense.hidden)
    learnt = (_selector_work(tokens, dense.hidden, width, dense.intermediate, experts, epochs) + sampled) * len(layers)
    if not gradients:
        clustered = _clustering_work(dense.intermediate, width, experts) * len(layers)
        run = calibration_forward(cost, size) * ((max(layers) + 1) / size.layers)
        return (Phase(FORWARD, run + loading(size) + clustered + learnt),)
    forward = calibration_forward(cost, size, size.layers)
    return Phase(FORWARD, forward), Phase(BACKWARD, calibration_backward(cost, size) + learnt)


def _clustering_work(neurons: int, width: int, clusters: int) -> Work:
    """Balanced k-means of the neurons of one network by their weights `[neurons, width]`."""
    steps = COEFFICIENTS.kmeans_steps
    return Work(
        products={"float32": steps * neurons * width * clusters},
        moved=steps * 24 * neurons * width,
    )


def _selector_work(tokens: int, hidden: int, width: int, neurons: int, experts: int, epochs: int) -> Work:
    """What every expert contributes to the tokens, and where there are epochs a network that predicts it, and then what
    the neurons `[neurons, width]` do that it leaves out."""
    passes = 2 if epochs else 1
    batches = epochs * -(-tokens // 512)
    network = 3 * epochs * tokens * experts * (hidden + experts)
    return Work(
        products={"float32": network + passes * tokens * width * neurons},
        moved=passes * 60 * tokens * neurons
        + epochs * tokens * (100 * hidden + 1000 * experts)
        + batches * 48 * experts * hidden,
        calls=COEFFICIENTS.judged_calls * (batches + epochs),
    )
