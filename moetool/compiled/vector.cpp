// The product of one token with a matrix in bf16, on a CPU: rows are read one after the other, as fast as memory gives them.
// Sums are fp32 and come in the same order whatever the number of threads.
#include <vector>
#include "matrices.h"

constexpr long PIECE = 1 << 16;  // numbers of the matrix that are one thread's task
constexpr int SUMS = 4;          // of a row, which do not wait for one another

static inline vf widened(const uint16_t* p) { return (vf)((vu)shorts(p) << 16); }
static inline float dot(const uint16_t* row, const float* x, long columns) {
  vf sums[SUMS] = {};
  long i = 0;
  for (; i + SUMS * W <= columns; i += SUMS * W)
    for (int s = 0; s < SUMS; s++) sums[s] += widened(row + i + s * W) * load(x + i + s * W);
  for (; i + W <= columns; i += W) sums[0] += widened(row + i) * load(x + i);
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < columns; i++) sum += number((const uint8_t*)row, BF16, i) * x[i];
  return sum;
}
// y [rows] = M [rows, columns] · x + bias, which may be null, rounded once.
extern "C" void moetool_vector(const uint16_t* matrix, const uint8_t* bias, long rows, long columns, const uint8_t* x, uint16_t* y,
                               int threads) {
  static thread_local std::vector<float> kept;
  kept.resize(columns);
  float* input = kept.data();  // other threads have none of what is this one's own
  for (long i = 0; i < columns; i++) input[i] = number(x, BF16, i);
  const long step = std::max(1L, PIECE / std::max(1L, columns) / W) * W;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long begin = 0; begin < rows; begin += step)
    for (long first = begin; first < std::min(rows, begin + step); first += W) {
      const long count = std::min(W, rows - first);
      float sums[W] = {};
      for (long r = 0; r < count; r++) {
        sums[r] = dot(matrix + (first + r) * columns, input, columns);
        if (bias) sums[r] += number(bias, BF16, first + r);
      }
      uint16_t rounded[W];
      store_bf16(rounded, load(sums));
      memcpy(y + first, rounded, 2 * count);
    }
}
