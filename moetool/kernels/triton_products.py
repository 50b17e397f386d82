"""Kernels of cards, in Triton: products with stored matrices, and their unpacking.

A tile of a matrix is read as it is stored, and decoded in registers. Where one byte serves several rows (`matrices.h`),
a tile has all of these rows, so that bytes come from memory once. Sums are fp32. Forms are those of `operands.py`.
"""

import triton
import triton.language as tl

F32, BF16, F16 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CODES1, CODES2, CODES3, CODES4, CODES8 = (tl.constexpr(4 + i) for i in range(5))
NF4, INT8, SPARSE = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)


@triton.jit
def _data(address, FORM: tl.constexpr):
    """A pointer to what is stored."""
    if FORM == F32:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif FORM == BF16:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif FORM == F16:
        pointer = address.to(tl.pointer_type(tl.float16))
    elif FORM == INT8:
        pointer = address.to(tl.pointer_type(tl.int8))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return pointer


@triton.jit
def _read(data, at, mask, ALIGNED: tl.constexpr):
    """A tile; neighbours at once where they lie so."""
    pointer = data + at
    if ALIGNED:
        pointer = tl.multiple_of(pointer, (1, 16))
    return tl.load(pointer, mask, 0)


@triton.jit
def _plane(data, rows, columns, row, column, mask, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Codes of `WIDTH` bits of one plane, int32."""
    if ALIGNED:
        height = rows * WIDTH // 8
        stripe, at = row // height, (row % height) * columns + column
    else:
        length, flat = (rows * columns * WIDTH + 7) // 8, row * columns + column
        stripe, at = flat // length, flat % length
    byte = _read(data, at, mask, ALIGNED).to(tl.int32)
    return (byte >> (stripe * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _tile(
    data, scales, levels, rows, columns, group, row, start, inside,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The columns from `start` on of the rows `row` [rows], which are there where `inside` says so: fp32."""
    column = (start + tl.arange(0, COLUMNS))[None, :]
    row, exists = row[:, None], inside[:, None]
    mask = exists & (column < columns)
    if FORM <= F16:
        values = _read(data, row * columns + column, mask, ALIGNED).to(tl.float32)
    elif FORM == NF4:
        at = row * columns + column
        byte = tl.load(data + at // 2, mask, 0).to(tl.int32)
        code = tl.where(at % 2 == 1, byte & 15, byte >> 4)
        values = tl.load(levels + code) * tl.load(scales + at // group, mask, 0).to(tl.float32)
    else:
        if FORM == INT8:
            values = _read(data, row * columns + column, mask, ALIGNED).to(tl.float32)
        elif FORM == CODES8:
            values = _read(data, row * columns + column, mask, ALIGNED).to(tl.float32) - 127
        elif FORM == CODES3:
            low = _plane(data, rows, columns, row, column, mask, 2, ALIGNED)
            high = _plane(data + (rows * columns + 3) // 4, rows, columns, row, column, mask, 1, ALIGNED)
            values = tl.load(levels + (low | (high << 2)))
        else:
            WIDTH: tl.constexpr = 1 if FORM == CODES1 else 2 if FORM == CODES2 else 4
            values = tl.load(levels + _plane(data, rows, columns, row, column, mask, WIDTH, ALIGNED))
        groups = columns // group
        if WHOLE:
            scale = tl.load(scales + row * groups + start // group, exists, 0).to(tl.float32)
        else:
            scale = tl.load(scales + row * groups + column // group, mask, 0).to(tl.float32)
        if FORM == INT8:
            scale = scale / 127
        values = values * scale
    return tl.where(mask, values, 0.0)


@triton.jit
def _tokens(chosen, order, places, pairs, slot, TOKENS: tl.constexpr):
    """The pairs of this program, which of them are there, and their matrix; -1 if they are some other program's."""
    if TOKENS == 1:
        pair = slot + tl.arange(0, 1)
        expert = tl.load(chosen + slot)
        exists = pair < pairs
    else:
        place = slot + tl.arange(0, TOKENS)
        exists = place < pairs
        pair = tl.load(order + place, exists, 0)
        expert = tl.load(chosen + tl.load(order + slot))
        exists = exists & (tl.load(chosen + pair) == expert)
        expert = tl.where(tl.load(places + slot) % TOKENS == 0, expert, -1)
    return pair.to(tl.int64), exists, expert


@triton.jit(do_not_specialize=["pairs", "matrices", "number"])
def products(
    table, chosen, order, places, x, y, pairs, matrices, x_length, y_length, number,
    SLOT: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr, NUMBERS: tl.constexpr, TOKENS: tl.constexpr,
    FORM: tl.constexpr, SERVED: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[pair] += M(chosen[pair]) · x[pair], for matrices that have this operand. Programs: blocks of outputs, pairs."""
    block = tl.program_id(0)
    pair, exists, expert = _tokens(chosen, order, places, pairs, tl.program_id(1), TOKENS)
    if (expert < 0) | (expert >= matrices):
        return
    own = table + (expert * SLOTS + SLOT) * FIELDS
    if tl.load(own) != number:
        return
    rows, columns = tl.load(own + 1).to(tl.int32), tl.load(own + 2).to(tl.int32)
    group = tl.load(own + 3).to(tl.int32)
    if ALIGNED:
        columns = columns // 16 * 16  # says that it is a multiple of 16
    data = _data(tl.load(own + 5), FORM)
    scales = _data(tl.load(own + 6), NUMBERS)
    levels = _data(tl.load(own + 8), F32)
    height = rows // SERVED  # of a stripe: rows that share bytes are so far apart
    each = tl.arange(0, SERVED * ROWS)
    stripe, within = each // ROWS * height, each % ROWS
    source, target = x + pair[:, None] * x_length, y + pair[:, None] * y_length
    total = tl.zeros((TOKENS, SERVED * ROWS, COLUMNS), tl.float32)
    if TRANSPOSED:
        start = block * COLUMNS
        for first in range(0, height, ROWS):
            inside = first + within < height
            row = stripe + first + within
            tile = _tile(data, scales, levels, rows, columns, group, row, start, inside, FORM, ALIGNED, WHOLE, COLUMNS)
            given = tl.load(source + row[None, :], exists[:, None] & inside[None, :], 0)
            total += given[:, :, None] * tile[None, :, :]
        at = start + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (at < columns)[None, :]
        found = tl.sum(total, 1)
    else:
        inside = block * ROWS + within < height
        at = stripe + block * ROWS + within
        for start in range(0, columns, COLUMNS):
            tile = _tile(data, scales, levels, rows, columns, group, at, start, inside, FORM, ALIGNED, WHOLE, COLUMNS)
            column = start + tl.arange(0, COLUMNS)
            given = tl.load(source + column[None, :], exists[:, None] & (column < columns)[None, :], 0)
            total += given[:, None, :] * tile[None, :, :]
        mask = exists[:, None] & inside[None, :]
        found = tl.sum(total, 2)
    tl.store(target + at[None, :], tl.load(target + at[None, :], mask, 0) + found, mask)


@triton.jit(do_not_specialize=["pairs", "matrices", "number"])
def sparse_products(
    table, chosen, order, places, x, y, pairs, matrices, x_length, y_length, number,
    SLOT: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr, NUMBERS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same for sparse matrices. Programs: rows, pairs."""
    row = tl.program_id(0)
    pair, exists, expert = _tokens(chosen, order, places, pairs, tl.program_id(1), TOKENS)
    if (expert < 0) | (expert >= matrices):
        return
    own = table + (expert * SLOTS + SLOT) * FIELDS
    if (tl.load(own) != number) | (row >= tl.load(own + 1)):
        return
    columns = tl.load(own + 2).to(tl.int32)
    values, starts = _data(tl.load(own + 5), NUMBERS), tl.load(own + 8).to(tl.pointer_type(tl.int32))
    positions = tl.load(own + 6).to(tl.pointer_type(tl.int32))
    source = x + pair[:, None] * x_length
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), end, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        inside = at < end
        column = tl.load(positions + at, inside, 0) - row * columns
        value = tl.load(values + at, inside, 0).to(tl.float32)
        total += tl.load(source + column[None, :], exists[:, None] & inside[None, :], 0) * value[None, :]
    target = y + pair * y_length + row
    tl.store(target, tl.load(target, exists, 0) + tl.sum(total, 1), exists)


@triton.jit
def unpack(
    data, scales, levels, group, more_data, more_scales, more_levels, more_group, out, rows, columns,
    FIRST: tl.constexpr, FIRST_ALIGNED: tl.constexpr, FIRST_WHOLE: tl.constexpr,
    SECOND: tl.constexpr, SECOND_ALIGNED: tl.constexpr, SECOND_WHOLE: tl.constexpr,
    ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = M, plus a second matrix if there is one, plus what is there if `ADDS`. Programs: tiles."""
    row, start = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    exists = row < rows
    values = _tile(
        data, scales, levels, rows, columns, group, row, start, exists, FIRST, FIRST_ALIGNED, FIRST_WHOLE, COLUMNS
    )
    if SECOND:
        values += _tile(
            more_data, more_scales, more_levels, rows, columns, more_group, row, start, exists,
            SECOND, SECOND_ALIGNED, SECOND_WHOLE, COLUMNS,
        )  # fmt: skip
    column = start + tl.arange(0, COLUMNS)
    target = out + row[:, None] * columns + column[None, :]
    mask = exists[:, None] & (column < columns)[None, :]
    if ADDS:
        values += tl.load(target, mask, 0).to(tl.float32)
    tl.store(target, values.to(out.dtype.element_ty), mask)


@triton.jit
def scatter(values, positions, out, count, BLOCK: tl.constexpr):
    """out[positions] += values, each position once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    target = out + tl.load(positions + at, inside, 0)
    found = tl.load(target, inside, 0).to(tl.float32) + tl.load(values + at, inside, 0).to(tl.float32)
    tl.store(target, found.to(out.dtype.element_ty), inside)
