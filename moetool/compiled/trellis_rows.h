// Matrices in a trellis, 64 columns at a time: windows are bytes, and so are the halves of what they stand for.
#pragma once
#include "matrices.h"

constexpr long MANY = 64;
#if defined(__AVX512VBMI__)
// The bytes of bf16 numbers by window: all high ones, all low ones.
struct Halves { __m512i high[4], low[4]; };

// Of the levels that a thread had last they are kept.
static const Halves& halves_of(const float* levels) {
  static thread_local Halves found;
  static thread_local const float* made_of = nullptr;
  if (made_of == levels) return found;
  made_of = levels;
  for (int i = 0; i < 256; i += 16) {
    const __m512i all = _mm512_loadu_si512(levels + i);
    _mm_storeu_si128((__m128i*)found.high + i / 16, _mm512_cvtepi32_epi8(_mm512_srli_epi32(all, 24)));
    _mm_storeu_si128((__m128i*)found.low + i / 16, _mm512_cvtepi32_epi8(_mm512_srli_epi32(all, 16)));
  }
  return found;
}
static inline __m512i looked_up(const __m512i* table, __m512i at) {
  const __m512i low = _mm512_permutex2var_epi8(table[0], at, table[1]);
  const __m512i high = _mm512_permutex2var_epi8(table[2], at, table[3]);
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
}
static inline __m512i right(__m512i v, int by) {
  return _mm512_and_si512(_mm512_srli_epi16(v, by), _mm512_set1_epi8((char)(255 >> by)));
}
static inline __m512i left(__m512i v, int by) {
  return _mm512_and_si512(_mm512_slli_epi16(v, by), _mm512_set1_epi8((char)(255 << by)));
}
// The lowest two bits of a code of three, and all, of the row that is `eighths` of all rows down from row q.
static inline __m512i two_of(const Operand& m, long q, int eighths, long column) {
  const uint8_t* from = m.data + (q + eighths % 2 * (m.rows / 8)) * m.columns + column;
  return _mm512_and_si512(right(_mm512_loadu_si512(from), eighths / 2 * 2), _mm512_set1_epi8(3));
}
static inline __m512i three_of(const Operand& m, long q, int eighths, long column) {
  const __m512i last = right(_mm512_loadu_si512(m.data + (m.rows / 4 + q) * m.columns + column), eighths);
  return _mm512_or_si512(two_of(m, q, eighths, column), left(_mm512_and_si512(last, _mm512_set1_epi8(1)), 2));
}
template <Form F> static inline __m512i windows_of(const Operand& m, long q, int j, long column) {
  if (F == TRELLIS3) {
    __m512i found = left(three_of(m, q, j, column), 5);
    if (j >= 1 || q) found = _mm512_or_si512(found, left(three_of(m, q - (j < 1), (j + 7) % 8, column), 2));
    if (j >= 2 || q) found = _mm512_or_si512(found, two_of(m, q - (j < 2), (j + 6) % 8, column));
    return found;
  }
  const uint8_t* own = m.data + q * m.columns + column;
  const int by = bits(F) * (j + 1);
  const __m512i found = left(_mm512_loadu_si512(own), 8 - by);
  return q && by < 8 ? _mm512_or_si512(found, right(_mm512_loadu_si512(own - m.columns), by)) : found;
}
static inline vf widened(__m256i halves) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }
// MANY columns of row j · stripe + q, unscaled.
template <Form F> static inline void decode_many(const Operand& m, const Halves& table, long q, int j, long column, vf* out) {
  const __m512i apart = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // what comes together in the end
  const __m512i at = _mm512_permutexvar_epi64(apart, windows_of<F>(m, q, j, column));
  const __m512i high = looked_up(table.high, at), low = looked_up(table.low, at);
  const __m512i first = _mm512_unpacklo_epi8(low, high), last = _mm512_unpackhi_epi8(low, high);
  out[0] = widened(_mm512_castsi512_si256(first));
  out[1] = widened(_mm512_extracti64x4_epi64(first, 1));
  out[2] = widened(_mm512_castsi512_si256(last));
  out[3] = widened(_mm512_extracti64x4_epi64(last, 1));
}
static inline bool has_many(const Operand& m) {
  return in_trellis((Form)m.form) && m.columns % MANY == 0 && m.group % W == 0;
}
// The scales of four vectors of a row from a column on, which may lie in several groups.
static inline void scales_of(const Operand& m, long row, long column, float* out) {
  const long first = row * (m.columns / m.group);
  for (int k = 0; k < 4; k++) out[k] = scale(m, first + (column + k * W) / m.group);
}

// row += M[r, begin to end], scaled.
template <Form F> static void add_row_many(const Operand m, long r, long begin, long end, float* row) {
  constexpr int P = bits(F) % 2 ? 8 : 8 / bits(F);
  const long stripe = m.rows / P;
  const Halves& table = halves_of(m.levels);
  for (long i = begin; i < end; i += MANY) {
    float s[4];
    scales_of(m, r, i, s);
    vf w[4];
    switch (r / stripe) {  // so that shifts are known when it is compiled
      case 0: decode_many<F>(m, table, r % stripe, 0, i, w); break;
      case 1: decode_many<F>(m, table, r % stripe, 1, i, w); break;
      case 2: decode_many<F>(m, table, r % stripe, 2 % P, i, w); break;
      case 3: decode_many<F>(m, table, r % stripe, 3 % P, i, w); break;
      case 4: decode_many<F>(m, table, r % stripe, 4 % P, i, w); break;
      case 5: decode_many<F>(m, table, r % stripe, 5 % P, i, w); break;
      case 6: decode_many<F>(m, table, r % stripe, 6 % P, i, w); break;
      default: decode_many<F>(m, table, r % stripe, 7 % P, i, w);
    }
    for (int k = 0; k < 4; k++) store(row + i - begin + k * W, load(row + i - begin + k * W) + w[k] * s[k]);
  }
}
#else
static inline bool has_many(const Operand&) { return false; }
#endif
