"""Work of factorizing, trying and refining matrices, from their shapes. A form says itself what encoding takes."""

from collections.abc import Collection

from moetool.architectures import MoEShape
from moetool.calibration.slopes import MOST_SLOPES
from moetool.costs.coefficients import COEFFICIENTS
from moetool.numerics.row_feedback import LINKED_ROWS
from moetool.numerics.work import Precision, Work, altogether
from moetool.representations import Representation
from moetool.representations.work import DECOMPOSITION_CALLS, handling

EIGENVALUES = 4 / 27  # of a decomposition into eigenpairs: 4/3 n³ of 9 n³ operations


def _image(matrix: tuple[int, int], precision: Precision, *, on_outputs: bool, whitened: bool) -> Work:
    """The work of multiplying a delta `[out, in]` by the inputs behind its Gram matrix, and the products with each
    other."""
    rows, columns = matrix
    numbers = rows * columns
    given = handling(matrix) + Work(calls=DECOMPOSITION_CALLS)
    if on_outputs:  # what the layer's mean input makes of it, from a sample of twice as many tokens as outputs
        return given + Work(products={precision: 2 * rows * numbers})
    squared = Work(products={precision: numbers * min(matrix) / 2})
    if not whitened:
        return given + squared
    return given + squared + Work(products={precision: numbers * columns / 2}, cholesky={columns: 1.0})


def spectrum(matrix: tuple[int, int], *, on_outputs: bool = False, whitened: bool = True) -> Work:
    """The work of computing the loss of each rank of one delta `[out, in]`, in the norm of its inputs, of its outputs,
    or in none."""
    image = _image(matrix, "float32", on_outputs=on_outputs, whitened=whitened)
    return image + Work(eigen={min(matrix): EIGENVALUES})


def factorize(matrix: tuple[int, int], rank: float, *, on_outputs: bool = False, whitened: bool = True) -> Work:
    """The work of computing the leading `rank` directions of one delta `[out, in]`, in the norm that `spectrum`
    takes."""
    image = _image(matrix, "widened", on_outputs=on_outputs, whitened=whitened)
    return image + Work(
        products={"float32": matrix[0] * min(matrix) * rank}, eigen={min(matrix): COEFFICIENTS.eigenvectors}
    )


def linked_outputs(shape: MoEShape) -> Work:
    """The work of finding how errors at the outputs of an expert's deltas count together, and of bringing the deltas
    into that norm, once for each."""
    seen, found = shape.hidden**2 * shape.intermediate, Work()
    for role in shape.roles:
        rows, columns = shape.matrix(role)
        together = min(rows, LINKED_ROWS)
        counted = 0 if role == "down" else shape.hidden + MOST_SLOPES
        products = rows * together * (counted + columns)
        found += Work(products={"float32": products}, cholesky={together: rows / together}, calls=40)
    return found + Work(products={"float32": seen})


def refine(shape: MoEShape, steps: int, tokens: int) -> Work:
    """The work of refining an expert's stored tensors in so many steps of so many `tokens`: output and gradients, the
    weighted error, and a dozen numbers read and written for each number of the matrices."""
    products = steps * tokens * (3 * shape.expert_parameters + 2 * shape.hidden**2)
    return Work(products={"coarse": products}, moved=steps * 120.0 * shape.expert_parameters, calls=steps * 220.0)


def prepared_feedback(shape: MoEShape) -> Work:
    """The work of preparing the Gram matrices of one expert's inputs for error feedback."""
    sizes = [shape.matrix(roles[0])[1] for roles in shape.groups]
    return altogether(Work(cholesky={size: 1.0}, moved=60.0 * size**2, calls=60) for size in sizes)


def tried(forms: Collection[Representation], matrix: tuple[int, int]) -> Work:
    """The work of estimating the loss of every form of a delta, on the inputs behind its Gram matrix, from some of its
    rows."""
    rank = max((form.directions for form in forms), default=0)
    found = altogether(form.trial_work(matrix[1]) for form in forms) + handling(matrix)
    return found + factorize(matrix, rank) if rank else found
