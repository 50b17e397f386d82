"""Statistics of a matrix that its encoding uses, and thin factors that follow from them."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from moetool.numerics.error_feedback import Feedback
from moetool.numerics.factorize import Factorization, factorize, truncate
from moetool.numerics.output_norm import OutputNorm
from moetool.numerics.rotation import Rotation
from moetool.numerics.row_feedback import RowMetric


@dataclass(frozen=True)
class Measured:
    """Statistics of a matrix `[out, in]`; every representation uses those that it can.

    Attributes:
        gram: `[in, in]`, sum of x x^T over the inputs. Codes of full matrices then make up for each other's errors, and
            factors are best on these inputs. `None`: every input counts the same.
        norm: of errors at the outputs; `None` for the plain one.
        basis: `[out, k]`, for quantized factors of a rank up to k: the first columns span what U should span.
        feedback: of `gram`, where it was made before.
        factorization: of `norm.times(matrix)`, where the leading directions were found before.
        outputs: how errors in the rows of a matrix count together, so that codes make good for those of other rows.
        keeps_size: whether codes shall have outputs of the size they had; refinement finds sizes itself.
    """

    gram: Tensor | None = None
    norm: OutputNorm | None = None
    basis: Tensor | None = None
    feedback: Feedback | None = None
    factorization: Factorization | None = None
    outputs: RowMetric | None = None
    keeps_size: bool = True

    @classmethod
    def on_inputs(cls, gram: Tensor, rotation: Rotation | None = None, *, keeps_size: bool = True) -> Self:
        """Measure inputs by their Gram matrix `[in, in]`, rotated if there is a `rotation`, with the factors of error
        feedback for several matrices that have them in common."""
        gram = gram if rotation is None else rotation.gram(gram)
        return cls(gram, feedback=Feedback.of(gram), keeps_size=keeps_size)

    @property
    def energy(self) -> Tensor | None:
        """Weight `[in]` of each input's squared error; `None` if all inputs count alike."""
        return None if self.gram is None else self.gram.diagonal()

    def with_feedback(self) -> "Measured":
        """Return the measurements with the factors of error feedback, for several matrices that have the same
        inputs."""
        if self.feedback is not None or self.gram is None:
            return self
        return replace(self, feedback=Feedback.of(self.gram))


NOTHING = Measured()


def cut(matrix: Tensor, rank: int, dtype: torch.dtype, measured: Measured = NOTHING) -> tuple[Tensor, Tensor]:
    """U `[out, rank]` and V `[rank, in]` in `dtype`, whose product is the best of this rank in the measured norm.

    Raises:
        ValueError: shapes do not fit, or the matrix has fewer directions.
    """
    found, norm = measured.factorization, measured.norm
    if found is None:
        found = factorize(matrix if norm is None else norm.times(matrix), gram=measured.gram, rank=rank)
    return truncate(matrix, found, rank, dtype, norm=norm)
