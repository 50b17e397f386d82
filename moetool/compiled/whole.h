// Products of codes with inputs in whole numbers: sums of int32 over blocks of columns, scaled in fp32.
//
// An input is cut into blocks, within the groups that share a scale in the matrix, and is scale · a word in each. Levels
// that are looked up are words of 15 bits, beside inputs of 14 bits: what both lose is a hundredth of what a byte of each
// would. Codes of 5, 6 and 8 bits are whole numbers themselves, and lose less: inputs have 16 bits beside them. A block's
// sum of products is less than 2³¹ either way. The words of an input lie in the order in which levels come of the codes
// in bytes (`in_order`).
#pragma once
#include <cmath>
#include "lanes.h"
#include "matrices.h"

constexpr long FINEST = 32, BLOCKS = 4;  // columns of a block: these, or up to four times as many
constexpr float INPUTS = 8191, LEVELS = 16383;  // the largest words; times 16 that an int32 adds up, below 2³¹
constexpr float FINE_INPUTS = 32767;     // beside codes that are whole numbers, of 8 bits
// In what words, and blocks, a matrix wants its inputs: BLOCKS kinds, and as many with fine words.
constexpr int KINDS = 2 * BLOCKS;
static inline long block_of(int kind) { return FINEST * (kind % BLOCKS + 1); }
struct Whole {                           // an input
  const int16_t* words;
  const float* scales;                   // of each block
  bool finite;                           // if not, none of this is to be used
};
static inline long whole_bytes(long columns) { return (2 * columns + 4 * (columns / FINEST) + 63) / 64 * 64; }

// The kind that a matrix wants; -1 where its products are those of fp32.
static int kind_of(const Operand& m) {
  if (m.form < CODES1 || m.form > CODES8 || m.transposed || !aligned(m) || m.group % FINEST) return -1;
  for (const int times : {4, 2, 3})  // of two vectors rather than of three
    if (m.group % (times * FINEST) == 0) return (m.form > CODES4) * BLOCKS + times - 1;
  return (m.form > CODES4) * BLOCKS;
}
// `memory` has room for whole_bytes(columns), from a multiple of 64 on.
static Whole in_whole_numbers(const float* x, long columns, int kind, uint8_t* memory) {
  const long block = block_of(kind), blocks = columns / block, step = block % Wide::COLUMNS ? Narrow::COLUMNS : Wide::COLUMNS;
  const float highest = kind < BLOCKS ? INPUTS : FINE_INPUTS;
  int16_t* words = (int16_t*)memory;
  float* scales = (float*)(words + columns);
  for (long b = 0; b < blocks; b++) {
    vi most = {};
    for (long i = b * block; i < (b + 1) * block; i += W) {
      const vi magnitude = (vi)load(x + i) & 0x7fffffff;  // ordered as the numbers are; the largest are not finite
      most = choose(magnitude > most, magnitude, most);
    }
    int32_t largest = 0;
    for (int i = 0; i < W; i++) largest = std::max(largest, most[i]);
    if (largest >= 0x7f800000) return {words, scales, false};
    float top;
    memcpy(&top, &largest, 4);
    scales[b] = top > 1e-30f ? top / highest : 0;
    const float inverse = scales[b] ? 1 / scales[b] : 0;
    for (long i = b * block; i < (b + 1) * block; i += W) {
      const vi rounded = (vi)(load(x + i) * inverse + 12582912.f);  // 1.5 · 2²³: whole numbers are in its lower bits
      in_order((rounded << 16) >> 16, i, step, words);
    }
  }
  return {words, scales, true};
}

struct Levels {  // level = unit · word; without a table codes are words themselves
  int16_t words[16] = {};
  float unit = 1;
  explicit Levels(const float* levels) {
    if (!levels) return;
    float top = 0;
    for (int i = 0; i < 16; i++) top = std::max(top, std::fabs(levels[i]));
    unit = top / LEVELS;
    for (int i = 0; i < 16; i++) words[i] = (int16_t)std::lround(levels[i] / unit);
  }
};
// A form always has the same levels.
template <Form F> static const Levels& levels_of(const Operand& m) {
  static const Levels found(is_whole(F) ? nullptr : m.levels);
  return found;
}

// Rows that are computed together: those that a byte serves, in the plane where these are most.
constexpr int together(Form f) { return 8 / (bits(f) & -bits(f)); }
template <Form F> static inline long own_row(const Operand& m, long q, int j) { return q + j * (m.rows / together(F)); }

// The codes of V::COLUMNS columns of these rows, in bytes. Of up to 4 bits those of neighbours are above them.
template <class V, Form F> static inline void read(const Operand& m, long q, long column, typename V::Words* out) {
  const uint8_t* own = m.data + q * m.columns + column;
  const auto codes = V::load(own);
  if constexpr (F == CODES5 || F == CODES6) {
    constexpr int T = together(F);  // half of them are in the upper halves of the lines of the lower four bits
    const auto above = V::load(own + m.rows / 2 * m.columns);
    constexpr uint16_t mask = F == CODES5 ? 0x1010 : 0x3030;
#pragma GCC unroll 4
    for (int j = 0; j < T / 2; j++) {
      const auto low = V::load(own + j * (m.rows / T) * m.columns);
      out[j] = (low & 0x0f0f) | ((above << (4 - j * ABOVE<F>)) & mask);
      out[T / 2 + j] = ((low >> 4) & 0x0f0f) | ((above >> (j * ABOVE<F>)) & mask);
    }
  } else if constexpr (F == CODES3) {
    const long eighth = m.rows / 8;
    const auto third = V::load(m.data + (2 * eighth + q) * m.columns + column);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      const auto two = odd ? V::load(own + eighth * m.columns) : codes, one = third << (2 - odd);
      // Third bits go where the neighbours' lower ones were.
      const auto even = (two & 0x3333) | (one & 0xcccc), other = (two & 0xcccc) | (one & 0x3333);
      out[odd] = even, out[2 + odd] = other >> 2, out[4 + odd] = even >> 4;
      out[6 + odd] = (other >> 6) | ((third >> (4 + odd)) & 0x0400);
    }
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < together(F); j++) out[j] = codes >> (j * bits(F));
  }
}
// Several rows read beside each other are several places in memory, from which single ones come faster one after the other:
// so the next rows are asked for in their order.
static inline void prefetch(const uint8_t* p) {
#if defined(__x86_64__)
  _mm_prefetch((const char*)p, _MM_HINT_T0);
#endif
}
// Bytes, one below the other, whose rows are computed together, as many sums as there are registers for: an input is then
// loaded once for up to 8 rows. It pays where rows are longer than what a core has near, or short and levels are looked up;
// others come faster one after the other.
constexpr long SHORT = 1024, NEAR = 8192;  // columns
template <Form F> static inline bool stacks(const Operand& m) {
  return m.columns > NEAR || (m.columns <= SHORT && !is_whole(F));
}
template <class V, Form F, int N> constexpr int stacked() {
#if defined(__AVX512VL__)
  return std::max(1, (is_whole(F) ? 4 : 8) / (together(F) * N));
#else
  return 1;
#endif
}
// y[row] += M[row] · x for the rows that belong to B bytes from q on and N tokens, which share what is looked up. Their
// numbers are those of each alone.
template <class V, Form F, int N, int B>
static inline void whole_dot(const Operand m, const typename V::Table& table, float unit, long q, const Whole* const* x,
                             long block, float* const* y) {
  constexpr int T = together(F), P = T * B;
  const long groups = m.columns / m.group, each = m.group / block;
  typename V::Sums sums[N][P] = {};
  const int16_t* words[N];
  const float* steps[N];
  for (int n = 0; n < N; n++) words[n] = x[n]->words, steps[n] = x[n]->scales;
  for (long g = 0, b = 0; g < groups; g++) {
    float s[P];
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) s[j] = unit * scale(m, own_row<F>(m, q + j / T, j % T) * groups + g);
    for (const long stop = b + each; b < stop; b++) {
      typename V::Ints part[N][P] = {};
      for (long i = b * block; i < (b + 1) * block; i += V::COLUMNS) {
        typename V::Words inputs[N][2], codes[P];
        for (int n = 0; n < N; n++)
          for (int side = 0; side < 2; side++) inputs[n][side] = V::load(words[n] + i + side * (V::COLUMNS / 2));
        for (int k = 0; k < B; k++) read<V, F>(m, q + k, i, codes + k * T);
        for (int k = 0; B > 1 && k < B; k++) prefetch(m.data + (q + B) * m.columns + i * B + k * V::COLUMNS);
#pragma GCC unroll 8
        for (int j = 0; j < P; j++) {
          typename V::Words levels[2];
          if constexpr (is_whole(F))
            for (int side = 0; side < 2; side++) levels[side] = V::word(codes[j], side) + (uint16_t)lowest(F);
          else
            V::levels(table, codes[j], levels);
          for (int n = 0; n < N; n++)
            for (int side = 0; side < 2; side++) part[n][j] = V::add(part[n][j], levels[side], inputs[n][side]);
        }
      }
      for (int n = 0; n < N; n++)
        for (int j = 0; j < P; j++)
          sums[n][j] += __builtin_convertvector(part[n][j], typename V::Sums) * (s[j] * steps[n][b]);
    }
  }
  for (int n = 0; n < N; n++)
    for (int j = 0; j < P; j++) y[n][place(m, own_row<F>(m, q + j / T, j % T))] += V::total(sums[n][j]);
}
template <class V, Form F, int N>
static inline void whole_dots(const Operand& m, const typename V::Table& table, float unit, long begin, long end,
                              const Whole* const* x, long block, float* const* y) {
  constexpr int B = stacked<V, F, N>();
  long q = begin;
  for (; stacks<F>(m) && q + B <= end; q += B) whole_dot<V, F, N, B>(m, table, unit, q, x, block, y);
  for (; q < end; q++) whole_dot<V, F, N, 1>(m, table, unit, q, x, block, y);
}
template <class V, Form F>
static void whole_dots(const Operand& m, long begin, long end, long block, int tokens, const Whole* const* x, float* const* y) {
  const Levels& levels = levels_of<F>(m);
  const typename V::Table table = V::table(levels.words);
  constexpr int calls = together(F) / served(F);  // pieces are cut in those of `decode`
  int n = 0;
  begin /= calls, end /= calls;
  for (; n + 4 <= tokens; n += 4) whole_dots<V, F, 4>(m, table, levels.unit, begin, end, x + n, block, y + n);
  for (; n + 2 <= tokens; n += 2) whole_dots<V, F, 2>(m, table, levels.unit, begin, end, x + n, block, y + n);
  for (; n < tokens; n++) whole_dots<V, F, 1>(m, table, levels.unit, begin, end, x + n, block, y + n);
}
static void whole_dots(const Operand& m, long begin, long end, int tokens, const Whole* const* x, float* const* y) {
  const long block = block_of(kind_of(m));
#define EACH(F) \
  case F: return block % Wide::COLUMNS ? whole_dots<Narrow, F>(m, begin, end, block, tokens, x, y) \
                                       : whole_dots<Wide, F>(m, begin, end, block, tokens, x, y);
  switch (m.form) { EACH(CODES1) EACH(CODES2) EACH(CODES3) EACH(CODES4) EACH(CODES5) EACH(CODES6) EACH(CODES8) }
#undef EACH
}
