// The product of one token with a matrix in bf16 or in codes of 5, 6 or 8 bits, on a CPU: rows are read one after the other,
// as fast as memory gives them.
// Sums are fp32 and come in the same order whatever the number of threads. Where it may, a product with codes is one of
// whole numbers (`whole.h`); for a token that is not finite it is not.
#pragma once
#include <vector>
#include "whole.h"

constexpr long PIECE = 1 << 16;  // numbers of the matrix that are one thread's task
constexpr int SUMS = 4;          // of a row, which do not wait for one another

static inline vf widened(const uint16_t* p) { return (vf)((vu)shorts(p) << 16); }
static inline float dot(const uint16_t* row, const float* x, long columns) {
  vf sums[SUMS] = {};
  long i = 0;
  for (; i + SUMS * W <= columns; i += SUMS * W)
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; s++) sums[s] += widened(row + i + s * W) * load(x + i + s * W);
  for (; i + W <= columns; i += W) sums[0] += widened(row + i) * load(x + i);
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < columns; i++) sum += number((const uint8_t*)row, BF16, i) * x[i];
  return sum;
}
// Rows of a matrix in codes of 5, 6 or 8 bits by x: sums[j] is the row row_of(q, j)'s. A group is a multiple of W.
template <Form F> static inline void dots(const Operand& m, long q, const float* x, float* sums) {
  constexpr int P = served(F), STREAMS = P == 1 ? 2 : 1;
  const long groups = m.columns / m.group;
  vf all[P] = {};
  for (long g = 0; g < groups; g++) {
    vf parts[STREAMS][P] = {};
    const auto add = [&](long i, int s) {
      vf row[P];
      decode<F>(m, vf{}, q, i, row);
#pragma GCC unroll 4
      for (int j = 0; j < P; j++) parts[s][j] += row[j] * load(x + i);
    };
    long i = g * m.group;
    const long end = i + m.group;
    for (; i + STREAMS * W <= end; i += STREAMS * W)
#pragma GCC unroll 2
      for (int s = 0; s < STREAMS; s++) add(i + s * W, s);
    for (; i < end; i += W) add(i, 0);
#pragma GCC unroll 4
    for (int j = 0; j < P; j++)
      all[j] += (STREAMS == 2 ? parts[0][j] + parts[STREAMS - 1][j] : parts[0][j]) * scale(m, row_of<F>(m, q, j) * groups + g);
  }
#pragma GCC unroll 4
  for (int j = 0; j < P; j++) sums[j] = total(all[j]);
}
template <> inline void dots<BF16>(const Operand& m, long q, const float* x, float* sums) {
  *sums = dot((const uint16_t*)m.data + q * m.columns, x, m.columns);
}
struct Projection {
  Operand matrix;       // in bf16, or in codes of 5, 6 or 8 bits; none if its form is NONE
  const uint8_t* bias;  // [rows] in bf16, or null
};
#define PROJECTED(each) each(BF16) each(CODES5) each(CODES6) each(CODES8)
// Calls of `project` that are for all rows.
static inline long calls(const Projection& p) {
#define EACH(F) case F: return calls<F>(p.matrix);
  switch (p.matrix.form) { PROJECTED(EACH) }
#undef EACH
  return 0;
}
// Calls that are one thread's task.
static inline long piece(const Projection& p) {
  const Operand& m = p.matrix;
  return std::max(1L, PIECE * calls(p) / std::max(1L, (long)(m.rows * m.columns)) / W) * W;
}
// y = M · x + bias, rounded once, of the rows that the calls `begin` to `end` are for.
template <Form F> static void project(const Projection& p, long begin, long end, const float* x, uint16_t* y) {
  constexpr int P = served(F);
  const Operand& m = p.matrix;
  for (long first = begin; first < end; first += W) {
    const long count = std::min(W, end - first);
    float sums[P][W] = {};
    for (long r = 0; r < count; r++) {
      float own[P];
      dots<F>(m, first + r, x, own);
      for (int j = 0; j < P; j++) sums[j][r] = own[j] + (p.bias ? number(p.bias, BF16, row_of<F>(m, first + r, j)) : 0);
    }
    for (int j = 0; j < P; j++) {
      uint16_t rounded[W];
      store_bf16(rounded, load(sums[j]));
      for (long r = 0; r < count; r++) y[row_of<F>(m, first + r, j)] = rounded[r];
    }
  }
}
static void project(const Projection& p, long begin, long end, const float* x, uint16_t* y) {
#define EACH(F) case F: return project<F>(p, begin, end, x, y);
  switch (p.matrix.form) { PROJECTED(EACH) }
#undef EACH
}

// An input in whole numbers, of every kind that a matrix wants, if it may be rounded; of one thread.
class Words {
 public:
  Words(const float* x, bool may_round) : x(x), may_round(may_round) {}
  // Null if the product is one of fp32.
  const Whole* of(const Operand& m) {
    const int kind = may_round ? kind_of(m) : -1;
    if (kind < 0) return nullptr;
    if (memory[kind].empty()) {
      memory[kind].resize(whole_bytes(m.columns) / sizeof(vf));
      found[kind] = in_whole_numbers(x, m.columns, kind, (uint8_t*)memory[kind].data());
    }
    return found[kind].finite ? &found[kind] : nullptr;
  }
  // Zeros for so many rows: whoever writes there makes them zeros again.
  float* zeros(long rows) {
    if ((long)sums.size() < rows + W) sums.assign(rows + W, 0);
    return sums.data();
  }
  const float* const x;

 private:
  const bool may_round;
  std::vector<float> sums;
  std::vector<vf> memory[KINDS];
  Whole found[KINDS];
};
// As above, by whole numbers where they are wanted.
static void project(const Projection& p, long begin, long end, Words& words, uint16_t* y) {
  const Operand& m = p.matrix;
  const Whole* whole = words.of(m);
  if (!whole) return project(p, begin, end, words.x, y);
  float* sums = words.zeros(m.rows);
  whole_dots(m, begin, end, 1, &whole, &sums);
  const long parts = together((Form)m.form), each = m.rows / parts, calls = m.rows / served((Form)m.form);
  for (long j = 0; j < parts; j++)
    for (long r = j * each + begin * each / calls, stop = j * each + end * each / calls; r < stop; r += W) {
      const long count = std::min(W, stop - r);
      uint16_t rounded[W];
      for (long i = 0; p.bias && i < count; i++) sums[r + i] += number(p.bias, BF16, r + i);
      store_bf16(rounded, load(sums + r));
      memcpy(y + r, rounded, 2 * count);
      std::fill(sums + r, sums + r + count, 0.f);
    }
}
