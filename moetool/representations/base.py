"""Base class of representations, each of which is a way to store one matrix."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from moetool.numerics.work import Work
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.operand import Products
from moetool.representations.trainable import Trainable
from moetool.representations.work import handling, trial


@dataclass(frozen=True)
class Stored:
    """A tensor on disk: its shape, and its dtype where that is not the model's own."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes that the tensor takes in a checkpoint whose model has `dtype`, which counts where the tensor has none
        of its own."""
        return torch.Size(self.shape).numel() * (self.dtype or dtype).itemsize


class KeepsWide(nn.Module):
    """A module some of whose tensors stay in 32 bits when the model is cast to 16."""

    kept_wide: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = {name: tensor for name in self.kept_wide if isinstance(tensor := getattr(self, name, None), Tensor)}
        before = {name: tensor.data for name, tensor in held.items()}
        super()._apply(fn, recurse)
        for name, data in before.items():
            tensor = getattr(self, name)
            if tensor.element_size() < data.element_size():
                tensor.data = data.to(tensor.device)
        return self


class Weight(nn.Module, ABC):
    """One stored matrix at run time: `forward` is its product with inputs, `dense` the matrix it stands for.

    Its parameters and persistent buffers are the tensors on disk, without those that all experts share.
    """

    def share(self, tensors: Mapping[str, Tensor] | nn.ParameterDict) -> None:
        """Take what all matrices of the role have in common from `tensors`, which may be filled later."""

    def forget(self) -> None:
        """Drop what was derived from the stored tensors, which must be called after these were replaced or moved."""

    def _load_from_state_dict(self, *arguments: object, **options: object) -> None:
        self.forget()
        super()._load_from_state_dict(*arguments, **options)

    @property
    def scaled_size(self) -> float:
        """About the root mean square of the numbers that the parameter `scales` multiplies, if there is one."""
        return 1.0

    def derived(self) -> tuple[Tensor, ...]:
        """Tensors that `products` keeps and uses beside parameters and buffers."""
        return ()

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply inputs `[tokens, in]` by the transposed matrix: `[tokens, out]`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Decode the whole matrix `[out, in]`, in fp32 or in a wider dtype that it is stored in."""

    def products(self) -> Products | None:
        """The stored matrices that kernels multiply inputs with; `None` if `forward` is the only way to compute."""
        return None


class RowPart(NamedTuple):
    """Rows that are stored in one form, independently of all others: from `first` to `last`, counted from those that
    count least. Without a form they are not stored."""

    form: "Representation | None"
    first: int
    last: int

    @property
    def rows(self) -> int:
        """Number of rows of the matrix from `first` up to `last`."""
        return self.last - self.first


class NestedFactors(NamedTuple):
    """Forms of the factors U and V of a low-rank form in which a smaller rank has the first directions of a larger one.

    Attributes:
        u: makes of a basis `[out, k]` the U `[out, rank]` that is stored, in a model of some dtype.
        v: the form of V `[rank, in]`, whose rows are independent of each other.
    """

    u: Callable[[Tensor, torch.dtype], Tensor]
    v: "Representation"


class Representation(ABC):
    """A way to store one matrix, as a value that fits into `config.json`.

    A representation either stands for the expert's own matrix, or for its delta to the layer's shared base
    (`uses_base`). The base itself is stored in one, too.

    Attributes:
        kind: its name in specs.
        uses_base: whether it stands for a delta.
        is_cheap: whether it runs as products of matrices in the model's dtype, nothing unpacked or scattered first.
        is_whole: whether it is the matrix itself, as its one tensor.
        is_plain: whether its numbers are the model's own, none of them packed, dropped or shared, so that they can
            still be encoded further.
        is_alone: whether several matrices are encoded one by one, and not sooner together (`encode_together`).
        examples: specs of some members for a matrix [24, 32], which tests take through this contract.
    """

    kind: ClassVar[str]
    uses_base: ClassVar[bool]
    is_cheap: ClassVar[bool]
    is_whole: ClassVar[bool] = False
    is_plain: ClassVar[bool] = False
    is_alone: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]]

    @property
    def spec(self) -> str:
        """The text that stands for the form in `config.json`: `kind`, or `kind:arguments`."""
        return self.kind

    @property
    def label(self) -> str:
        """The name by which tables call the form: its spec, without what differs between matrices, such as a seed."""
        return self.spec

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        """Make a form from the arguments of its spec, those after the kind, as the inverse of `spec`.

        Raises:
            ValueError: the kind takes no such arguments.
        """
        if arguments:
            raise ValueError(f"'{cls.kind}' takes no arguments")
        return cls()

    @classmethod
    def describe(cls, forms: Sequence[Self]) -> list[str]:
        """Parts of a one-line summary of a role's experts stored in forms of this class, e.g. `3 × nf4`."""
        return counted(form.label for form in forms)

    @property
    def doubtful_error(self) -> float:
        """The error `‖M' − M‖ / ‖M‖` of a stored matrix M beyond which something may be wrong with it: somewhat more
        than that of a matrix that is dropped, unless a form is always better than that."""
        return 1.5

    @property
    def directions(self) -> int:
        """Rank of the low-rank part of the form; 0 if it has none."""
        return 0

    @property
    def factors(self) -> tuple[str, str] | None:
        """Names of the tensors U `[out, rank]` and V `[rank, in]` whose product is all there is, if there are such."""
        return None

    @property
    def nested(self) -> NestedFactors | None:
        """Storage of U and V, if they are all there is and a smaller rank keeps the first directions; else `None`."""
        return None

    def row_parts(self, shape: tuple[int, int]) -> Sequence[RowPart]:
        """The parts of a matrix `[out, in]` whose rows are encoded independently of each other, from those that count
        least on; none where they are not."""
        return ()

    def fitted(self, shape: tuple[int, int]) -> Self:
        """This representation with the largest groups, up to its own, that a matrix `[out, in]` can be cut into.

        Raises:
            ValueError: only groups of one would fit.
        """
        return self

    def quantized(self, bits: int, group: int) -> "Representation":
        """The form that quantizing a delta stored in this one gives, with codes of `bits` and groups of `group`.

        Raises:
            ValueError: it is not plain.
        """
        raise ValueError(f"what is stored as '{self.spec}' cannot be quantized")

    @abstractmethod
    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        """Names, shapes and dtypes of the tensors that store a matrix `[out, in]` in this form."""

    def shared_tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        """Tensors on disk that all experts' matrices of one role have in common."""
        return {}

    @abstractmethod
    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        """Encode a matrix or delta `[out, in]` of a model of `dtype`: its own tensors and the shared ones, by name.

        Raises:
            ValueError: shapes do not fit, or values cannot be stored.
        """

    def encode_jointly(
        self, matrices: Sequence[Tensor], dtype: torch.dtype, measured: Measured = NOTHING
    ) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Encode all experts' matrices of one role: the tensors that they share, and the own tensors of each."""
        return {}, [self.encode(matrix, dtype, measured) for matrix in matrices]

    def damage(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str | None:
        """Describe values in finite stored tensors of the right shapes that `encode` never writes, or `None`."""
        return None

    @abstractmethod
    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        """An empty `Weight` whose parameters and buffers are exactly `tensors(shape)`."""

    def decode(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The matrix `[out, in]` that stored tensors, own and shared, stand for, in fp32 or better."""
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        weight = self.build(shape, dtype, device)
        weight.load_state_dict({name: tensors[name] for name in self.tensors(shape)}, assign=True)
        weight.share(tensors)
        with torch.no_grad():
            return weight.dense()

    def encode_factors(self, u: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The stored tensors of a product of factors U `[out, rank]` and V `[rank, in]`, each number by itself.

        Raises:
            ValueError: this form stores no factors.
        """
        raise ValueError(f"'{self.spec}' stores no factors")

    def decode_factors(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """The factors U `[out, rank]` and V `[rank, in]` that stored tensors stand for, fp32; `None` of a form that
        stores none."""
        return None

    def trainable(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], matrix: Tensor | None = None
    ) -> Trainable | None:
        """Return the stored tensors of a matrix `[out, in]` in a form that gradients can move, `matrix` being the
        original; `None` if the representation has nothing to move."""
        return None

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        """The work of encoding a `matrix` `[out, in]`; codes `fed_back` make up for each other's errors."""
        return handling(matrix)

    def in_turn_work(self, matrix: tuple[int, int]) -> Work:
        """The work of having the rows of a matrix `[out, in]` make good for each other's errors, beside `work`; none of
        forms whose rows do not."""
        return Work()

    def trial_work(self, columns: int) -> Work:
        """The work of encoding some rows of a matrix of so many `columns`, which tell what all of them would lose."""
        return trial(columns)

    def multiplications(self, shape: tuple[int, int]) -> int:
        """Multiplications in the product with one input: one per element, unless it runs as something smaller."""
        return shape[0] * shape[1]

    def parameters(self, shape: tuple[int, int]) -> int:
        """Stored numbers, packed ones counted by the element of their tensor."""
        return sum(torch.Size(stored.shape).numel() for stored in self.tensors(shape).values())

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        """Stored numbers as the papers count them: k bits are k / 16 of a number, scales and indices are none."""
        return float(self.parameters(shape))

    def nbytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes that a matrix `[out, in]` takes on disk in this form, in a model of `dtype`."""
        return sum(stored.nbytes(dtype) for stored in self.tensors(shape).values())

    def share_in_numbers(self, shape: tuple[int, int], dtype: torch.dtype) -> float:
        """The share of the bytes of a matrix `[out, in]` that are numbers of floating point, in a model of `dtype`; 0
        for a form that stores nothing."""
        stored = self.tensors(shape).values()
        numbers = sum(own.nbytes(dtype) for own in stored if (own.dtype or dtype).is_floating_point)
        return numbers / max(1, self.nbytes(shape, dtype))


def counted(labels: Iterable[str]) -> list[str]:
    """`3 × dense`, for every label in the order in which they come first."""
    return [f"{count} × {label}" for label, count in Counter(labels).items()]


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Make a parameter with uninitialized memory, which a loader is to fill."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
