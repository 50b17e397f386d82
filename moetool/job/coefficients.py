"""How often numbers are passed over and how many operations a layer is: what was fitted to measured runs.

To fit them again: `scripts/benchmarks/estimates.py` on a quiet machine shows by phase how far off the estimate is, and
which kind of work it thinks takes the time. All numbers that are not maths stand here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coefficients:
    """What was fitted to measured runs.

    Attributes:
        open_calls: operations to build a model without its weights.
        load_calls: operations to put a layer's weights in place, and one expert's.
        layer_calls, expert_calls: operations of one batch's forward through a layer, and through an expert of it.
        backward: a backward pass to the inputs in forwards, the one that is done again not counted.
        narrow: how much longer products take than those of large square matrices, in layers and of Gram matrices.
        layer_passes, expert_passes: how often a token's hidden state, and its activations in an expert, are read or
            written in a forward.
        score_bytes: bytes moved per token, head, and token that it attends to.
        factor_gram_bytes, input_gram_bytes: bytes moved per number that an expert is given or has inside, for both
            kinds of Gram matrices.
        factor_bytes: bytes moved per number of a matrix that is factorized.
        load_bytes: bytes moved per number of a layer that is loaded, widened and checked.
        fisher_bytes: bytes moved per number of an expert that gradients of one window reach.
        merge_bytes: bytes moved per number of all experts that are merged.
        root: a Cholesky factor of a Gram matrix in those of fp64.
        eigenvalues, eigenvectors: those of a delta in eigen-decompositions in fp64.
        sensitivity_calls: operations around the factorization of one matrix.
        cut_calls: the same around cutting it to a rank.
        scale_bytes: bytes moved per number and scale that is tried for it, in a cache.
        scales: how many are tried by bits; else, the last.
        nearest_bytes: bytes moved per number to find its code and to pack it.
        tried_rows, tried_calls: of a matrix whose forms are tried, and operations per column.
        path_bytes: bytes moved per number to find its code in a trellis.
        path_calls: operations around the paths of one column.
        feedback_calls: operations per column in error feedback.
        feedback_bytes: bytes moved per number in error feedback.
        scatter_bytes: bytes moved per number of a sparse matrix, stored or not.
        sample_bytes: bytes moved per number that is chosen at random.
        sort_bytes: bytes moved per number that is sorted.
        error_bytes: bytes moved per number to take a delta and to measure its error.
        write_bytes: bytes moved per byte of the result.
        write_calls: operations per tensor of the result.
        kmeans_steps: assignments of balanced k-means.
        assignment: multiply-adds in fp64 that one step's assignment is as much as, per row and cluster.
        judged_calls: operations per batch of a selector's training.
    """

    open_calls: float = 60_000
    load_calls: tuple[float, float] = (5000, 60)
    layer_calls: float = 150
    expert_calls: float = 40
    backward: float = 1.5
    narrow: float = 1.35
    score_bytes: float = 160
    factor_gram_bytes: float = 500
    input_gram_bytes: float = 300
    factor_bytes: float = 725
    root: float = 0.65
    eigenvalues: float = 0.12
    eigenvectors: float = 0.45
    layer_passes: float = 60
    expert_passes: float = 60
    load_bytes: float = 190
    fisher_bytes: float = 220
    merge_bytes: float = 500
    sensitivity_calls: float = 400
    cut_calls: float = 300
    scale_bytes: float = 400
    scales: tuple[tuple[int, float], ...] = ((1, 1), (8, 2.5), (4, 16))
    nearest_bytes: float = 1060
    path_bytes: float = 3600
    path_calls: float = 8
    feedback_calls: float = 14
    feedback_bytes: float = 2000
    tried_rows: float = 200
    tried_calls: float = 60
    scatter_bytes: float = 250
    sample_bytes: float = 600
    sort_bytes: float = 5700
    error_bytes: float = 1300
    write_bytes: float = 100
    write_calls: float = 60
    kmeans_steps: float = 12
    assignment: float = 600
    judged_calls: float = 1000


COEFFICIENTS = Coefficients()
