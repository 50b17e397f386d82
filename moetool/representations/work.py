"""Work of encoding matrices `[out, in]`, from their shapes.

Products and decompositions follow from the maths. How many bytes are moved per number and how many operations are
called was fitted to measured runs: `scripts/benchmarks/estimates.py` shows by phase how far off the estimates are.
"""

from moetool.numerics.output_codes import POWERS, TRIED_ROWS
from moetool.numerics.row_feedback import LEAST_ROWS, LINKED_ROWS, rows_together
from moetool.numerics.work import Work

TRIAL_ROWS = 192  # of a matrix that are encoded on trial: the mean of so many was right within a few percent
DECOMPOSITION_CALLS = 350  # around a decomposition of one matrix, or its cut to a rank
_ERROR_BYTES = 1300  # per number, to take a delta and to measure its error
_FEEDBACK_BYTES = 1500  # per number, in error feedback
_FEEDBACK_CALLS = 1  # per column, in error feedback
_BLOCK_CALLS = 700  # for rows that are coded together, after others
_COLUMN_CALLS = 0.4  # per column of these
_TRIAL_BYTES = 15_000  # per number that is encoded on trial, in search of its scale and in error feedback
_TRIAL_PRODUCTS = 1.75  # of rows on trial and a Gram matrix: error feedback, and what is lost with it and without
_TRIAL_CALLS = 500  # for the rows of one form on trial
_PATH_BYTES = 8000  # per number and branch of a trellis, of which there are 2^bits, to find its code
_PATH_CALLS = 1  # per column of a trellis
_LINKED_BYTES = 400_000  # per number, to find its code where errors move the numbers behind them
_SAMPLE_BYTES = 600  # per number that is chosen at random
_CODE_BYTES = 280  # per number and scale that is tried for it, in a cache
_PACKED = 2.5  # scales that finding the last code and packing it take as long as
_SCALES = {1: 1.0, 8: 2.5}  # how many scales are tried, by bits
_MOST_SCALES = 16.0  # how many are tried for codes of other bits
_SCATTER_BYTES = 250  # per number of a sparse matrix, stored or not
_SORT_BYTES = 5700  # per number that is sorted


def handling(matrix: tuple[int, int]) -> Work:
    """The work of taking a delta and measuring its error, whatever it is encoded in."""
    return Work(moved=_ERROR_BYTES * matrix[0] * matrix[1], calls=100)


def cutting(matrix: tuple[int, int], rank: float) -> Work:
    """The work of cutting a factorized delta to factors of one rank."""
    rows, columns = matrix
    products = 2 * rows * columns * rank + rank**2 * (rows + columns)
    return Work(
        products={"float32": products},
        cholesky={max(1, round(rank)): 1.0},
        moved=(_ERROR_BYTES + 24) * rows * columns,
        calls=DECOMPOSITION_CALLS,
        read=4 * min(matrix) * rows * columns / (rows + columns),
    )


def nearest_codes(numbers: int, bits: int = 0) -> Work:
    """The work of finding and packing the codes of so many numbers. With `bits`, several scales are tried for each."""
    tried = _SCALES.get(bits, _MOST_SCALES) if bits else 0.0
    return Work(moved=_CODE_BYTES * (tried + _PACKED) * numbers)


def feeding_back(matrix: tuple[int, int]) -> Work:
    """Work of choosing codes one input after the other, and of measuring the errors of these and of the nearest
    codes."""
    rows, columns = matrix
    numbers = rows * columns
    return Work(
        products={"float32": 1.5 * numbers * columns},
        cholesky={columns: 1.0},
        moved=_FEEDBACK_BYTES * numbers,
        calls=_FEEDBACK_CALLS * columns,
    )


def coding_in_turn(matrix: tuple[int, int]) -> Work:
    """The work of having each row of a matrix make good for the errors of those before it, beside that of coding all
    rows by themselves."""
    rows, columns = matrix
    blocks = -(-rows // rows_together(rows, LEAST_ROWS))
    near = min(rows, LINKED_ROWS)
    return Work(
        products={"float32": rows * near * (columns + 2 * near)},
        moved=2.0 * blocks * columns**2,
        calls=blocks * (_BLOCK_CALLS + _COLUMN_CALLS * columns),
    )


def fitting_scales(matrix: tuple[int, int], groups: int) -> Work:
    """The work of refitting the scales of so many `groups` in every row to the outputs of the matrix."""
    rows, columns = matrix
    return Work(products={"coarse": 1.5 * rows * columns**2}, moved=8.0 * groups * rows * columns + 4.0 * columns**2)


def widening_scales(columns: int) -> Work:
    """The work of encoding a few rows under several scales, to see by how much these have to grow."""
    rows = TRIED_ROWS * (1 + len(POWERS))
    return Work(moved=_FEEDBACK_BYTES * rows * columns, calls=_FEEDBACK_CALLS * columns)


def trellis_paths(matrix: tuple[int, int], bits: int) -> Work:
    """Work of finding the codes of a matrix `[out, in]` by Viterbi's search through the trellis, once."""
    rows, columns = matrix
    return Work(moved=_PATH_BYTES * 2**bits * rows * columns, calls=_PATH_CALLS * columns)


def linked_paths(matrix: tuple[int, int]) -> Work:
    """Work of finding the codes of a matrix `[out, in]` by a search in which errors move the numbers behind them."""
    return Work(moved=_LINKED_BYTES * matrix[0] * matrix[1])


def trial(columns: int) -> Work:
    """The work of encoding some rows with so many `columns` together with the rows of other forms."""
    return Work(
        products={"float32": _TRIAL_PRODUCTS * TRIAL_ROWS * columns**2},
        moved=_TRIAL_BYTES * TRIAL_ROWS * columns,
        calls=_TRIAL_CALLS,
    )


def sampling(numbers: int, chosen: int) -> Work:
    """The work of storing so many elements, chosen at random, of a matrix of so many `numbers`."""
    return Work(moved=_SAMPLE_BYTES * chosen + _SCATTER_BYTES * numbers)


def sorting(numbers: int) -> Work:
    """The work of finding the largest elements of a matrix of so many `numbers`, and of storing these."""
    return Work(moved=_SORT_BYTES * numbers)
