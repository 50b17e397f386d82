// Stored matrices, and what is read of them: vectors of 16 columns where bytes serve whole rows, any piece of a row else.
//
// Codes lie in planes (moetool/numerics/packing.py): byte i of a plane holds the codes i, i + L, i + 2 L, … of the
// flattened matrix, L being the bytes of the plane. Where the rows can be cut into as many equal stripes as a byte holds
// codes, one byte serves that many rows in the same column, so that they share its load and the load of x.
//
// In a trellis (moetool/numerics/trellis.py) a column is one path, through all rows of a byte and then of the next byte
// down: a number is looked up by a window of bits that reaches back into the byte above.
#pragma once
#include <algorithm>
#include <type_traits>
#include "vectors.h"

// As moetool/kernels/operands.py numbers them.
enum Form : int64_t { NONE, F32, BF16, F16, CODES1, CODES2, CODES3, CODES4, CODES5, CODES6, CODES8, NF4, INT8, SPARSE, TRELLIS1, TRELLIS2, TRELLIS3, TRELLIS4, ADDED };

// From ADDED on come the forms that are one header each (forms/__init__.py), by the template `Added<number from there>`.
struct Operand {            // one stored matrix [rows, columns]
  int64_t form, rows, columns, group, transposed;  // transposed: y = x M instead of y = x Mᵀ
  const uint8_t* data;      // numbers or codes; of a sparse matrix its values
  const uint8_t* scales;    // [rows, columns / group]; of a sparse matrix the positions [count] int32, ascending
  int64_t numbers;          // the form of scales, or of the values of a sparse matrix
  const float* levels;      // what codes stand for: 16 of them, repeated where there are fewer, or one for every window
  int64_t count;            // values of a sparse matrix
  const int32_t* places;    // [rows] where in y the outputs of its rows belong, null if in their order; not if transposed
};
constexpr int TERMS = 3;
struct Term { Operand first, last; };    // y += last · (first · x), or first alone
struct Expert { Term terms[TERMS]; };

static inline long place(const Operand& m, long row) { return m.places ? m.places[row] : row; }

static inline float number(const uint8_t* p, int64_t form, long i) {
  if (form == F32) { float v; memcpy(&v, p + 4 * i, 4); return v; }
  uint16_t h; memcpy(&h, p + 2 * i, 2);
  if (form == BF16) { uint32_t u = (uint32_t)h << 16; float v; memcpy(&v, &u, 4); return v; }
  return half(h);
}
static inline float scale(const Operand& m, long index) {
  const float s = number(m.scales, m.numbers, index);
  return m.form == INT8 ? s / 127 : s;
}
template <int N> struct Added;
#include "added_forms.h"
#define FORMS(each) \
  each(F32) each(BF16) each(F16) each(CODES1) each(CODES2) each(CODES3) each(CODES4) each(CODES5) each(CODES6) each(CODES8) \
  each(NF4) each(INT8) each(TRELLIS1) each(TRELLIS2) each(TRELLIS3) each(TRELLIS4) ADDED_FORMS(each)
static float added_number(const Operand& m, long row, long column) {
#define EACH(F) case F: return Added<F - ADDED>::number(m, row, column);
  switch (m.form) { ADDED_FORMS(EACH) }
#undef EACH
  return 0;
}
constexpr bool in_trellis(Form f) { return f >= TRELLIS1 && f < ADDED; }
constexpr int bits(Form f) {
  return in_trellis(f) ? f - TRELLIS1 + 1 : f >= CODES1 && f <= CODES6 ? f - CODES1 + 1 : f == NF4 ? 4 : f == CODES8 ? 8 : 0;
}
// Codes that are whole numbers, of which the lowest is coded as 0.
constexpr bool is_whole(Form f) { return bits(f) > 4; }
constexpr int lowest(Form f) { return 1 - (1 << (bits(f) - 1)); }
constexpr bool coded(Form f) { return bits(f) || f == INT8 || f >= ADDED; }
constexpr bool looked_up(Form f) { return bits(f) && !is_whole(f) && !in_trellis(f); }
// Rows that one byte serves in what `decode` makes of it, and bytes that are decoded beside each other: four rows.
constexpr int served(Form f) { return bits(f) == 4 && f != NF4 ? 2 : bits(f) && bits(f) < 8 && f != NF4 ? 4 : 1; }

static bool aligned(const Operand& m) {
  if (m.form == SPARSE || m.columns % W) return false;
  if (m.form >= CODES1 && (m.group % W || m.columns % m.group)) return false;  // those of NF4 may go over a row's end
  const int own = m.form == NF4 ? 0 : bits((Form)m.form);
  return !own || m.rows % (8 / (own & -own)) == 0;  // the narrowest plane has as many bits as the lowest bit of `own`
}
// Codes of 5 and 6 bits: a plane of the lower four, in which two lines have the rows that a call decodes, and one of the
// bits above these, a line of which has bits of these and, of 5 bits, of the rows that a call decodes `part` further down.
template <Form F> constexpr int ABOVE = bits(F) - 4;
template <Form F> static inline long part(const Operand& m) { return m.rows * ABOVE<F> / 8; }
template <Form F> static inline bool is_second(const Operand& m, long q) { return F == CODES5 && q >= part<F>(m); }
// What the lower four bits of such a code stand for, and what is added for those above, whatever bits lie beside them.
template <Form F> struct Summands {
  float lower[W], upper[W];
  constexpr Summands() : lower(), upper() {
    for (int i = 0; i < W; i++) lower[i] = i + lowest(F), upper[i] = 16 * (i % (1 << ABOVE<F>));
  }
};
// The number whose lower four bits are the lowest in `low`, and the others the lowest in `high`.
template <Form F> static inline vf joined(vi low, vi high) {
  static constexpr Summands<F> of{};
  return lookup(load(of.lower), low) + lookup(load(of.upper), high);
}
// How many times `decode` is called for all rows, and which row its j-th vector belongs to.
template <Form F> static inline long calls(const Operand& m) { return m.rows / served(F); }
template <Form F> static inline long row_of(const Operand& m, long q, int j) {
  if (bits(F) == 1) return q / 2 + (4 * (q % 2) + j) * (m.rows / 8);
  if (bits(F) == 3) return q / 2 + (2 * j + q % 2) * (m.rows / 8);
  if (F == CODES5) return q + (is_second<F>(m, q) + j % 2) * part<F>(m) + j / 2 * (m.rows / 2);
  return q + j * (m.rows / served(F));
}
// The codes of a vector's columns from `column` on of the rows row_of(q, 0…); above them are those of neighbours.
template <Form F, class V> static inline void codes(const Operand& m, long q, long column, V* out) {
  using Number = std::decay_t<decltype(out[0][0])>;
  const long n = m.columns;
  V code;
  bytes(m.data + (F == CODES1 ? q / 2 : F == CODES3 ? q / 2 + (q % 2) * (m.rows / 8) : q) * n + column, code);
  if (F == CODES3) {
    V one;
    bytes(m.data + (m.rows / 4 + q / 2) * n + column, one);
    one = one << (Number)(2 - q % 2);
    // Third bits go where the neighbours' lower ones were; what is above them does not matter.
    const V even = (code & 0x33) | (one & ~0x33), odd = (code & 0xcc) | (one & ~0xcc);
    out[0] = even;
    out[1] = odd >> 2;
    out[2] = even >> 4;
    out[3] = odd >> 6;
    return;
  }
  if (F == CODES1) code = code >> (Number)(4 * (q % 2));
#pragma GCC unroll 8
  for (int j = 0; j < served(F); j++) out[j] = code >> (Number)(j * bits(F));
}
// The three bits of the rows that are `eighths` of all of them down from row q, from 16 columns on.
static inline vi triple(const Operand& m, long q, int eighths, long column) {
  const long n = m.columns, eighth = m.rows / 8;
  const vi two = bytes(m.data + (q + eighths % 2 * eighth) * n + column) >> (eighths / 2 * 2);
  return (two & 3) | ((bytes(m.data + (2 * eighth + q) * n + column) >> eighths & 1) << 2);
}
// The windows of row `stripe` · j + q, where a byte serves the rows q, q + stripe, …
template <Form F> static inline vi windows(const Operand& m, long q, int j, long column) {
  const long n = m.columns;
  if (F == TRELLIS3) {
    vi found = triple(m, q, j, column) << 5;
    if (j >= 1 || q) found |= triple(m, q - (j < 1), (j + 7) % 8, column) << 2;
    if (j >= 2 || q) found |= triple(m, q - (j < 2), (j + 6) % 8, column) & 3;
    return found;
  }
  const uint8_t* own = m.data + q * n + column;
  vi both = bytes(own) << 8;
  if (q) both |= bytes(own - n);
  return (both >> (bits(F) * (j + 1))) & 255;
}
// 16 columns from `column` on of the rows row_of(q, 0…), unscaled.
template <Form F> static inline void decode(const Operand& m, vf levels, long q, long column, vf* out) {
  const long n = m.columns;
  if constexpr (F >= ADDED) { out[0] = Added<F - ADDED>::decode(m, q, column); return; }
  if (F == F32) { out[0] = load((const float*)m.data + q * n + column); return; }
  if (F == BF16) { out[0] = (vf)((vu)shorts((const uint16_t*)m.data + q * n + column) << 16); return; }
  if (F == F16) { out[0] = halves((const uint16_t*)m.data + q * n + column); return; }
  if constexpr (F == CODES5 || F == CODES6) {
    const long second = is_second<F>(m, q), lines = part<F>(m) * n;
    const uint8_t* own = m.data + q * n + second * lines + column;
    const vi low[2] = {bytes(own), bytes(own + lines)};
    const vi high = bytes(m.data + (m.rows / 2 + q) * n - second * lines + column) >> (int)(2 * second);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) out[j] = joined<F>(low[j % 2] >> (j / 2 * 4), high >> (ABOVE<F> * (j % 2) + 4 * (j / 2)));
    return;
  }
  if (F == CODES8 || F == INT8) {
    vi code = bytes(m.data + q * n + column);
    code = F == INT8 ? ((code ^ 128) - 128) : code + lowest(F);
    out[0] = to_float(code);
    return;
  }
  if (F == NF4) { out[0] = lookup(levels, nibbles(m.data + (q * n + column) / 2)); return; }
  if (in_trellis(F)) {
    constexpr bool is_halved = bits(F) % 2;  // a byte serves more rows than a call
#pragma GCC unroll 8
    for (int j = 0; j < served(F); j++) {
      const int stripe = bits(F) == 1 ? 4 * (q % 2) + j : bits(F) == 3 ? 2 * j + q % 2 : j;
      out[j] = gather(m.levels, windows<F>(m, is_halved ? q / 2 : q, stripe, column));
    }
    return;
  }
  vi code[served(F)];
  codes<F>(m, q, column, code);
#pragma GCC unroll 8
  for (int j = 0; j < served(F); j++) out[j] = lookup(levels, code[j]);
}
// The same of one row.
template <Form F> static inline vf decode_row(const Operand& m, vf levels, long row, long column) {
  if (served(F) == 1) {
    vf out;
    decode<F>(m, levels, row, column, &out);
    return out;
  }
  const long n = m.columns, stripe = bits(F) == 4 ? m.rows / 2 : m.rows / 4, eighth = m.rows / 8;
  if (in_trellis(F)) {
    const long own = bits(F) % 2 ? eighth : stripe;
    return gather(m.levels, windows<F>(m, row % own, (int)(row / own), column));
  }
  if constexpr (F == CODES5 || F == CODES6) {
    const long half = m.rows / 2, lines = part<F>(m);
    const vi low = bytes(m.data + row % half * n + column) >> (int)(row / half * 4);
    return joined<F>(low, bytes(m.data + (half + row % lines) * n + column) >> (int)(row / lines * ABOVE<F>));
  }
  if (F == CODES1) return lookup(levels, bytes(m.data + row % eighth * n + column) >> (int)(row / eighth));
  vi code = bytes(m.data + row % stripe * n + column) >> (int)(row / stripe * (F == CODES3 ? 2 : bits(F)));
  if (F == CODES3)
    code = (code & 3) | ((bytes(m.data + (stripe + row % eighth) * n + column) << 2 >> (int)(row / eighth)) & ~3);
  return lookup(levels, code);
}
// The window of one number, wherever it lies.
static int window(const Operand& m, long row, long column) {
  const int own = bits((Form)m.form), served = own % 2 ? 8 : 8 / own;
  const long stripe = m.rows / served;
  long q = row % stripe;
  int j = (int)(row / stripe), found = 0;
  for (int low = 8 - own; low > -own && q >= 0; low -= own) {
    int code;  // of the oldest one the lower bits
    if (own == 3) {
      const int two = m.data[(q + j % 2 * stripe) * m.columns + column] >> (j / 2 * 2);
      code = (two & 3) | ((m.data[(2 * stripe + q) * m.columns + column] >> j & 1) << 2);
    } else {
      code = m.data[q * m.columns + column] >> (own * j) & ((1 << own) - 1);
    }
    found |= low < 0 ? code & ((1 << (own + low)) - 1) : code << low;
    if (--j < 0) j = served - 1, q--;
  }
  return found;
}
constexpr long TILE = 256;
// Any piece of a row of any form, scaled.
static void unpack(const Operand& m, long row, long column, long length, float* out) {
  const long first = row * m.columns + column, all = m.rows * m.columns;
  if (m.form <= F16) {
    for (long i = 0; i < length; i++) out[i] = number(m.data, m.form, first + i);
    return;
  }
  if (m.form == NF4) {
    for (long i = 0; i < length; i++) {
      const long f = first + i;
      const int code = f % 2 ? m.data[f / 2] & 15 : m.data[f / 2] >> 4;
      out[i] = m.levels[code] * number(m.scales, m.numbers, f / m.group);
    }
    return;
  }
  if (in_trellis((Form)m.form)) {
    for (long i = 0; i < length; i++) out[i] = m.levels[window(m, row, column + i)];
  } else if (m.form >= ADDED) {
    for (long i = 0; i < length; i++) out[i] = added_number(m, row, column + i);
  } else if (m.form == INT8 || m.form == CODES8) {
    for (long i = 0; i < length; i++) out[i] = m.form == INT8 ? (int8_t)m.data[first + i] : m.data[first + i] - 127;
  } else {
    const int own = bits((Form)m.form);
    const vf levels = is_whole((Form)m.form) ? vf{} : load(m.levels);
    int32_t codes[TILE + W];
    for (long start = 0; start < length; start += TILE) {
      const long part = std::min(TILE, length - start);
      const uint8_t* plane = m.data;
      memset(codes, 0, sizeof codes);
      for (int width = 4, low = 0; width; width /= 2) {
        if (!(own & width)) continue;
        const long size = (all * width + 7) / 8, f = first + start;
        long stripe = f / size, at = f % size;
        for (long done = 0; done < part; stripe++, at = 0) {
          const long n = std::min(part - done, size - at);
          const uint8_t* from = plane + at;
          const int shift = (int)(stripe * width), mask = (1 << width) - 1;
          int32_t* to = codes + done;
          long i = 0;
          for (; i + W <= n; i += W) store_int(to + i, load_int(to + i) | ((bytes(from + i) >> shift) & mask) << low);
          for (; i < n; i++) to[i] |= ((from[i] >> shift) & mask) << low;
          done += n;
        }
        plane += size;
        low += width;
      }
      long i = 0;
      for (; is_whole((Form)m.form) && i < part; i++) out[start + i] = codes[i] + lowest((Form)m.form);
      for (; i + W <= part; i += W) store(out + start + i, lookup(levels, load_int(codes + i)));
      for (; i < part; i++) out[start + i] = m.levels[codes[i]];
    }
  }
  for (long i = 0; i < length;) {
    const long end = std::min(length, i + m.group - (column + i) % m.group);
    for (const float s = scale(m, (first + i) / m.group); i < end; i++) out[i] *= s;
  }
}
