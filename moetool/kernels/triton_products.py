"""Kernels of cards, in Triton: products with stored matrices, and their unpacking.

A tile of a matrix is read as it is stored, and decoded in registers. Where one byte serves several rows (`matrices.h`),
a tile has all of these rows, so that bytes come from memory once. Sums are fp32. Forms are those of `operands.py`.

Tiles are found in one dimension, and then reshaped. In two, Triton would have other threads look levels up than those
that read the codes, and send all addresses through shared memory; with `[None]` instead of a reshape, all numbers.
"""

import triton
import triton.language as tl

F32, BF16, F16 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CODES1, CODES2, CODES3, CODES4, CODES5, CODES6, CODES8 = (tl.constexpr(4 + i) for i in range(7))
NF4, INT8, SPARSE = tl.constexpr(11), tl.constexpr(12), tl.constexpr(13)
TRELLIS1, TRELLIS2, TRELLIS3, TRELLIS4, ADDED = (tl.constexpr(14 + i) for i in range(5))


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
    """Load a tile, with vector loads where neighbours lie next to each other."""
    pointer = data + at
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer, mask, 0)


@triton.jit
def _rows(rows, first, SERVED: tl.constexpr, ROWS: tl.constexpr):
    """Row indices of a tile, and the mask of those that exist."""
    each, height = tl.arange(0, SERVED * ROWS), rows // SERVED
    within = first + each % ROWS
    return each // ROWS * height + within, within < height


@triton.jit
def _places(first, SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The place of each of a tile's numbers, row by row: stripe, row in the stripe, and column in the tile."""
    each = tl.arange(0, SERVED * ROWS * COLUMNS)
    line = each // COLUMNS
    return line // ROWS, first + line % ROWS, each % COLUMNS


@triton.jit
def _plane(data, count, at, mask, WIDTH: tl.constexpr):
    """Codes of `WIDTH` bits of one plane of `count` codes wherever they lie, int32."""
    length = (count * WIDTH + 7) // 8
    return (tl.load(data + at % length, mask, 0).to(tl.int32) >> (at // length * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _lowest_two(data, columns, height, stripe, row, column, mask, BACK: tl.constexpr, ALIGNED: tl.constexpr):
    """Of codes of three bits, those of the rows stripe · height + row or `BACK` before them on their paths, the lower
    two."""
    row, stripe = row - (stripe < BACK).to(tl.int32), (stripe - BACK) & 7
    codes = _read(data, (row + stripe % 2 * height) * columns + column, mask & (row >= 0), ALIGNED).to(tl.int32)
    return (codes >> (stripe // 2 * 2)) & 0x03030303


@triton.jit
def _third(data, columns, height, stripe, row, column, mask, BACK: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the third bit of each code, which lies in a plane of its own."""
    row, stripe = row - (stripe < BACK).to(tl.int32), (stripe - BACK) & 7
    codes = _read(data, (row + 2 * height) * columns + column, mask & (row >= 0), ALIGNED).to(tl.int32)
    return (codes >> stripe) & 0x01010101


@triton.jit
def _codes(data, columns, height, stripe, row, column, mask, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Codes of the rows stripe · height + row in every byte, int32."""
    if BITS == 3:
        found = _lowest_two(data, columns, height, stripe, row, column, mask, 0, ALIGNED)
        found |= _third(data, columns, height, stripe, row, column, mask, 0, ALIGNED) << 2
    elif BITS > 4:  # a plane of the lower four bits, and one of those above
        PARTS: tl.constexpr = 4 if BITS == 5 else 2
        low = _read(data, (row + stripe % PARTS * height) * columns + column, mask, ALIGNED).to(tl.int32)
        high = _read(data, (row + PARTS * height) * columns + column, mask, ALIGNED).to(tl.int32)
        found = (low >> (stripe // PARTS * 4)) & 0x0F0F0F0F
        found |= ((high >> (stripe * (BITS - 4))) & (((1 << (BITS - 4)) - 1) * 0x01010101)) << 4
    else:
        found = _read(data, row * columns + column, mask, ALIGNED).to(tl.int32) >> (stripe * BITS)
        found &= ((1 << BITS) - 1) * 0x01010101
    return found


@triton.jit
def _windows(data, columns, height, stripe, row, column, mask, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """In a trellis, windows of the rows stripe · height + row in every byte, int32."""
    if BITS == 3:
        found = _lowest_two(data, columns, height, stripe, row, column, mask, 2, ALIGNED)
        found |= _lowest_two(data, columns, height, stripe, row, column, mask, 1, ALIGNED) << 2
        found |= _third(data, columns, height, stripe, row, column, mask, 1, ALIGNED) << 4
        found |= _lowest_two(data, columns, height, stripe, row, column, mask, 0, ALIGNED) << 5
        found |= _third(data, columns, height, stripe, row, column, mask, 0, ALIGNED) << 7
    else:
        by, at = (stripe + 1) * BITS, row * columns + column
        own = _read(data, at, mask, ALIGNED).to(tl.int32) << (8 - by)
        above = _read(data, at - columns, mask & (row > 0), ALIGNED).to(tl.int32) >> by
        low = (255 >> by) * 0x01010101
        found = (own & ~low) | (above & low)
    return found


@triton.jit
def _number(levels, places, BITS: tl.constexpr):
    """What the lowest byte stands for: looked up in a table, or of more than 4 bits a whole number."""
    if BITS > 4:
        found = ((places & 255) - ((1 << (BITS - 1)) - 1)).to(tl.float32)
    else:
        found = tl.load(levels + (places & 255))
    return found


@triton.jit
def _few_bits(
    data, levels, rows, columns, first, start,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What codes of 1 to 6 bits stand for, row by row; aligned ones are told apart in words of four columns."""
    IN_TRELLIS: tl.constexpr = FORM >= TRELLIS1
    BITS: tl.constexpr = FORM - 13 if IN_TRELLIS else FORM - 3
    STRIPES: tl.constexpr = 8 // (BITS & -BITS)  # the narrowest plane has as many bits as the lowest bit of BITS
    LANES: tl.constexpr = 4 if ALIGNED else 1
    height = rows // SERVED
    stripe, row, column = _places(first, SERVED, ROWS, COLUMNS // LANES)
    column += start // LANES
    mask = (row < height) & (column < columns // LANES)
    if not (ALIGNED or IN_TRELLIS):
        row += stripe * height
    elif SERVED != STRIPES:
        row, height = tl.minimum(row + stripe * height, rows - 1), rows // STRIPES
        stripe, row = row // height, row % height
    if ALIGNED:
        columns, data = columns // 4, data.to(tl.pointer_type(tl.int32))
    if IN_TRELLIS:
        found = _windows(data, columns, height, stripe, row, column, mask, BITS, ALIGNED)
    elif ALIGNED:
        found = _codes(data, columns, height, stripe, row, column, mask, BITS, ALIGNED)
    elif BITS == 3:
        count, at = rows * columns, row * columns + column
        found = _plane(data, count, at, mask, 2) | (_plane(data + (count + 3) // 4, count, at, mask, 1) << 2)
    elif BITS > 4:
        count, at = rows * columns, row * columns + column
        high = _plane(data + (count + 1) // 2, count, at, mask, BITS - 4)
        found = _plane(data, count, at, mask, 4) | (high << 4)
    else:
        found = _plane(data, rows * columns, row * columns + column, mask, BITS)
    if ALIGNED:
        even = tl.join(_number(levels, found, BITS), _number(levels, found >> 16, BITS))
        odd = tl.join(_number(levels, found >> 8, BITS), _number(levels, found >> 24, BITS))
        values = tl.join(even, odd)
    else:
        values = _number(levels, found, BITS)
    return values


@triton.jit
def _tile(
    data, scales, levels, rows, columns, group, first, start,
    FORM: tl.constexpr, DECODE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The columns from `start` on of `ROWS` rows from `first` on of each of `SERVED` stripes: fp32 [rows, columns], any
    finite numbers where there are none."""
    height = rows // SERVED
    stripe, within, column = _places(first, SERVED, ROWS, COLUMNS)
    row, column = stripe * height + within, start + column
    at, mask = row * columns + column, (within < height) & (column < columns)
    if FORM <= F16:
        values = _read(data, at, mask, ALIGNED)
    elif FORM == NF4:
        byte = tl.load(data + at // 2, mask, 0).to(tl.int32)
        code = tl.where(at % 2 == 1, byte & 15, byte >> 4)
        values = tl.load(levels + code) * tl.load(scales + at // group, mask, 0).to(tl.float32)
    elif FORM == INT8:
        values = _read(data, at, mask, ALIGNED)
    elif FORM == CODES8:
        values = _read(data, at, mask, ALIGNED).to(tl.float32) - 127
    elif FORM >= ADDED:
        values = DECODE(data, levels, row, column, at, mask)
    else:
        values = _few_bits(data, levels, rows, columns, first, start, FORM, ALIGNED, SERVED, ROWS, COLUMNS)
    values = tl.reshape(values.to(tl.float32), (SERVED * ROWS, COLUMNS))
    if (FORM > F16) & (FORM != NF4):
        if WHOLE:
            row, inside = _rows(rows, first, SERVED, ROWS)
            scale = tl.load(scales + row * (columns // group) + start // group, inside, 0)[:, None]
        else:
            scale = tl.load(scales + row * (columns // group) + column // group, mask, 0)
            scale = tl.reshape(scale, (SERVED * ROWS, COLUMNS))
        values *= scale.to(tl.float32) / 127 if FORM == INT8 else scale.to(tl.float32)
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
    FORM: tl.constexpr, DECODE: tl.constexpr, SERVED: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    TRANSPOSED: tl.constexpr, PLACED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
    levels = _data(tl.load(own + 8), BF16 if (FORM >= TRELLIS1) & (FORM < ADDED) else F32)
    source, target = x + pair[:, None] * x_length, y + pair[:, None] * y_length
    total = tl.zeros((TOKENS, SERVED * ROWS, COLUMNS), tl.float32)
    if TRANSPOSED:
        start = block * COLUMNS
        for first in range(0, rows // SERVED, ROWS):
            tile = _tile(
                data, scales, levels, rows, columns, group, first, start,
                FORM, DECODE, ALIGNED, WHOLE, SERVED, ROWS, COLUMNS,
            )  # fmt: skip
            row, inside = _rows(rows, first, SERVED, ROWS)
            given = tl.load(source + row[None, :], exists[:, None] & inside[None, :], 0)
            total += given[:, :, None] * tl.reshape(tile, (1, SERVED * ROWS, COLUMNS))
        at = start + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (at < columns)[None, :]
        found = tl.sum(total, 1)
    else:
        first = block * ROWS
        for start in range(0, columns, COLUMNS):
            tile = _tile(
                data, scales, levels, rows, columns, group, first, start,
                FORM, DECODE, ALIGNED, WHOLE, SERVED, ROWS, COLUMNS,
            )  # fmt: skip
            column = start + tl.arange(0, COLUMNS)
            given = tl.load(source + column[None, :], exists[:, None] & (column < columns)[None, :], 0)
            total += given[:, None, :] * tl.reshape(tile, (1, SERVED * ROWS, COLUMNS))
        at, inside = _rows(rows, first, SERVED, ROWS)
        if PLACED:
            at = tl.load(tl.load(own + 10).to(tl.pointer_type(tl.int32)) + at, inside, 0)
        mask = exists[:, None] & inside[None, :]
        found = tl.sum(total, 2)
    tl.store(target + at[None, :], tl.load(target + at[None, :], mask, 0) + found, mask)


@triton.jit(do_not_specialize=["pairs", "matrices", "number"])
def sparse_products(
    table, chosen, order, places, x, y, pairs, matrices, x_length, y_length, number,
    SLOT: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr, NUMBERS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products with sparse matrices. Programs: rows, pairs."""
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
    FIRST: tl.constexpr, FIRST_DECODE: tl.constexpr, FIRST_ALIGNED: tl.constexpr, FIRST_WHOLE: tl.constexpr,
    SECOND: tl.constexpr, SECOND_DECODE: tl.constexpr, SECOND_ALIGNED: tl.constexpr, SECOND_WHOLE: tl.constexpr,
    ADDS: tl.constexpr, SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = M, plus a second matrix if there is one, plus what is there if `ADDS`. Programs: tiles."""
    first, start = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    values = _tile(
        data, scales, levels, rows, columns, group, first, start,
        FIRST, FIRST_DECODE, FIRST_ALIGNED, FIRST_WHOLE, SERVED, ROWS, COLUMNS,
    )  # fmt: skip
    if SECOND:
        values += _tile(
            more_data, more_scales, more_levels, rows, columns, more_group, first, start,
            SECOND, SECOND_DECODE, SECOND_ALIGNED, SECOND_WHOLE, SERVED, ROWS, COLUMNS,
        )  # fmt: skip
    row, exists = _rows(rows, first, SERVED, ROWS)
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
