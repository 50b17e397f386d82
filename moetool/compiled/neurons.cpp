// A few tokens with the rows that each of them chose of a matrix of numbers: one row for every neuron, on a CPU.
// Rows are read where they lie. Sums are fp32 and come in the same order whatever the number of threads.
#include "matrices.h"

constexpr long ROWS = 64;  // that are one thread's task, or columns

template <Form F> static inline float dot(const Operand m, long row, const float* x) {
  vf sums[4] = {};
  long i = 0;
  for (; i + 4 * W <= m.columns; i += 4 * W)
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) sums[s] += decode_row<F>(m, vf{}, row, i + s * W) * load(x + i + s * W);
  for (; i + W <= m.columns; i += W) sums[0] += decode_row<F>(m, vf{}, row, i) * load(x + i);
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < m.columns; i++) sum += number(m.data, F, row * m.columns + i) * x[i];
  return sum;
}
// y += Σ values · rows, of the columns `begin` to `end`.
template <Form F>
static void sum(const Operand m, const int64_t* chosen, long count, const float* values, long begin, long end, float* y) {
  long n = 0;
  for (; n + 4 <= count; n += 4) {
    long i = begin;
    for (; i + W <= end; i += W) {
      vf sum = load(y + i);
#pragma GCC unroll 4
      for (int s = 0; s < 4; s++) sum += decode_row<F>(m, vf{}, chosen[n + s], i) * values[n + s];
      store(y + i, sum);
    }
    for (; i < end; i++)
      for (int s = 0; s < 4; s++) y[i] += number(m.data, F, chosen[n + s] * m.columns + i) * values[n + s];
  }
  for (; n < count; n++)
    for (long i = begin; i < end; i++) y[i] += number(m.data, F, chosen[n] * m.columns + i) * values[n];
}
static Operand plain(const uint8_t* data, long form, long columns) {
  Operand m{};
  m.form = form, m.columns = m.group = columns, m.data = data;
  return m;
}
#define NUMBERS(each) each(F32) each(BF16) each(F16)

// y [tokens, count] = the rows `chosen` [tokens, count] of M, each times its token's x [tokens, columns].
extern "C" void moetool_chosen_dots(const uint8_t* data, long form, long columns, const int64_t* chosen, long count,
                                    const float* x, long tokens, float* y, int threads) {
  const Operand m = plain(data, form, columns);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long first = 0; first < tokens * count; first += ROWS)
    for (long pair = first; pair < std::min(tokens * count, first + ROWS); pair++) {
      const float* own = x + pair / count * columns;
      switch (form) {
#define EACH(F) case F: y[pair] = dot<F>(m, chosen[pair], own); break;
        NUMBERS(EACH)
#undef EACH
      }
    }
}
// y [tokens, columns] = Σ over a token's rows `chosen` of M, times `values` [tokens, count].
extern "C" void moetool_chosen_sum(const uint8_t* data, long form, long columns, const int64_t* chosen, long count,
                                   const float* values, long tokens, float* y, int threads) {
  const Operand m = plain(data, form, columns);
  const long parts = (columns + ROWS - 1) / ROWS, each = (parts + threads - 1) / threads * ROWS;
  memset(y, 0, sizeof(float) * tokens * columns);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (long token = 0; token < tokens; token++)
    for (long begin = 0; begin < columns; begin += each) {
      const long end = std::min(columns, begin + each);
      const int64_t* rows = chosen + token * count;
      switch (form) {
#define EACH(F) case F: sum<F>(m, rows, count, values + token * count, begin, end, y + token * columns); break;
        NUMBERS(EACH)
#undef EACH
      }
    }
}
