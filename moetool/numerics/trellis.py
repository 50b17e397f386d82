"""Trellis-coded quantization: codes of 1 to 4 bits, of which several neighbors together determine each value.

A code of k bits by itself has 2^k values. Here the value of a number is looked up by its own code and those of the
numbers before it, a window of `WINDOW` bits that moves on by one code a number: a path through a trellis of 256
states, of which every state has 2^k successors. The values of these are chosen so that any number is near to one of
them, and the whole path by Viterbi's algorithm, so that the squared error of all numbers together is least. Nothing is
stored beside the codes (M. Marcellin and T. Fischer, "Trellis coded quantization of memoryless and Gauss-Markov
sources", IEEE Trans. Commun., 1990; with a window of bits as the state: Tseng et al., QTIP, arXiv:2406.11235).

Of a normal variable it leaves .280, .077, .021, .0058 at 1, 2, 3, 4 bits, where the best levels leave .363, .117,
.035, .0095, and no code of any length less than .250, .063, .016, .004.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor

from moetool.compiled import compiler
from moetool.numerics.error_feedback import Coded, Feedback, Grid, fed_back
from moetool.numerics.packing import rows_served
from moetool.numerics.row_feedback import Among

WIDTHS = (1, 2, 3, 4)
WINDOW = 8  # bits that say what a number is: its code, and those before it; of the oldest one the lower bits
_CHUNK = 1 << 18  # elements worked on at a time
_FITS = 2  # of scales to the paths, which are found anew for them
_SEGMENT = 1024  # numbers on one of which a path is found at a time; the next begin where that ended


@cache
def values(bits: int, device: torch.device) -> Tensor:
    """Value of each window of codes: [256] fp32, numbers of bf16; the newest code is in a window's highest bits.

    Raises:
        ValueError: `bits` is not one of `WIDTHS`.
    """
    if bits not in WIDTHS:
        raise ValueError(f"codes in a trellis have {', '.join(map(str, WIDTHS))} bits, not {bits}")
    stored = files("moetool.numerics").joinpath(f"trellis-{bits}.bf16").read_bytes()
    with torch.inference_mode(False):
        return torch.frombuffer(bytearray(stored), dtype=torch.bfloat16).float().to(device)


def windows(codes: Tensor, bits: int) -> Tensor:
    """The windows of codes [numbers, …] uint8 along their first dimension: [numbers, …] int32.

    Before the first number all codes are zero.
    """
    found = torch.zeros(codes.shape, dtype=torch.int32, device=codes.device)
    for back, low in enumerate(range(WINDOW - bits, -bits, -bits)):
        own = codes[: max(0, len(codes) - back)].int()
        found[back:] |= own << low if low >= 0 else own & (2 ** (bits + low) - 1)
    return found


def check_rows(rows: int, bits: int) -> None:
    """Raise `ValueError` unless the rows of a matrix fill whole bytes: a multiple of `rows_served(bits)`."""
    if rows % (served := rows_served(bits)):
        raise ValueError(f"a trellis of {bits} bits takes a multiple of {served} rows, not {rows}")


def in_order(rows: int, bits: int) -> Tensor:
    """[rows] int64: the rows of a column in the order of its path, all that share a byte one after the other.

    Raises:
        ValueError: bytes do not serve whole rows.
    """
    check_rows(rows, bits)
    return torch.arange(rows).view(rows_served(bits), -1).T.reshape(-1)


def decoded(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] that codes [out, in] uint8 and scales [out, groups] stand for, in `dtype`."""
    rows, columns = codes.shape
    order, table = in_order(rows, bits).to(codes.device), values(bits, codes.device).to(dtype)
    found = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    step = max(1, _CHUNK // rows)
    for start in range(0, columns, step):
        part = slice(start, start + step)
        found[order, part] = table[windows(codes[order, part], bits)]
    return (found.view(rows, scales.shape[1], -1) * scales.to(dtype).unsqueeze(2)).view(rows, columns)


def fitting_scales(
    matrix: Tensor, bits: int, group: int, dtype: torch.dtype, *, importance: Tensor | None = None
) -> Tensor:
    """Scales with a small squared error of the nearest codes.

    Args:
        matrix: [out, in], floating and finite.
        bits: one of `WIDTHS`.
        group: inputs that share a scale, a divisor of `in`.
        dtype: of the scales.
        importance: [in], how much the squared error of each input counts; None for all the same.

    Returns:
        [out, in / group] in `dtype`.

    Raises:
        ValueError: bytes do not serve whole rows, or values are not finite.
    """
    rows, columns = matrix.shape
    numbers = matrix.detach().float().cpu()
    if not bool(numbers.isfinite().all()):
        raise ValueError("a matrix with values that are not finite cannot be quantized")
    grouped = numbers.view(rows, -1, group)
    size = grouped.abs().amax(2)  # by which groups are brought to unit size, so that no square under- or overflows
    size = torch.where(size > 0, size, 1)
    grouped = grouped / size.unsqueeze(2)
    scales = (grouped.square().mean(2).sqrt() * size).to(dtype)
    weights = torch.ones(columns) if importance is None else importance.float().cpu()
    weights = weights.view(1, -1, group).clamp_min(1e-4 * float(weights.mean()) or 1.0)
    for _ in range(_FITS):
        near = _nearest(numbers, scales, bits)[1].view(grouped.shape)
        norm = (weights * near.square()).sum(2)
        fitted = (weights * near * grouped).sum(2) / torch.where(norm > 0, norm, 1)
        scales = torch.where(fitted > 0, (fitted * size).to(dtype), scales)
    return scales.to(matrix.device)


def nearest_codes(matrix: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes [out, in] uint8 of a matrix [out, in] under scales [out, groups], the paths of each input by themselves.

    Raises:
        ValueError: bytes do not serve whole rows.
    """
    return _nearest(matrix.detach().float().cpu(), scales.detach().cpu(), bits)[0].to(matrix.device)


class TrellisCodes:
    """Paths that make good for errors of the inputs before, for `numerics.output_codes`."""

    noise: ClassVar[Mapping[int, float]] = {1: 0.280, 2: 0.077, 3: 0.021}
    least_rows: ClassVar[int] = 32
    ahead: ClassVar[int] = 8

    def fed_back(self, parts: Sequence[Coded], feedback: Feedback) -> list[Tensor]:
        """Find codes `[out, in]` of each part that make up for each other's errors, by the best path through the
        trellis.

        Raises:
            ValueError: the rows of a part do not fill whole bytes (`check_rows`).
        """
        return [self._fed_back(part, feedback) for part in parts]

    def decoded(self, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
        return decoded(codes, scales, bits, torch.float32)

    def order(self, rows: int, bits: int) -> Tensor:
        return in_order(rows, bits)

    def after(self, codes: Sequence[Tensor], among: Among) -> "TrellisCodes":
        before = torch.cat([own[-WINDOW:] for own in codes[-1:]] or [torch.empty(0, dtype=torch.uint8)])
        return _CodesGoingOn(before, among)

    def _fed_back(self, part: Coded, feedback: Feedback) -> Tensor:
        order = self.order(len(part.matrix), part.bits)
        lines = part.matrix.detach().float().cpu()[order].T.contiguous()
        grid = self._grid(part.bits, part.scales.detach().float().cpu()[order].T.contiguous(), feedback)
        return _as_rows(fed_back(lines, grid, part.scales.shape[1], feedback), order).to(part.matrix.device)

    def _grid(self, bits: int, scales: Tensor, feedback: Feedback) -> Grid:
        return Paths(bits, scales)


class _CodesGoingOn(TrellisCodes):
    """A coder of rows that come in the order of a path, which goes on from rows before, and whose errors move each
    other."""

    def __init__(self, before: Tensor, among: Among) -> None:
        """Go on from the codes of the last rows `before` [rows, in] uint8; [0] if there are none."""
        self._before, self._among = before, among

    def decoded(self, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
        states = windows(torch.cat([self._before.to(codes), codes]), bits)[len(self._before) :]
        found = values(bits, codes.device)[states]
        return (found.view(*scales.shape, -1) * scales.float().unsqueeze(2)).view(codes.shape)

    def order(self, rows: int, bits: int) -> Tensor:
        return torch.arange(rows)

    def _grid(self, bits: int, scales: Tensor, feedback: Feedback) -> Grid:
        begins: Iterable[int] = repeat(0)
        if len(self._before):
            begins = _state(self._before.cpu(), bits)[feedback.order.cpu()].tolist()
        return LinkedPaths(bits, scales, begins, self._among)


def _nearest(numbers: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of fp32 numbers on a CPU, and their values before scaling, both [out, in]."""
    order = in_order(len(numbers), bits)
    factors = scales.float()[order]
    unit = numbers[order].view(*factors.shape, -1) / torch.where(factors > 0, factors, 1).unsqueeze(2)
    lines = unit.flatten(1).T.contiguous()
    codes = torch.empty_like(lines, dtype=torch.uint8)
    values = path(lines, bits, codes)
    return _as_rows(codes, order), _as_rows(values, order)


def _as_rows(lines: Tensor, order: Tensor) -> Tensor:
    """What is [in, out] in the order of paths as [out, in]."""
    found = torch.empty_like(lines.T, memory_format=torch.contiguous_format)
    found[order] = lines.T
    return found


class Paths:
    """Finds paths of columns whose values are scaled, for error feedback."""

    def __init__(self, bits: int, scales: Tensor) -> None:
        """`scales` [groups, rows] fp32."""
        self._bits, self._scales = bits, scales
        self._inverse = 1 / torch.where(scales > 0, scales, 1)

    def nearest(self, values: Tensor, group: int, codes: Tensor) -> Tensor:
        """Find the path nearest to the column `values` [rows]: writes `codes` [rows] uint8, returns its numbers."""
        return self._path(values * self._inverse[group], self._scales[group], codes).mul_(self._scales[group])

    def _path(self, numbers: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
        return path(numbers, self._bits, codes)


class LinkedPaths(Paths):
    """Finds paths of columns in which the errors of rows move the rows behind them."""

    def __init__(self, bits: int, scales: Tensor, begins: Iterable[int], among: Among) -> None:
        """`scales` [groups, rows] fp32; the columns begin in these states, in the order in which they are asked for."""
        super().__init__(bits, scales)
        self._begins, self._among = iter(begins), Among(*(own.cpu().contiguous() for own in among))

    def _path(self, numbers: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
        return linked_path(numbers, self._bits, codes, next(self._begins), self._among, scales)


def path(numbers: Tensor, bits: int, codes: Tensor) -> Tensor:
    """The values of the path that is nearest to `numbers` of variance one; writes its `codes` uint8.

    All are [n] or [lines, n], each line by itself, in fp32, on a CPU, contiguous.
    """
    if compiler.problem():
        if numbers.dim() == 1:
            return _by_torch(numbers, bits, codes)
        return torch.stack([_by_torch(line, bits, own) for line, own in zip(numbers, codes, strict=True)])
    found, table = torch.empty_like(numbers), _newest_lowest(bits)
    compiler.library().moetool_trellis(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_long(len(numbers) if numbers.dim() > 1 else 1),
        ctypes.c_long(numbers.shape[-1]),
        ctypes.c_int(bits),
        ctypes.c_int(WINDOW),
        ctypes.c_long(_SEGMENT),
        ctypes.c_void_p(table.data_ptr()),
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_void_p(found.data_ptr()),
        ctypes.c_int(compiler.threads()),
    )
    return found


def linked_path(numbers: Tensor, bits: int, codes: Tensor, begin: int, among: Among, scales: Tensor) -> Tensor:
    """The values of a path near to `numbers` [n] fp32 whose errors move those behind them; writes its `codes` uint8.

    Every survivor of the search goes by the errors that it has made itself (per-survivor processing, Raheli et al.,
    IEEE Trans. Commun., 1995).

    Args:
        numbers: of variance one, divided by their scales; on a CPU, contiguous.
        bits: of a code.
        codes: [n] uint8, written.
        begin: the state to begin from.
        among: how errors move the numbers behind, before these are divided.
        scales: [n] fp32.
    """
    if compiler.problem():
        return _linked_by_torch(numbers, bits, codes, begin, among, scales)
    found, table, own = torch.empty_like(numbers), _newest_lowest(bits), scales.contiguous()
    links, pivots = among
    compiler.library().moetool_linked_trellis(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_long(len(numbers)),
        ctypes.c_int(bits),
        ctypes.c_int(begin),
        ctypes.c_void_p(table.data_ptr()),
        ctypes.c_void_p(links.data_ptr()),
        ctypes.c_long(links.stride(0)),
        ctypes.c_void_p(own.data_ptr()),
        ctypes.c_void_p(pivots.data_ptr()),
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_void_p(found.data_ptr()),
    )
    return found


def reordered(states: Tensor, bits: int) -> Tensor:
    """Windows with the newest code in the lowest bits as such with the newest in the highest."""
    found = torch.zeros_like(states)
    for low in range(WINDOW - bits, -bits, -bits):
        code = states & (2 ** min(bits, bits + low) - 1)
        found |= code << max(low, 0)
        states = states >> bits
    return found


def _state(before: Tensor, bits: int) -> Tensor:
    """The states [in] int32 in which paths have come through codes `before` [rows, in] uint8: the newest code in the
    lowest bits."""
    found = torch.zeros(before.shape[1:], dtype=torch.int32)
    for codes in before[-WINDOW:]:
        found = (found << bits | codes) & (2**WINDOW - 1)
    return found


@cache
def _newest_lowest(bits: int) -> Tensor:
    return values(bits, torch.device("cpu"))[reordered(torch.arange(2**WINDOW), bits)].contiguous()


def _by_torch(numbers: Tensor, bits: int, codes: Tensor) -> Tensor:
    """Find the path in plain torch, all segments side by side; a hundred times slower than the compiled form."""
    table, branches = _newest_lowest(bits), 2**bits
    states, stems = len(table), len(table) // branches
    count = -(-len(numbers) // _SEGMENT)
    padded = torch.zeros(count * _SEGMENT)
    padded[: len(numbers)] = numbers
    lines = padded.view(count, _SEGMENT)
    costs = torch.zeros(count, states)
    costs[0] = 1e30
    costs[0, 0] = 0
    origins = torch.empty(_SEGMENT, count, stems, dtype=torch.uint8)
    ends = [min(_SEGMENT, len(numbers) - first) for first in range(0, len(numbers), _SEGMENT)]
    at_end = torch.empty(count, states)
    for t in range(max(ends, default=0)):
        best, origin = costs.view(count, branches, stems).min(1)
        origins[t] = origin
        costs = best.repeat_interleave(branches, 1) + (lines[:, t, None] - table).square()
        costs -= costs.amin(1, keepdim=True)
        for line, end in enumerate(ends):
            if t == end - 1:
                at_end[line] = costs[line]
    found = torch.empty_like(numbers)
    stem: int | None = None
    for line in reversed(range(count)):
        allowed = torch.arange(states) if stem is None else stem + stems * torch.arange(branches)
        state = int(allowed[at_end[line][allowed].argmin()])
        for t in reversed(range(ends[line])):
            place = line * _SEGMENT + t
            codes[place], found[place] = state % branches, table[state]
            stem = state // branches
            state = stem + stems * int(origins[t, line, stem])
    return found


def _linked_by_torch(numbers: Tensor, bits: int, codes: Tensor, begin: int, among: Among, scales: Tensor) -> Tensor:
    """Find a path whose errors move the numbers behind them, as `linked_path` does, in plain torch."""
    table, branches, count = _newest_lowest(bits), 2**bits, len(numbers)
    states, stems = len(table), len(table) // branches
    links = among.links * scales[:, None] / torch.where(scales > 0, scales, 1)
    weights = among.pivots * scales.square()
    costs = torch.full((states,), 1e30)
    costs[begin] = 0
    errors, origins = torch.zeros(count, states), torch.empty(count, states, dtype=torch.int64)
    for t in range(count):
        moved = numbers[t] + links[:t, t] @ errors[:t]
        # [branches, stems, 1] of where a path comes from, and [stems, branches] of where it goes.
        off = moved.view(branches, stems, 1) - table.view(stems, branches)
        reached = costs.view(branches, stems, 1) + weights[t] * off.square()
        least, origin = (own.flatten() for own in reached.min(0))
        origins[t] = origin * stems + torch.arange(states) // branches
        errors[:t] = errors[:t, origins[t]]
        errors[t] = numbers[t] - table
        costs = least - least.min()
    found, state = torch.empty_like(numbers), int(costs.argmin())
    for t in reversed(range(count)):
        codes[t], found[t] = state % branches, table[state]
        state = int(origins[t, state])
    return found
