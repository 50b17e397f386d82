"""A quantized matrix: packed codes and one scale per group of inputs (DeRS compression, arXiv:2503.01359, Eq. 5)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.numerics.coded_product import can_multiply, coded_product
from moetool.numerics.error_feedback import Coded
from moetool.numerics.level_codes import LevelCodes
from moetool.numerics.output_codes import Coder, coded_for_outputs, coded_in_turn
from moetool.numerics.packing import pack, packed_size, rows_served, unpack, unpack_rows
from moetool.numerics.quantization import BITS, dequantize, is_whole, largest, levels_size, quantize
from moetool.numerics.row_feedback import RowFeedback
from moetool.numerics.work import Work
from moetool.representations.base import Representation, RowPart, Stored, Weight, empty_parameter
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.operand import Operand, Products
from moetool.representations.trainable import Trainable, TrainableCodes
from moetool.representations.work import coding_in_turn, feeding_back, fitting_scales, nearest_codes, widening_scales

WHOLE = 8  # bits of a code that is a byte
ROW_BITS = tuple(bits for bits in BITS if is_whole(bits))  # of codes of which single rows can be decoded
ROW = "row"  # how a spec says that a whole row shares one scale


@dataclass(frozen=True)
class Quantized(Representation):
    """A delta to the shared base in `bits` (8, 6, 5, 4, 3, 2 or 1) per element and a scale per `group` inputs.

    `codes` are packed without gaps in [out * in * bits / 8] bytes; `scales` [out, in / group] are in the model's own
    dtype: its range is what the weights needed, and its rounding is of second order (see `numerics.quantization`).
    A group of 0 is the whole row.
    """

    bits: int
    group: int
    kind: ClassVar[str] = "quantised"
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = False
    is_alone: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("quantised:4:8", "quantised:3:row", "quantised:1:32", "quantised:6:16")

    def __post_init__(self) -> None:
        check_quantization(self.bits, self.group)

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.bits}:{self.group or ROW}"

    @classmethod
    def describe(cls, forms: Sequence[Self]) -> list[str]:
        codes = Counter(form.bits for form in forms)
        return [f"{count} × {bits} bits" for bits, count in sorted(codes.items(), reverse=True)]

    @property
    def doubtful_error(self) -> float:
        return min(8 * 0.5**self.bits, super().doubtful_error)

    def fitted(self, shape: tuple[int, int]) -> Self:
        return replace(self, group=fitting_group(self.group, shape[1]))

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) != 2:
            raise ValueError(f"'{cls.kind}' takes two arguments, bits and group size (or '{ROW}')")
        return cls(*parse_quantization(*arguments))

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        rows, columns = shape
        groups = columns // group_size(self.group, columns)
        return {
            "codes": Stored((packed_size(rows * columns, self.bits),), torch.uint8),
            "scales": Stored((rows, groups)),
        }

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        return shape[0] * shape[1] * self.bits / 16

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        """`matrix` is floating and finite, scales are in `dtype`. With a Gram matrix errors are chosen to cancel in the
        output, see `numerics.error_feedback`; with a metric of outputs, those of several rows, too
        (`numerics.row_feedback`)."""
        if measured.outputs is not None:
            [found] = encode_by_rows(matrix, [(len(matrix), self)], torch.arange(len(matrix)), dtype, measured)
            return found
        return self.encode_alike(matrix, dtype, measured)

    def encode_alike(self, matrix: Tensor, dtype: torch.dtype, measured: Measured) -> dict[str, Tensor]:
        """Encode a matrix whose rows do not make good for each other's errors."""
        return _coded([(matrix, self)], dtype, measured)[0]

    def scaled(self, matrix: Tensor, dtype: torch.dtype, importance: Tensor | None) -> Coded:
        """Find scales that suit the nearest codes of a matrix `[out, in]`, whose inputs `[in]` count so much."""
        group = group_size(self.group, matrix.shape[1])
        codes, scales = quantize(matrix, self.bits, group, dtype, importance=importance)
        return Coded(matrix, scales, self.bits, codes)

    @property
    def coder(self) -> Coder:
        """The `Coder` that chooses the codes of this form."""
        return LevelCodes()

    @property
    def is_coarse(self) -> bool:
        """Whether its codes are so few that scales are fitted to outputs and widened with error feedback."""
        return self.bits in LevelCodes.noise

    def row_parts(self, shape: tuple[int, int]) -> Sequence[RowPart]:
        return (RowPart(self, 0, shape[0]),)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return self.coding_work(matrix, fed_back=fed_back) + nearest_codes(matrix[0] * matrix[1], self.bits)

    def coding_work(self, matrix: tuple[int, int], *, fed_back: bool) -> Work:
        """The work of encoding a `matrix`, without that of finding the codes nearest to it."""
        found = super().work(matrix)
        if fed_back:
            found += feeding_back(matrix)
        if fed_back and self.is_coarse:
            groups = matrix[1] // group_size(self.group, matrix[1])
            found += widening_scales(matrix[1]) + fitting_scales(matrix, groups)
        return found

    def in_turn_work(self, matrix: tuple[int, int]) -> Work:
        return coding_in_turn(matrix)

    def trial_work(self, columns: int) -> Work:
        widening = widening_scales(columns).moved if self.is_coarse else 0.0  # called once for all forms
        return super().trial_work(columns) + Work(moved=widening)

    def trainable(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], matrix: Tensor | None = None
    ) -> Trainable:
        return TrainableCodes(tensors["codes"], tensors["scales"], self.bits, shape, matrix)

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> "QuantizedWeight":
        return QuantizedWeight(self, shape, dtype, device)


def encode_together(
    parts: Sequence[tuple[Tensor, Representation]], dtype: torch.dtype, measured: Measured
) -> list[dict[str, Tensor]]:
    """Encode several matrices with the same measured inputs, each in its form, which is faster than one by one for few
    rows."""
    together = iter(_coded([own for own in parts if not own[1].is_alone], dtype, measured))
    return [form.encode(matrix, dtype, measured) if form.is_alone else next(together) for matrix, form in parts]


def encode_by_rows(
    matrix: Tensor,
    parts: Sequence[tuple[int, Quantized | None]],
    order: Tensor,
    dtype: torch.dtype,
    measured: Measured,
) -> list[dict[str, Tensor]]:
    """Encode so many rows of a matrix in each form, where errors of all rows count together.

    Args:
        matrix: [out, in], floating and finite.
        parts: numbers of rows, and the form that they are stored in, if they are stored.
        order: [out] int64, the rows of the parts, one part after the other.
        dtype: of scales.
        measured: with a metric of outputs.

    Returns:
        The tensors of each part that has a form.
    """
    measured = measured.with_feedback()
    pieces = [(form, own) for (_, form), own in zip(parts, order.split([count for count, _ in parts]), strict=True)]
    if measured.feedback is None or measured.outputs is None:
        return [form.encode_alike(matrix[own], dtype, measured) for form, own in pieces if form is not None]
    within = [torch.arange(len(own)) if form is None else form.coder.order(len(own), form.bits) for form, own in pieces]
    coming = torch.cat([own[inner] for (_, own), inner in zip(pieces, within, strict=True)]).to(matrix.device)
    noise = torch.cat([torch.full((len(own),), _noise(form)) for form, own in pieces])
    rows, found = RowFeedback(measured.outputs, coming, matrix.detach().float(), noise), []
    for (form, own), inner in zip(pieces, within, strict=True):
        if form is None:
            rows.leave_out(len(own))
            continue
        start = partial(form.scaled, dtype=dtype, importance=measured.energy)
        codes, scales = coded_in_turn(
            len(own), start, form.coder, measured.feedback, rows, keeps_size=measured.keeps_size
        )
        back = inner.argsort()
        found.append({"codes": pack(codes[back].reshape(-1), form.bits), "scales": scales[back]})
    return found


def _noise(form: Quantized | None) -> float:
    """Share of a number's energy that the codes of a form leave; next to none of many bits."""
    return 0.0 if form is None else form.coder.noise.get(form.bits, 0.0)


def _coded(
    forms: Sequence[tuple[Tensor, Representation]], dtype: torch.dtype, measured: Measured
) -> list[dict[str, Tensor]]:
    """The codes and scales of matrices whose codes are looked for in one go."""
    parts = [(matrix, form) for matrix, form in forms if isinstance(form, Quantized)]
    assert len(parts) == len(forms), "what is not encoded alone is quantized"
    if not parts:
        return []
    coded = [form.scaled(matrix, dtype, measured.energy) for matrix, form in parts]
    if (feedback := measured.with_feedback().feedback) is None:
        found = [(part.codes, part.scales) for part in coded if part.codes is not None]
    else:
        found = coded_for_outputs(coded, LevelCodes(), feedback, keeps_size=measured.keeps_size)
    return [
        {"codes": pack(codes.reshape(-1), form.bits), "scales": scales}
        for (_, form), (codes, scales) in zip(parts, found, strict=True)
    ]


@dataclass(frozen=True)
class QuantizedMatrix(Quantized):
    """Codes of a matrix that is not a delta: an expert's own, or a base."""

    kind: ClassVar[str] = "quantised-weight"
    uses_base: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("quantised-weight:8:16", "quantised-weight:2:row", "quantised-weight:5:8")

    @classmethod
    def describe(cls, forms: Sequence[Self]) -> list[str]:
        return super(Quantized, cls).describe(forms)


def coded_by_rows(form: Representation) -> QuantizedMatrix | None:
    """The form, if single rows of a matrix in it can be decoded."""
    return form if isinstance(form, QuantizedMatrix) and form.bits in ROW_BITS else None


def check_rows(form: Quantized, rows: int) -> None:
    """Raise `ValueError` unless bytes that rows of a matrix share have codes of whole rows alone."""
    if rows % (served := rows_served(form.bits)):
        raise ValueError(f"{served} rows share the bytes of {form.bits} bits, and {rows} is no multiple of that")


def matrix_shape(form: Quantized, packed: int, rows: int) -> tuple[int, int]:
    """Shape `[out, in]` of a matrix with so many `packed` bytes of codes and `rows`, which `check_rows` takes."""
    return rows, packed * 8 // (form.bits * max(1, rows))


class QuantizedWeight(Weight):
    """Run-time form of both: a product dequantizes the matrix, tile by tile where it can. Scales can be trained, codes
    cannot.

    Attributes:
        coded: how kernels call codes of its kind.
    """

    coded: ClassVar[str] = "codes"
    codes: Tensor

    def __init__(
        self, representation: Quantized, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape, self.bits = shape, representation.bits
        stored = representation.tensors(shape)
        self.register_buffer("codes", torch.zeros(stored["codes"].shape, dtype=torch.uint8, device=device))
        self.scales = empty_parameter(stored["scales"].shape, dtype, device)

    @property
    def scaled_size(self) -> float:
        return levels_size(self.bits)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Decode the whole matrix `[out, in]` in `dtype`."""
        codes = unpack(self.codes, self.bits, self.shape[0] * self.shape[1])
        return dequantize(codes, self.scales, self.bits, dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """The rows `[…, in]` of those numbers `[…]`, of a matrix that `check_rows` takes.

        Raises:
            IndexError: on a CPU, there is no such row; negative numbers do not count from the end.
        """
        scales = F.embedding(indices, self.scales).unsqueeze(-1)  # […, groups, 1]
        codes, end = unpack_rows(self.codes, self.bits, self.shape, indices.reshape(-1)), largest(self.bits)
        values, groups = (codes.to(scales.dtype) - end).clamp_max(end), self.scales.shape[1]
        return (values.view(*indices.shape, groups, self.shape[1] // groups) * scales).flatten(-2)

    def forward(self, inputs: Tensor, *, transposed: bool = False) -> Tensor:
        """`[tokens, in]` → `[tokens, out]`, or `transposed` `[tokens, out]` → `[tokens, in]`."""
        if not transposed and inputs.dim() == 2 and self._needs_no_matrix(inputs):
            return coded_product(self.codes, self.scales, self.bits, self.shape[1], inputs)
        matrix = self.dequantize(inputs.dtype)
        return inputs @ matrix if transposed else F.linear(inputs, matrix)

    def _needs_no_matrix(self, inputs: Tensor) -> bool:
        """Whether the product can be taken tile by tile: on a CPU, where nothing asks for gradients or traces it."""
        wants_gradients = torch.is_grad_enabled() and (inputs.requires_grad or self.scales.requires_grad)
        return (
            inputs.device.type == self.codes.device.type == "cpu"
            and can_multiply(self.bits, self.shape[0], inputs.dtype)
            and not (wants_gradients or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
        )

    def dense(self) -> Tensor:
        return self.dequantize(torch.promote_types(self.scales.dtype, torch.float32))

    def operand(self, *, transposed: bool = False) -> Operand:
        """Describe packed codes and scales to kernels as they lie in memory, or as the transposed matrix of these."""
        group = self.shape[1] // max(1, self.scales.shape[1])
        return Operand(self.coded, self.shape, self.codes, self.scales, self.bits, group, transposed)

    def products(self) -> Products:
        return ((self.operand(),),)


def parse_quantization(bits: str, group: str) -> tuple[int, int]:
    """Bits and group size from a spec. Raises `ValueError` on anything else."""
    if not bits.isdigit() or not (group == ROW or group.isdigit()):
        raise ValueError(f"bits and group size are whole numbers (or '{ROW}' for the group), not '{bits}:{group}'")
    if group != ROW and int(group) == 0:
        raise ValueError(f"a group has at least one input; '{ROW}' stands for all of a row")
    return int(bits), 0 if group == ROW else int(group)


def check_quantization(bits: int, group: int) -> None:
    """Raise `ValueError` unless there can be such codes and groups."""
    if bits not in BITS:
        raise ValueError(f"codes have {', '.join(map(str, BITS))} bits, not {bits}")
    if group < 0:
        raise ValueError(f"a group cannot have {group} inputs")


def group_size(group: int, columns: int) -> int:
    """Inputs per scale in a matrix of `columns` inputs; `group` 0 is all of them.

    Raises:
        ValueError: the group size does not divide the inputs; the message names divisors nearby.
    """
    if group == 0:
        return columns
    if columns % group == 0:
        return group
    divisors = _divisors(columns)
    below = max(size for size in divisors if size <= group)
    nearby = sorted({below, *(size for size in divisors if size > group)})[:2]
    raise ValueError(
        f"groups of {group} do not divide {columns} inputs; {' and '.join(map(str, nearby))} would, or '{ROW}'"
    )


def fitting_group(group: int, length: int) -> int:
    """A divisor of `length` that is at most `group`, and `group` itself if it is one; 0, all of a row, fits always.

    Of the divisors from half of the largest on it is the largest that 32 divides, or else 16, if there is one: products
    go through groups by vectors of so many numbers, and take up to eight times as long with others. So 2,880 inputs
    have groups of 96 rather than of 120.

    Raises:
        ValueError: that is 1 where more was asked for: a scale per number takes more than it saves.
    """
    if group == 0:
        return 0
    fitting = [size for size in _divisors(length) if size <= group]
    largest = max(fitting)
    if largest == 1 < min(group, length):
        above = min(size for size in _divisors(length) if size > group)
        raise ValueError(f"rows of {length} numbers cannot be cut into equal groups of 2 to {group}; {above} would do")
    if largest in (group, length):
        return largest
    vectors = (size for lanes in (32, 16) for size in reversed(fitting) if 2 * size >= largest and size % lanes == 0)
    return next(vectors, largest)


def _divisors(length: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(length) + 1) if length % size == 0]
    return sorted({*small, *(length // size for size in small)})
