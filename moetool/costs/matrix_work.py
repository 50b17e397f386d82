"""What it takes to factorize, encode and refine matrices, from shapes alone; see `building_blocks`."""

from collections.abc import Collection

from moetool.architectures import MoEShape
from moetool.costs.coefficients import COEFFICIENTS
from moetool.costs.work import Precision, Work, altogether
from moetool.numerics.level_codes import LevelCodes
from moetool.numerics.output_codes import POWERS, TRIED_ROWS
from moetool.representations import Representation
from moetool.representations.dense import Dense
from moetool.representations.low_rank_sparse import LowRankSparse
from moetool.representations.mixed_rows import MixedRows
from moetool.representations.quantized import Quantized, group_size
from moetool.representations.quantized_low_rank import QuantizedLowRank
from moetool.representations.sparse import MagnitudeSparse, Sparse
from moetool.representations.trellis import Trellis


def _image(matrix: tuple[int, int], precision: Precision, *, on_outputs: bool, whitened: bool) -> Work:
    """What a delta `[out, in]` makes of the inputs behind its Gram matrix, and the products of that with itself."""
    rows, columns = matrix
    numbers = rows * columns
    given = Work(moved=COEFFICIENTS.factor_bytes * numbers, calls=COEFFICIENTS.sensitivity_calls)
    if on_outputs:  # what the layer's mean input makes of it, from a sample of twice as many tokens as outputs
        return given + Work(products={precision: 2 * rows * numbers})
    squared = Work(products={precision: numbers * min(matrix) / 2})
    if not whitened:
        return given + squared
    return given + squared + Work(products={precision: numbers * columns / 2}, cholesky={columns: COEFFICIENTS.root})


def spectrum(matrix: tuple[int, int], *, on_outputs: bool = False, whitened: bool = True) -> Work:
    """What each rank of one delta `[out, in]` loses, by the norm of its inputs, of its outputs, or none."""
    image = _image(matrix, "float32", on_outputs=on_outputs, whitened=whitened)
    return image + Work(eigen={min(matrix): COEFFICIENTS.eigenvalues})


def factorize(matrix: tuple[int, int], rank: float, *, on_outputs: bool = False, whitened: bool = True) -> Work:
    """The work of the leading `rank` directions of one delta `[out, in]`, by the norm that `spectrum` takes."""
    image = _image(matrix, "bfloat16", on_outputs=on_outputs, whitened=whitened)
    return image + Work(
        products={"float32": matrix[0] * min(matrix) * rank}, eigen={min(matrix): COEFFICIENTS.eigenvectors}
    )


def cut(matrix: tuple[int, int], rank: float) -> Work:
    """The work of cutting a factorized delta to factors of one rank."""
    rows, columns = matrix
    products = 2 * rows * columns * rank + rank**2 * (rows + columns)
    return Work(
        products={"float32": products},
        cholesky={max(1, round(rank)): 1.0},
        moved=(COEFFICIENTS.error_bytes + 24) * rows * columns,
        calls=COEFFICIENTS.cut_calls,
        read=4 * min(matrix) * rows * columns / (rows + columns),
    )


def encode(form: Representation, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
    """One delta `[out, in]` in some form; codes `fed_back` make good for each other's errors."""
    made, numbers = COEFFICIENTS, matrix[0] * matrix[1]
    taken = Work(moved=made.error_bytes * numbers, calls=100)
    if isinstance(form, Quantized):
        if fed_back:
            taken += feed_back(matrix)
            if form.bits in LevelCodes.noise:
                taken += _widen_scales(matrix[1], 1) + _fit_scales(form, matrix)
        if isinstance(form, Trellis):
            return taken + _paths(matrix)
        tried = dict(made.scales).get(form.bits, made.scales[-1][1])
        return taken + Work(moved=(made.scale_bytes * tried + made.nearest_bytes) * numbers)
    if isinstance(form, MixedRows):  # all rows as those of most bits
        *_, (most, _) = form.coded(matrix)
        ranked = Work(products={"float32": numbers * matrix[1]}) if fed_back else Work()
        return ranked + encode(most, matrix, fed_back=fed_back)
    if isinstance(form, QuantizedLowRank):
        rank = form.directions
        factors = [encode(part, shape) for part, shape in ((form.u, (matrix[0], rank)), (form.v, (rank, matrix[1])))]
        return taken + altogether(factors) + Work(products={"float32": 2 * numbers * rank})
    if isinstance(form, LowRankSparse):
        narrow = min(matrix)
        few = Work(products={"float32": 0.625 * numbers * narrow + numbers * form.directions}, eigen={narrow: 1.0})
        return taken + few + encode(form.residual, matrix)
    if isinstance(form, Sparse):
        return taken + Work(moved=made.sample_bytes * form.count(matrix) + made.scatter_bytes * numbers)
    if isinstance(form, MagnitudeSparse):
        return taken + Work(moved=made.sort_bytes * numbers)
    return taken + (Work() if isinstance(form, Dense) else cut(matrix, form.directions))


def refine(shape: MoEShape, steps: int, tokens: int) -> Work:
    """An expert whose stored tensors are moved in so many steps of so many `tokens`: its output forwards and backwards,
    the error as it counts, and a dozen numbers read and written for each of the matrices'."""
    products = steps * tokens * (3 * shape.expert_parameters + 2 * shape.hidden**2)
    return Work(products={"bfloat16": products}, moved=steps * 120.0 * shape.expert_parameters, calls=steps * 220.0)


def feed_back(matrix: tuple[int, int]) -> Work:
    """Codes chosen one input after the other, and what both they and the nearest ones lose."""
    rows, columns = matrix
    numbers = rows * columns
    return Work(
        products={"float32": 1.5 * numbers * columns},
        cholesky={columns: COEFFICIENTS.root},
        moved=COEFFICIENTS.feedback_bytes * numbers,
        calls=COEFFICIENTS.feedback_calls * columns,
    )


def _fit_scales(form: Quantized, matrix: tuple[int, int]) -> Work:
    """What the matrix does to the outputs, and the products of what the codes of every group do with each other."""
    rows, columns = matrix
    groups = columns // group_size(form.group, columns)
    return Work(products={"bfloat16": 1.5 * rows * columns**2}, moved=8.0 * groups * rows * columns + 4.0 * columns**2)


def _widen_scales(columns: int, forms: int) -> Work:
    """Codes of a few rows under several scales, in so many forms at once."""
    rows = TRIED_ROWS * (1 + len(POWERS)) * forms
    return Work(moved=COEFFICIENTS.feedback_bytes * rows * columns, calls=COEFFICIENTS.feedback_calls * columns)


def _paths(matrix: tuple[int, int]) -> Work:
    """Codes of a matrix in a trellis."""
    rows, columns = matrix
    return Work(moved=COEFFICIENTS.path_bytes * rows * columns, calls=COEFFICIENTS.path_calls * columns)


def tried(forms: Collection[Representation], matrix: tuple[int, int]) -> Work:
    """What every form of a delta loses on the inputs behind its Gram matrix, told from some of its rows."""
    numbers, columns = matrix[0] * matrix[1], matrix[1]
    made, forms = COEFFICIENTS, [form for form in forms if not isinstance(form, MixedRows)]  # known by their parts
    rows = round(made.tried_rows)
    paths = (_paths((rows, columns)) for form in forms if isinstance(form, Trellis))
    coarse = sum(isinstance(form, Quantized) and form.bits in LevelCodes.noise for form in forms)
    return (
        factorize(matrix, max((form.directions for form in forms), default=0))
        + altogether(paths)
        + _widen_scales(columns, coarse)
        + Work(
            products={"float32": numbers * columns},
            cholesky={columns: made.root},
            moved=made.feedback_bytes * rows * columns * len(forms) + made.error_bytes * numbers,
            calls=made.tried_calls * columns,
        )
    )
