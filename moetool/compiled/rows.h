// Stored matrices written out, rows or parts of them at a time.
#pragma once
#include <vector>
#include "matrices.h"
#include "sparse.h"
#include "trellis_rows.h"

// row += M[r, begin to end], scaled. Where a row is cut, bytes and groups of 16 columns are not.
template <Form F> static void add_row(const Operand m, long r, long begin, long end, float* row) {
#if defined(__AVX512VBMI__)
  if constexpr (in_trellis(F))
    if (has_many(m) && begin % MANY == 0 && end % MANY == 0) return add_row_many<F>(m, r, begin, end, row);
#endif
  const vf levels = looked_up(F) ? load(m.levels) : vf{};
  const long group = coded(F) ? m.group : m.columns, groups = m.columns / group;
  for (long i = begin; i < end;) {
    const long g = i / group, stop = std::min(end, (g + 1) * group);
    const float s = coded(F) ? scale(m, r * groups + g) : 1;
    for (; i < stop; i += W) store(row + i - begin, load(row + i - begin) + decode_row<F>(m, levels, r, i) * s);
  }
}
static void add_row(const Operand& m, long r, long begin, long end, float* row, float* spare) {
  if (m.form == SPARSE) {
    each_value(m, r, begin, end, [&](long column, float value) { row[column - begin] += value; });
    return;
  }
  if (!aligned(m)) {
    unpack(m, r, begin, end - begin, spare);
    for (long i = 0; i < end - begin; i++) row[i] += spare[i];
    return;
  }
#define EACH(F) case F: return add_row<F>(m, r, begin, end, row);
  switch (m.form) { FORMS(EACH) }
#undef EACH
}
// `row` has room for whole vectors.
static void round_row(const float* row, long columns, int64_t form, uint8_t* out) {
  if (form == F32) { memcpy(out, row, 4 * columns); return; }
  for (long i = 0; i < columns; i += W) {
    uint16_t last[W];
    uint16_t* p = i + W <= columns ? (uint16_t*)out + i : last;
    form == BF16 ? store_bf16(p, load(row + i)) : store_f16(p, load(row + i));
    if (p == last) memcpy((uint16_t*)out + i, last, 2 * (columns - i));
  }
}

// What is asked for most often, in one go: codes, and a base in bf16 or codes if there is one, into bf16. Eight rows,
// which are an eighth of the matrix apart, share the bytes that serve them.
static bool has_octets(const Operand* matrices, long count) {
  if (count > 2) return false;
  for (long i = 0; i < count; i++) {
    const Operand& m = matrices[i];
    if (!aligned(m) || m.rows % 8 || (i == 0 && (!bits((Form)m.form) || in_trellis((Form)m.form)))) return false;
    if (i && !(m.form == BF16 || (m.form >= CODES2 && m.form <= CODES8))) return false;
  }
  return true;
}
// What `get`, `decode` or `codes`, makes of the rows q, q + rows / 8, ….
template <Form F, class V, class Get> static inline void octet(const Operand& m, long q, V* out, Get get) {
  constexpr int P = served(F), C = 8 / P;
#pragma GCC unroll 8
  for (int i = 0; i < C; i++) {
    V w[P];
    get(F == CODES1 || F == CODES3 ? 2 * q + i : q + i * (m.rows / 8), w);
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) out[F == CODES1 ? 4 * i + j : F == CODES5 ? 2 * i + j % 2 + j / 2 * 4 : C * j + i] = w[j];
  }
}
template <Form F> static inline void octet_scales(const Operand& m, long q, long column, float* out) {
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    const long row = q + j * (m.rows / 8);
    out[j] = coded(F) ? scale(m, (row * m.columns + column) / m.group) : 1;
  }
}
// out[j · apart …] = the columns `begin` to `end` of the j-th of these rows. The operands are copies: nothing that is
// written can be part of them, so that what is the same for all of a row is computed once.
template <Form F, Form BASE>
static void octets(const Operand m, const Operand base, long q, long begin, long end, uint16_t* out, long apart) {
  const vf levels = looked_up(F) ? load(m.levels) : vf{}, base_levels = looked_up(BASE) ? load(base.levels) : vf{};
  for (long i = begin; i < end;) {
    long stop = std::min(end, (i / m.group + 1) * m.group);
    if (coded(BASE)) stop = std::min(stop, (i / base.group + 1) * base.group);
    float s[8], t[8];
    octet_scales<F>(m, q, i, s);
    if (BASE) octet_scales<BASE>(base, q, i, t);
    for (; i < stop; i += W) {
      vf w[8], b[8];
      octet<F>(m, q, w, [&](long call, vf* to) { decode<F>(m, levels, call, i, to); });
      if (BASE) octet<BASE>(base, q, b, [&](long call, vf* to) { decode<BASE>(base, base_levels, call, i, to); });
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        w[j] *= s[j];
        if (BASE) w[j] += coded(BASE) ? b[j] * t[j] : b[j];
        store_bf16(out + j * apart + i - begin, w[j]);
      }
    }
  }
}
#if defined(__AVX512BW__)
// Short codes find what they stand for, scaled, added and rounded, in a table of their row and group.
template <Form F, Form BASE>
static void tabled_octets(const Operand m, const Operand base, long q, long begin, long end, uint16_t* out, long apart) {
  constexpr int BITS = bits(F) + bits(BASE), PIECES = BITS <= 4 ? 1 : 1 << (BITS - 4), TABLES = (PIECES + 1) / 2;
  const vf levels = load(m.levels);
  vf base_levels[PIECES] = {};
  for (int p = 0; BASE && p < PIECES; p++)
    for (int i = 0; i < W; i++) base_levels[p][i] = base.levels[(16 * p + i) >> bits(F)];
  for (long i = begin; i < end;) {
    long stop = std::min(end, (i / m.group + 1) * m.group);
    if (BASE) stop = std::min(stop, (i / base.group + 1) * base.group);
    float s[8], t[8];
    octet_scales<F>(m, q, i, s);
    if (BASE) octet_scales<BASE>(base, q, i, t);
    vh tables[8][TABLES];
    for (int j = 0; j < 8; j++)
      for (int p = 0; p < 2 * TABLES; p++) {
        vf w = levels * s[j];
        if (BASE) w += base_levels[p % PIECES] * t[j];
        store_bf16((uint16_t*)tables[j] + 16 * p, w);
      }
    for (; i < stop; i += 2 * W) {
      vh code[8], over[8];
      octet<F>(m, q, code, [&](long call, vh* to) { codes<F>(m, call, i, to); });
      if (BASE) octet<BASE>(base, q, over, [&](long call, vh* to) { codes<BASE>(base, call, i, to); });
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        __m512i at = (__m512i)(BASE ? (code[j] & (int16_t)((1 << bits(F)) - 1)) | (over[j] << (int16_t)bits(F)) : code[j]);
        const __m512i *table = (const __m512i*)tables[j];
        at = TABLES == 1 ? _mm512_permutexvar_epi16(at, table[0]) : _mm512_permutex2var_epi16(table[0], at, table[TABLES - 1]);
        _mm512_storeu_si512(out + j * apart + i - begin, at);
      }
    }
  }
}
#endif
template <Form F, Form BASE>
static void best_octets(const Operand& m, const Operand& base, long q, long begin, long end, uint16_t* out, long apart) {
#if defined(__AVX512BW__)
  constexpr bool is_short = F != NF4 && looked_up(F) && (!BASE || looked_up(BASE)) && bits(F) + bits(BASE) <= 6;
  if constexpr (is_short)
    if (m.group % (2 * W) == 0 && (!BASE || base.group % (2 * W) == 0))
      return tabled_octets<F, BASE>(m, base, q, begin, end, out, apart);
#endif
  octets<F, BASE>(m, base, q, begin, end, out, apart);
}
template <Form F>
static void octets(const Operand& m, const Operand& base, long q, long begin, long end, uint16_t* out, long apart) {
  switch (base.form) {
    case NONE: return best_octets<F, NONE>(m, base, q, begin, end, out, apart);
    case BF16: return best_octets<F, BF16>(m, base, q, begin, end, out, apart);
    case CODES2: return best_octets<F, CODES2>(m, base, q, begin, end, out, apart);
    case CODES3: return best_octets<F, CODES3>(m, base, q, begin, end, out, apart);
    case CODES4: return best_octets<F, CODES4>(m, base, q, begin, end, out, apart);
    case CODES5: return best_octets<F, CODES5>(m, base, q, begin, end, out, apart);
    case CODES6: return best_octets<F, CODES6>(m, base, q, begin, end, out, apart);
    case CODES8: return best_octets<F, CODES8>(m, base, q, begin, end, out, apart);
  }
}
static void octets(const Operand* matrices, long count, long q, long begin, long end, uint16_t* out, long apart) {
  const Operand &m = matrices[0], base = count == 2 ? matrices[1] : Operand{};
  switch (m.form) {
    case CODES1: return octets<CODES1>(m, base, q, begin, end, out, apart);
    case CODES2: return octets<CODES2>(m, base, q, begin, end, out, apart);
    case CODES3: return octets<CODES3>(m, base, q, begin, end, out, apart);
    case CODES4: return octets<CODES4>(m, base, q, begin, end, out, apart);
    case CODES5: return octets<CODES5>(m, base, q, begin, end, out, apart);
    case CODES6: return octets<CODES6>(m, base, q, begin, end, out, apart);
    case CODES8: return octets<CODES8>(m, base, q, begin, end, out, apart);
    case NF4: return octets<NF4>(m, base, q, begin, end, out, apart);
  }
}
