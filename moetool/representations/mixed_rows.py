"""A matrix in codes, with more bits in the rows of the outputs that count more.

Outputs of gate and up count very differently: some neurons move the loss a hundred times as much as others. Of codes
with b bits an error of about 4^-b is left, so that the bits that lose least in all differ by half the logarithm of what
rows count (reverse water-filling), and rows that hardly count get none. How many rows have how many bits is part of the
form, from a few mixtures on offer; which rows these are is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from moetool.numerics.packing import pack, packed_size, unpack
from moetool.numerics.work import Work
from moetool.representations.base import Representation, RowPart, Stored, Weight, empty_parameter
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.operand import Products
from moetool.representations.quantized import (
    ROW,
    Quantized,
    QuantizedWeight,
    encode_by_rows,
    encode_together,
    fitting_group,
    parse_quantization,
)
from moetool.representations.trainable import Pace, Trainable
from moetool.representations.trellis import Trellis

ROW_SHARES = 16  # parts of all rows that have bits of their own
ROW_UNIT = 8  # rows: as many as share a byte of codes of 1 bit
MOST_WIDTHS = 3  # different numbers of bits, beside none: kernels have room for as many products


class CodedPart(NamedTuple):
    """Rows of a matrix with equal bits: their form, their range in the order from fewest bits on, and the range of
    their codes."""

    form: Quantized
    first: int
    last: int
    codes: slice

    @property
    def rows(self) -> int:
        """Number of rows in the part."""
        return self.last - self.first


@dataclass(frozen=True)
class MixedRows(Representation):
    """A delta to the shared base in codes, `shares[b]` sixteenths of its rows [out] in b bits, those that count most in
    most.

    `codes` [bytes] are those of the rows with fewest bits, then the next, as `quantised` has them; `scales`
    [rows with any, groups] are in this order, too. `row_bits` [bytes] says of every row which of these it is, packed.
    """

    shares: tuple[int, ...]
    group: int
    kind: ClassVar[str] = "quantised-rows"
    part: ClassVar[type[Quantized]] = Quantized
    uses_base: ClassVar[bool] = True
    is_cheap: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = (
        "quantised-rows:6.0.6.4:8",
        "quantised-rows:0.8.0.4.4:row",
        "quantised-rows:0.0.0.0.6.6.4:8",
    )

    def __post_init__(self) -> None:
        coded = [bits for bits in self.bits if bits]
        if sum(self.shares) != ROW_SHARES or len(self.bits) < 2 or len(coded) > MOST_WIDTHS or not self.shares[-1]:
            raise ValueError(
                f"rows have no bits or {MOST_WIDTHS} different numbers of bits, at least two in all, in shares that "
                f"make {ROW_SHARES}, not {'.'.join(map(str, self.shares))}"
            )
        for bits in coded:
            self.part(bits, self.group)

    @property
    def bits(self) -> list[int]:
        """The numbers of bits that some rows have, ascending; rows of 0 bits have no codes."""
        return [bits for bits, share in enumerate(self.shares) if share]

    @property
    def mean_bits(self) -> float:
        """Bits per weight for the codes, as the mean over all rows of a matrix."""
        return sum(bits * share for bits, share in enumerate(self.shares)) / ROW_SHARES

    @property
    def spec(self) -> str:
        return f"{self.kind}:{'.'.join(map(str, self.shares))}:{self.group or ROW}"

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        if len(arguments) != 2 or not all(share.isdigit() for share in arguments[0].split(".")):
            raise ValueError(f"'{cls.kind}' takes two arguments, shares of rows with 0, 1 … bits and group size")
        return cls(tuple(map(int, arguments[0].split("."))), parse_quantization("1", arguments[1])[1])

    @classmethod
    def describe(cls, forms: Sequence[Self]) -> list[str]:
        least, most = min(form.mean_bits for form in forms), max(form.mean_bits for form in forms)
        bits = f"{least:.2g}" if least == most else f"{least:.2g} … {most:.2g}"
        return [f"{len(forms)} × {bits} bits by rows"]

    def fitted(self, shape: tuple[int, int]) -> Self:
        found = type(self)(self.shares, fitting_group(self.group, shape[1]))
        for part in found.coded(shape):
            part.form.fitted((part.rows, shape[1]))
        return found

    def row_parts(self, shape: tuple[int, int]) -> list[RowPart]:
        """The rows of a matrix `[out, in]`, from the fewest bits on.

        Raises:
            ValueError: there are so few that none have any.
        """
        rows, found = shape[0], []
        ends = [min(rows, round(rows * end / ROW_SHARES / ROW_UNIT) * ROW_UNIT) for end in accumulate(self.shares)]
        for bits, (first, last) in enumerate(pairwise([0, *ends[:-1], rows])):
            if first < last:
                found.append(RowPart(self.part(bits, self.group) if bits else None, first, last))
        if not any(part.form for part in found):
            raise ValueError(f"of {rows} rows '{self.spec}' stores none")
        return found

    def coded(self, shape: tuple[int, int]) -> Iterator[CodedPart]:
        """Iterate over the parts of a matrix `[out, in]` whose rows have codes, from the fewest bits on."""
        start = 0
        for part in self.row_parts(shape):
            if part.form is not None:
                assert isinstance(part.form, Quantized)
                size = packed_size(part.rows * shape[1], part.form.bits)
                yield CodedPart(part.form, part.first, part.last, slice(start, start + size))
                start += size

    @cached_property
    def _index_bits(self) -> int:
        return (len(self.bits) - 1).bit_length()

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        rows, columns = shape
        coded = list(self.coded(shape))
        [groups] = {part.form.tensors((part.rows, columns))["scales"].shape[1] for part in coded}
        return {
            "codes": Stored((coded[-1].codes.stop,), torch.uint8),
            "scales": Stored((rows - coded[0].first, groups)),
            "row_bits": Stored((packed_size(rows, self._index_bits),), torch.uint8),
        }

    def counted_parameters(self, shape: tuple[int, int]) -> float:
        return sum(part.form.counted_parameters((part.rows, shape[1])) for part in self.coded(shape))

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        """The work of encoding all rows in most bits, and of ranking them."""
        *_, most = self.coded(matrix)
        ranking = Work(products={"float32": matrix[0] * matrix[1] ** 2}) if fed_back else Work()
        return ranking + most.form.work(matrix, fed_back=fed_back)

    def in_turn_work(self, matrix: tuple[int, int]) -> Work:
        *_, most = self.coded(matrix)
        return most.form.in_turn_work(matrix)

    def trial_work(self, columns: int) -> Work:
        """No work: what its rows lose follows from the rows of its parts."""
        return Work()

    def order(self, row_bits: Tensor, rows: int) -> Tensor:
        """Numbers of rows [out] in the order in which they are stored, from the numbers of their parts, packed."""
        return unpack(row_bits, self._index_bits, rows).argsort(stable=True)

    def ranked(self, counts: Tensor) -> Tensor:
        """Assign each row the number of its part, [out] uint8, by its importance [out]: the most important rows get
        most bits."""
        rows, places = len(counts), torch.empty(len(counts), dtype=torch.uint8, device=counts.device)
        rising = counts.argsort(stable=True)
        for index, part in enumerate(self.row_parts((rows, 1))):
            places[rising[part.first : part.last]] = index
        return places

    def encode(self, matrix: Tensor, dtype: torch.dtype, measured: Measured = NOTHING) -> dict[str, Tensor]:
        """`matrix` is floating and finite, scales are in `dtype`. With a Gram matrix errors are chosen to cancel in the
        output, see `numerics.error_feedback`."""
        shape = len(matrix), matrix.shape[1]
        measured = measured.with_feedback()
        places = self.ranked(self.counts(matrix, measured))
        order = places.argsort(stable=True)
        if measured.outputs is None:
            parts = [(matrix[order[part.first : part.last]], part.form) for part in self.coded(shape)]
            found = encode_together(parts, dtype, measured)
        else:
            forms = {part.first: part.form for part in self.coded(shape)}
            counted = [(part.rows, forms.get(part.first)) for part in self.row_parts(shape)]
            found = encode_by_rows(matrix, counted, order, dtype, measured)
        return {
            "codes": torch.cat([own["codes"] for own in found]),
            "scales": torch.cat([own["scales"] for own in found]),
            "row_bits": pack(places, self._index_bits),
        }

    @staticmethod
    def counts(matrix: Tensor, measured: Measured) -> Tensor:
        """Importance `[out]` of each row: what an error of equal relative size in it costs at the output, as a squared
        norm."""
        rows = matrix.detach().float()
        sizes = rows.square().sum(1) if measured.feedback is None else measured.feedback.sizes(rows)
        return sizes if measured.norm is None else sizes * measured.norm.counts().to(sizes)

    def damage(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str | None:
        counts = torch.bincount(
            unpack(tensors["row_bits"], self._index_bits, shape[0]), minlength=MOST_WIDTHS + 1
        ).tolist()
        expected = [part.rows for part in self.row_parts(shape)]
        if counts != expected + [0] * (len(counts) - len(expected)):
            return f"rows have other numbers of bits than '{self.spec}' says"
        return None

    def trainable(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], matrix: Tensor | None = None
    ) -> "TrainableRows":
        return TrainableRows(self, tensors, shape, matrix)

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return MixedRowsWeight(self, shape, dtype, device)

    def part_tensors(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Iterator[dict[str, Tensor]]:
        """Cut the stored `codes` and `scales` of a matrix into those of each part that `coded` names, as views."""
        coded = list(self.coded(shape))
        for part in coded:
            skipped = coded[0].first
            scales = tensors["scales"][part.first - skipped : part.last - skipped]
            yield {"codes": tensors["codes"][part.codes], "scales": scales}


@dataclass(frozen=True)
class TrellisRows(MixedRows):
    """A delta whose rows have different numbers of bits, as `MixedRows` stores them, each part coded in a trellis."""

    kind: ClassVar[str] = "trellis-rows"
    part: ClassVar[type[Quantized]] = Trellis
    examples: ClassVar[tuple[str, ...]] = ("trellis-rows:6.5.5:8",)


class TrainableRows(Trainable):
    """Stored numbers of a `MixedRows` matrix while gradients move them: each part is trained in its own form."""

    def __init__(
        self, form: MixedRows, tensors: Mapping[str, Tensor], shape: tuple[int, int], matrix: Tensor | None
    ) -> None:
        self._shape, self._row_bits = shape, tensors["row_bits"]
        order = form.order(self._row_bits, shape[0])
        self._parts: list[tuple[Tensor, Trainable]] = []
        for part, stored in zip(form.coded(shape), form.part_tensors(tensors, shape), strict=True):
            rows = order[part.first : part.last]
            moved = part.form.trainable(stored, (part.rows, shape[1]), None if matrix is None else matrix[rows])
            self._parts.append((rows, moved))

    def dense(self) -> Tensor:
        found = torch.zeros(self._shape, device=self._row_bits.device)
        for rows, part in self._parts:
            found[rows] = part.dense()
        return found

    def step(self, gradient: Tensor, pace: Pace) -> None:
        for rows, part in self._parts:
            part.step(gradient[rows], pace)

    def tensors(self) -> dict[str, Tensor]:
        parts = [part.tensors() for _, part in self._parts]
        return {name: torch.cat([own[name] for own in parts]) for name in ("codes", "scales")} | {
            "row_bits": self._row_bits
        }


class MixedRowsWeight(Weight):
    """Run-time form: one product for each number of bits. Scales can be trained, codes cannot."""

    codes: Tensor
    row_bits: Tensor

    def __init__(
        self, representation: MixedRows, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape, self.representation = shape, representation
        stored = representation.tensors(shape)
        self.register_buffer("codes", torch.zeros(stored["codes"].shape, dtype=torch.uint8, device=device))
        self.register_buffer("row_bits", torch.zeros(stored["row_bits"].shape, dtype=torch.uint8, device=device))
        self.scales = empty_parameter(stored["scales"].shape, dtype, device)
        self._places: Tensor | None = None
        # In a tuple: what they are made of is this module's.
        self._weights = tuple(
            (part, _without_tensors(part.form, (part.rows, shape[1]), dtype)) for part in representation.coded(shape)
        )

    @property
    def scaled_size(self) -> float:
        return max(weight.scaled_size for _, weight in self._weights)

    def places(self) -> Tensor:
        """Numbers of rows [out] int32 in the order in which they are stored, kept."""
        if self._places is None or self._places.device != self.row_bits.device:
            with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
                self._places = self.representation.order(self.row_bits, self.shape[0]).int()
        return self._places

    def forget(self) -> None:
        self._places = None

    def derived(self) -> tuple[Tensor, ...]:
        return () if self._places is None else (self._places,)

    def _parts(self) -> Iterator[tuple[Tensor, QuantizedWeight]]:
        """Rows, and what they are made of."""
        places, tensors = self.places(), {"codes": self.codes, "scales": self.scales}
        stored = self.representation.part_tensors(tensors, self.shape)
        for (part, empty), own in zip(self._weights, stored, strict=True):
            weight = copy(empty)  # which goes after use: one that stays would hold tensors that others replace
            weight.__dict__.update(own)  # as passing tensors: a parameter's part is none
            yield places[part.first : part.last], weight

    def forward(self, inputs: Tensor) -> Tensor:
        found = [(rows, weight(inputs)) for rows, weight in self._parts()]
        output = found[0][1].new_zeros(len(inputs), self.shape[0])
        for rows, part in found:
            output = output.index_copy(1, rows.long(), part)
        return output

    def dense(self) -> Tensor:
        dtype = torch.promote_types(self.scales.dtype, torch.float32)
        found = torch.zeros(self.shape, dtype=dtype, device=self.scales.device)
        for rows, weight in self._parts():
            found = found.index_copy(0, rows.long(), weight.dense())
        return found

    def products(self) -> Products:
        return tuple((replace(weight.operand(), places=rows),) for rows, weight in self._parts())


def _without_tensors(form: Quantized, shape: tuple[int, int], dtype: torch.dtype) -> QuantizedWeight:
    """A weight whose codes and scales are parts of others', given whenever it is used."""
    weight = form.build(shape, dtype, torch.device("meta"))
    del weight.codes, weight.scales
    return weight
