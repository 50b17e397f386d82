"""Coefficients of the cost model that shapes do not give: bytes moved per number and operations called per layer,
fitted to measured runs.

To fit them again: `scripts/benchmarks/estimates.py` on a quiet machine shows by phase how far off the estimate is, and
which kind of work it thinks takes the time. Those of encoding stand in `representations.work`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coefficients:
    """Bytes that are moved, operations that are called, and shares of decompositions, as fitted to measured runs."""

    open_calls: float = 60_000  # to build a model without its weights
    load_calls: tuple[float, float] = (5000, 60)  # to put a layer's weights in place, and one expert's
    layer_calls: float = 150  # of one batch's forward through a layer
    expert_calls: float = 40  # the same through an expert of it
    backward: float = 1.5  # a backward pass to the inputs in forwards, the one that is done again not counted
    narrow: float = 1.35  # how much longer products take than those of large square matrices
    score_bytes: float = 160  # per token, head, and token that it attends to
    gram_bytes: float = 350  # per number that an expert is given or has inside, for Gram matrices
    eigenvectors: float = 0.45  # of a delta, in eigen-decompositions in fp64
    passes: float = 60  # how often a token's hidden state, or its activations in an expert, are read or written
    load_bytes: float = 190  # per number of a layer that is loaded, widened and checked
    fisher_bytes: float = 220  # per number of an expert that gradients of one window reach
    merge_bytes: float = 500  # per number of all experts that are merged
    write_bytes: float = 100  # per byte of the result
    write_calls: float = 60  # per tensor of the result
    kmeans_steps: float = 12  # assignments of balanced k-means
    judged_calls: float = 1000  # per batch of a selector's training


COEFFICIENTS = Coefficients()
