"""Kernels of cards, in Triton: products with stored matrices, and their unpacking.

A tile of a matrix is read as it is stored, and decoded in registers. Where one byte serves several rows (`matrices.h`),
a tile has all of these rows, so that bytes come from memory once. A tile is given more dimensions by a reshape, which
leaves it in its registers; `[None]` would not. Sums are fp32. Forms are those of `operands.py`.
"""

import triton
import triton.language as tl

F32, BF16, F16 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CODES1, CODES2, CODES3, CODES4, CODES8 = (tl.constexpr(4 + i) for i in range(5))
NF4, INT8, SPARSE = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)
TRELLIS1, TRELLIS2, TRELLIS3, TRELLIS4 = (tl.constexpr(12 + i) for i in range(4))


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
def _rows(rows, first, SERVED: tl.constexpr, ROWS: tl.constexpr):
    """`ROWS` rows from `first` on of each of `SERVED` stripes, and whether they are there."""
    each, height = tl.arange(0, SERVED * ROWS), rows // SERVED
    within = first + each % ROWS
    return each // ROWS * height + within, within < height


@triton.jit
def _two(data, height, columns, stripe, row, column, mask, BACK: tl.constexpr):
    """Of codes of three bits the lower two, for those `BACK` numbers before on their paths."""
    row, stripe = row - (stripe < BACK).to(tl.int32), (stripe - BACK) & 7
    byte = tl.load(data + (row + stripe % 2 * height) * columns + column, mask & (row >= 0), 0).to(tl.int32)
    return (byte >> (stripe // 2 * 2)) & 0x03030303


@triton.jit
def _third(data, height, columns, stripe, row, column, mask, BACK: tl.constexpr):
    """The other bit of the same."""
    row, stripe = row - (stripe < BACK).to(tl.int32), (stripe - BACK) & 7
    byte = tl.load(data + (row + 2 * height) * columns + column, mask & (row >= 0), 0).to(tl.int32)
    return (byte >> stripe) & 0x01010101


@triton.jit
def _windows(data, height, columns, stripe, row, column, mask, BITS: tl.constexpr):
    """Windows of a trellis in the rows stripe · height + row, int32: in the lowest byte, or where `data` are words of
    four columns (and `columns` and `column` count these) in every byte."""
    if BITS == 3:
        found = _two(data, height, columns, stripe, row, column, mask, 2)
        found |= _two(data, height, columns, stripe, row, column, mask, 1) << 2
        found |= _third(data, height, columns, stripe, row, column, mask, 1) << 4
        found |= _two(data, height, columns, stripe, row, column, mask, 0) << 5
        found |= _third(data, height, columns, stripe, row, column, mask, 0) << 7
    else:
        at, shift = row * columns + column, (stripe + 1) * BITS
        own = tl.load(data + at, mask, 0).to(tl.int32)
        above = tl.load(data + at - columns, mask & (row > 0) & (shift < 8), 0).to(tl.int32)
        low = (255 >> shift) * 0x01010101  # bits of the byte above, in every byte
        found = ((own << (8 - shift)) & ~low) | ((above >> shift) & low)
    return found


@triton.jit
def _looked_up(levels, windows):
    """By the lowest byte."""
    return tl.load(levels + (windows & 255))


@triton.jit
def _path(
    data, levels, rows, columns, first, start,
    BITS: tl.constexpr, ALIGNED: tl.constexpr, SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of numbers in a trellis, unscaled: [rows, columns].

    It is found in one dimension. In two, Triton would look it up in another order than it reads codes in, and carry
    every address from one to the other through shared memory.
    """
    LANES: tl.constexpr = 4 if ALIGNED else 1
    STRIPES: tl.constexpr = 8 if BITS % 2 == 1 else 8 // BITS
    WIDTH: tl.constexpr = COLUMNS // LANES
    each = tl.arange(0, SERVED * ROWS * WIDTH)
    part, within = each // WIDTH // ROWS, first + each // WIDTH % ROWS
    height, column = rows // STRIPES, start // LANES + each % WIDTH
    if SERVED == STRIPES:
        stripe, row = part, within
    else:
        row = part * (rows // SERVED) + within
        stripe, row = row // height, row % height
    if ALIGNED:
        columns = columns // 16 * 4
        data = tl.multiple_of(data.to(tl.pointer_type(tl.int32)), 16)  # words of four columns
    mask = (within < rows // SERVED) & (column < columns)
    windows = _windows(data, height, columns, stripe, row, column, mask, BITS)
    values = _looked_up(levels, windows)
    if ALIGNED:
        odd = tl.join(_looked_up(levels, windows >> 8), _looked_up(levels, windows >> 24))
        values = tl.join(tl.join(values, _looked_up(levels, windows >> 16)), odd)
    return tl.reshape(values, (SERVED * ROWS, COLUMNS)).to(tl.float32)


@triton.jit
def _tile(
    data, scales, levels, rows, columns, group, first, start,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The columns from `start` on of `ROWS` rows from `first` on of each of `SERVED` stripes: fp32 [rows, columns].

    What is not there is finite.
    """
    row, inside = _rows(rows, first, SERVED, ROWS)
    row, exists, column = row[:, None], inside[:, None], (start + tl.arange(0, COLUMNS))[None, :]
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
        elif FORM >= TRELLIS1:
            values = _path(data, levels, rows, columns, first, start, FORM - 11, ALIGNED, SERVED, ROWS, COLUMNS)
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
    return values


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
    levels = _data(tl.load(own + 8), BF16 if FORM >= TRELLIS1 else F32)
    source, target = x + pair[:, None] * x_length, y + pair[:, None] * y_length
    total = tl.zeros((TOKENS, SERVED * ROWS, COLUMNS), tl.float32)
    if TRANSPOSED:
        start = block * COLUMNS
        for first in range(0, rows // SERVED, ROWS):
            tile = _tile(
                data, scales, levels, rows, columns, group, first, start, FORM, ALIGNED, WHOLE, SERVED, ROWS, COLUMNS
            )
            row, inside = _rows(rows, first, SERVED, ROWS)
            given = tl.load(source + row[None, :], exists[:, None] & inside[None, :], 0)
            total += given[:, :, None] * tl.reshape(tile, (1, SERVED * ROWS, COLUMNS))
        at = start + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (at < columns)[None, :]
        found = tl.sum(total, 1)
    else:
        for start in range(0, columns, COLUMNS):
            tile = _tile(
                data, scales, levels, rows, columns, group, block * ROWS, start,
                FORM, ALIGNED, WHOLE, SERVED, ROWS, COLUMNS,
            )  # fmt: skip
            column = start + tl.arange(0, COLUMNS)
            given = tl.load(source + column[None, :], exists[:, None] & (column < columns)[None, :], 0)
            total += given[:, None, :] * tl.reshape(tile, (1, SERVED * ROWS, COLUMNS))
        at, inside = _rows(rows, block * ROWS, SERVED, ROWS)
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
    ADDS: tl.constexpr, SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = M, plus a second matrix if there is one, plus what is there if `ADDS`. Programs: tiles."""
    first, start = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row, exists = _rows(rows, first, SERVED, ROWS)
    values = _tile(
        data, scales, levels, rows, columns, group, first, start,
        FIRST, FIRST_ALIGNED, FIRST_WHOLE, SERVED, ROWS, COLUMNS,
    )  # fmt: skip
    if SECOND:
        values += _tile(
            more_data, more_scales, more_levels, rows, columns, more_group, first, start,
            SECOND, SECOND_ALIGNED, SECOND_WHOLE, SERVED, ROWS, COLUMNS,
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
