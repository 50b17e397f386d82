// The product of one token with a matrix in bf16 or in codes of 8 bits, on a CPU: rows are read one after the other, as fast
// as memory gives them.
// Sums are fp32 and come in the same order whatever the number of threads.
#pragma once
#include "matrices.h"

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
// The same of codes, whose level is code − 127, with a scale in bf16 for every `group` of a row: a multiple of W.
static inline float dot_codes(const uint8_t* codes, const uint16_t* scales, long group, const float* x, long columns) {
  vf sum{};
  for (long begin = 0; begin < columns; begin += group) {
    vf parts[2] = {};
    long i = begin;
    for (; i + 2 * W <= begin + group; i += 2 * W)
#pragma GCC unroll 2
      for (int s = 0; s < 2; s++) parts[s] += to_float(bytes(codes + i + s * W) - 127) * load(x + i + s * W);
    for (; i < begin + group; i += W) parts[0] += to_float(bytes(codes + i) - 127) * load(x + i);
    sum += (parts[0] + parts[1]) * number((const uint8_t*)scales, BF16, begin / group);
  }
  return total(sum);
}
struct Projection {
  const uint8_t* matrix;   // [rows, columns] in bf16, or codes
  const uint8_t* bias;     // [rows], or null
  int64_t rows, columns;
  const uint16_t* scales;  // of codes, [rows, columns / group]; or null
  int64_t group;
};
static inline float dot(const Projection& p, long row, const float* x) {
  if (p.scales) return dot_codes(p.matrix + row * p.columns, p.scales + row * (p.columns / p.group), p.group, x, p.columns);
  return dot((const uint16_t*)p.matrix + row * p.columns, x, p.columns);
}
// Rows that are one thread's task.
static inline long piece(const Projection& p) { return std::max(1L, PIECE / std::max(1L, (long)p.columns) / W) * W; }
// y[begin to end] = M · x + bias, rounded once.
static void project(const Projection& p, long begin, long end, const float* x, uint16_t* y) {
  for (long first = begin; first < end; first += W) {
    const long count = std::min(W, end - first);
    float sums[W] = {};
    for (long r = 0; r < count; r++) {
      sums[r] = dot(p, first + r, x);
      if (p.bias) sums[r] += number(p.bias, BF16, first + r);
    }
    uint16_t rounded[W];
    store_bf16(rounded, load(sums));
    memcpy(y + first, rounded, 2 * count);
  }
}
