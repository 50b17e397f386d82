// Sparse matrices: their values row by row, and where these belong. Either the positions [count] int32 of all of them in
// the flattened matrix, or of every row a line of int64, where its values begin and then a bit per column, 64 in a word
// (m.group is the columns of a word then, and 1 else). Bits take less room from one value in 32 on, and less time from
// one in 20 on (one in 10 without AVX-512).
#pragma once
#include <vector>
#include "matrices.h"

static inline long words(const Operand& m) { return (m.columns + m.group - 1) / m.group; }
static inline const int64_t* line(const Operand& m, long row) { return (const int64_t*)m.scales + row * (words(m) + 1); }

// use(column, value) for the values of a row from column `begin` to `end`, in their order.
template <class Use> static inline void each_value(const Operand& m, long row, long begin, long end, Use use) {
  if (m.group > 1) {
    const int64_t* own = line(m, row);
    long index = own[0];
    for (long w = 0; w * m.group < end; w++) {
      if ((w + 1) * m.group <= begin) {
        index += __builtin_popcountll(own[1 + w]);
        continue;
      }
      for (uint64_t left = own[1 + w]; left; left &= left - 1, index++) {
        const long column = w * m.group + __builtin_ctzll(left);
        if (column >= begin && column < end) use(column, number(m.data, m.numbers, index));
      }
    }
    return;
  }
  const int32_t *at = (const int32_t*)m.scales, *stop = at + m.count;
  const long first = row * m.columns;
  for (const int32_t* p = std::lower_bound(at, stop, first + begin); p < stop && *p < first + end; p++)
    use(*p - first, number(m.data, m.numbers, p - at));
}
#if defined(__AVX512BW__) && defined(__AVX512VL__)
// Of a row in bits and bf16, sums of the products of its values with 1 to 4 inputs: 16 columns at a time, the values of
// which are spread to where they belong.
template <int N> static inline void spread_dots(const Operand& m, long row, const float* const* x, float* sums) {
  const int64_t* own = line(m, row);
  const uint16_t* values = (const uint16_t*)m.data + own[0];
  __m512 parts[N][4];
  for (int n = 0; n < N; n++)
    for (int j = 0; j < 4; j++) parts[n][j] = _mm512_setzero_ps();
  for (long w = 0; w < words(m); w++)
    for (int j = 0; j < 4; j++) {
      const __mmask16 here = (uint64_t)own[1 + w] >> (16 * j);
      const int count = __builtin_popcount(here);
      const __m256i packed = _mm256_maskz_loadu_epi16((1u << count) - 1, values);
      const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
      const __m512 spread = _mm512_castsi512_ps(_mm512_maskz_expand_epi32(here, wide));
      for (int n = 0; n < N; n++)
        parts[n][j] = _mm512_fmadd_ps(spread, _mm512_maskz_loadu_ps(here, x[n] + 64 * w + 16 * j), parts[n][j]);
      values += count;
    }
  for (int n = 0; n < N; n++)
    sums[n] = total((vf)_mm512_add_ps(_mm512_add_ps(parts[n][0], parts[n][1]), _mm512_add_ps(parts[n][2], parts[n][3])));
}
static inline bool spread_dots(const Operand& m, long row, const float* const* x, int tokens, float* sums) {
  if (m.group != 64 || m.numbers != BF16) return false;
  switch (tokens) {
    case 1: spread_dots<1>(m, row, x, sums); return true;
    case 2: spread_dots<2>(m, row, x, sums); return true;
    case 3: spread_dots<3>(m, row, x, sums); return true;
    default: spread_dots<4>(m, row, x, sums); return true;
  }
}
#else
static inline bool spread_dots(const Operand&, long, const float* const*, int, float*) { return false; }
#endif
