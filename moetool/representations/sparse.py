"""A delta to the shared base of which few elements are stored (DeRS compression, arXiv:2503.01359, Eq. 4)."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Self

import torch
from torch import Tensor

from moetool.errors import InvalidInputError
from moetool.numerics.counter import key
from moetool.numerics.index_sets import decode_indices, encode_indices, index_sizes
from moetool.numerics.sampling import sample, scatter
from moetool.numerics.sparse_product import sparse_linear
from moetool.numerics.work import Work
from moetool.representations.base import Representation, Stored, Weight, empty_parameter
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.operand import Operand, Products, marked
from moetool.representations.work import sampling, sorting

_SEEDS = 1 << 64


@dataclass(frozen=True)
class Sparse(Representation):
    """Randomly chosen elements, scaled up so that the rest is made good for on average.

    Exactly k = round(n (1 - drop)) of n elements are stored, times n / k; which ones follows from the seed, so not a
    byte is spent on indices. Unbiased, with variance v^2 (n - k) / k per element v: see `numerics.sampling`. Matrices
    of different experts and roles need different seeds, or their errors add up instead of averaging out.
    """

    drop: float
    seed: int
    kind: ClassVar[str] = "sparse"
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("sparse:0.7:1", "sparse:0.0:0")

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ValueError(f"a drop rate lies between 0 and 1 (1 excluded), not at {self.drop}")
        if not 0 <= self.seed < _SEEDS:
            raise ValueError(f"a seed is a whole number below 2^64, not {self.seed}")

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.drop!r}:{self.seed}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) != 2 or not arguments[1].isdigit():
            raise ValueError(f"'{cls.kind}' takes two arguments, its drop rate and its seed")
        return cls(drop=_share(arguments[0], "a drop rate"), seed=int(arguments[1]))

    @property
    def label(self) -> str:
        """The spec without its seed, which differs from matrix to matrix."""
        return f"{self.kind}:{self.drop!r}"

    @classmethod
    def derived(cls, drop: float, seed: int, *path: int | str) -> Self:
        """The form of one matrix, with a 32-bit seed made from a model's seed and e.g. layer, expert and role."""
        return cls(drop, key(seed, *path) >> 32)

    def count(self, shape: tuple[int, int]) -> int:
        """Number k of elements that are stored of a matrix of this shape: round(elements · (1 − drop)), at least 1."""
        elements = shape[0] * shape[1]
        return max(1, round(elements * (1 - Fraction(repr(float(self.drop))))))

    def indices(self, shape: tuple[int, int]) -> Tensor:
        """Positions of the stored elements in the flattened matrix: [k] int32, ascending, on the CPU, determined by the
        seed."""
        return torch.from_numpy(sample(shape[0] * shape[1], self.count(shape), key(self.seed, "sparse")))

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {"values": Stored((self.count(shape),))}

    def multiplications(self, shape: tuple[int, int]) -> int:
        return self.count(shape)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return super().work(matrix) + sampling(matrix[0] * matrix[1], self.count(matrix))

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        rows, columns = matrix.shape
        chosen = matrix.detach().reshape(-1)[self.indices((rows, columns)).to(matrix.device).long()]
        return {"values": (chosen.double() * (matrix.numel() / len(chosen))).to(dtype)}

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return SparseWeight(self, shape, dtype, device)


@dataclass(frozen=True)
class MagnitudeSparse(Representation):
    """Stores the k = round(n · kept) largest elements of a delta unchanged, with their packed positions."""

    kept: float
    kind: ClassVar[str] = "sparse-magnitude"
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("sparse-magnitude:0.2", "sparse-magnitude:1.0")

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise ValueError(f"the kept share lies between 0 (excluded) and 1, not at {self.kept}")

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.kept!r}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) != 1:
            raise ValueError(f"'{cls.kind}' takes one argument, the kept share")
        return cls(kept=_share(arguments[0], "a kept share"))

    def count(self, shape: tuple[int, int]) -> int:
        """Number k of elements that are stored of a matrix of this shape: round(elements · kept), at least 1."""
        return max(1, round(shape[0] * shape[1] * Fraction(repr(float(self.kept)))))

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        k = self.count(shape)
        packed = index_sizes(shape[0] * shape[1], k)
        return {"values": Stored((k,))} | {name: Stored((size,), torch.uint8) for name, size in packed.items()}

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        return float(self.count(shape))

    def multiplications(self, shape: tuple[int, int]) -> int:
        return self.count(shape)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return super().work(matrix) + sorting(matrix[0] * matrix[1])

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        """Where the importance of inputs was measured, the largest elements are those with most matrix^2 * importance.
        Of equals the first are kept."""
        rows, columns = matrix.shape
        score = matrix.detach().float().abs()
        if (importance := measured.energy) is not None:
            if importance.shape != (columns,):
                raise ValueError(f"importance must be [{columns}], got {list(importance.shape)}")
            score = score * importance.to(score).clamp_min(0).sqrt()
        order = score.reshape(-1).argsort(descending=True, stable=True)
        indices = order[: self.count((rows, columns))].sort().values
        return {"values": matrix.detach().reshape(-1)[indices].to(dtype)} | encode_indices(indices, matrix.numel())

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return MagnitudeSparseWeight(self, shape, dtype, device)

    def damage(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str | None:
        n, k = shape[0] * shape[1], self.count(shape)
        try:
            decode_indices({name: tensors[name] for name in index_sizes(n, k)}, n, k)
        except ValueError as error:
            return str(error)
        return None


class ScatteredWeight(Weight):
    """Run-time form of both: values, and where they belong in a matrix of zeros.

    The positions are found when they are needed first and kept, neither a parameter nor in the state dict: as int32, or
    for kernels of a CPU as a bit per element where that is less.
    """

    def __init__(self, shape: tuple[int, int], count: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.values = empty_parameter((count,), dtype, device)
        self._indices: Tensor | None = None
        self._marked: Operand | None = None

    @abstractmethod
    def locate(self) -> Tensor:
        """Positions [k] int32 of the values in the flattened matrix, ascending."""

    def indices(self) -> Tensor:
        """The positions of stored elements, on the device of the values, computed once."""
        if self._indices is None or self._indices.device != self.values.device:
            with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
                self._indices = self.locate().to(self.values.device)
        return self._indices

    def forget(self) -> None:
        self._indices = self._marked = None

    def derived(self) -> tuple[Tensor, ...]:
        kept = self._indices if self._marked is None else self._marked.scales
        return () if kept is None else (kept,)

    def scatter(self, dtype: torch.dtype) -> Tensor:
        """Build the whole matrix `[out, in]` in `dtype` from stored values and their positions, differentiable in the
        values."""
        values, elements = self.values.to(dtype), self.shape[0] * self.shape[1]
        if values.requires_grad and torch.is_grad_enabled():
            return values.new_zeros(elements).index_copy(0, self.indices().long(), values).view(self.shape)
        return scatter(values, self.indices(), values.new_empty(elements)).view(self.shape)

    def forward(self, inputs: Tensor) -> Tensor:
        return sparse_linear(inputs, self.values, self.indices(), self.shape)

    def dense(self) -> Tensor:
        return self.scatter(torch.promote_types(self.values.dtype, torch.float32))

    def products(self) -> Products:
        rare = len(self.values) * torch.int32.itemsize * 8 < self.shape[0] * self.shape[1]
        if rare or self.values.device.type != "cpu":
            self._marked = None
            return ((Operand("sparse", self.shape, self.values, self.indices()),),)
        if self._marked is None:
            with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
                self._marked = marked(self.shape, self.values, self.indices())
            self._indices = None
        return ((replace(self._marked, data=self.values),),)


class SparseWeight(ScatteredWeight):
    """A `Sparse` matrix at run time: its positions follow from the seed, and only values are stored."""

    def __init__(
        self, representation: Sparse, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shape, representation.count(shape), dtype, device)
        self.representation = representation

    def locate(self) -> Tensor:
        return self.representation.indices(self.shape)


class MagnitudeSparseWeight(ScatteredWeight):
    """A `MagnitudeSparse` matrix at run time: values, and buffers that hold their packed positions."""

    def __init__(
        self, representation: MagnitudeSparse, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shape, representation.count(shape), dtype, device)
        self.packed = tuple(name for name in representation.tensors(shape) if name != "values")
        for name in self.packed:
            size = representation.tensors(shape)[name].shape
            self.register_buffer(name, torch.zeros(size, dtype=torch.uint8, device=device))

    def locate(self) -> Tensor:
        packed = {name: self.get_buffer(name) for name in self.packed}
        try:
            return decode_indices(packed, self.shape[0] * self.shape[1], len(self.values))
        except ValueError as error:
            raise InvalidInputError(
                f"A sparse delta cannot be read: {error}. Download the checkpoint again; `moetool verify` names it."
            ) from error


def _share(argument: str, what: str) -> float:
    try:
        return float(argument)
    except ValueError:
        raise ValueError(f"{what} is a number, not '{argument}'") from None
