// A linear layer of one token.
#include <vector>
#include "vector.h"

// y [rows] = M [rows, columns] · x + bias, which may be null, rounded once.
extern "C" void moetool_vector(const uint16_t* matrix, const uint8_t* bias, long rows, long columns, const uint8_t* x, uint16_t* y,
                               int threads) {
  static thread_local std::vector<float> kept;
  kept.resize(columns);
  float* input = kept.data();  // other threads have none of what is this one's own
  for (long i = 0; i < columns; i++) input[i] = number(x, BF16, i);
  const Projection own{Operand{BF16, rows, columns, 1, 0, (const uint8_t*)matrix}, bias};
  const long step = piece(own);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long begin = 0; begin < rows; begin += step) project(own, begin, std::min(rows, begin + step), input, y);
}
