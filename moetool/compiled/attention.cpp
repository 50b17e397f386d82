// Attention by itself, as transformers calls it.
#include "attention.h"

template <Form F> static void attend(const Attention& a, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room;
#pragma omp for schedule(static)
    for (long i = 0; i < a.batch * a.heads; i++) attend<F>(a, i, room);
  }
}
// Widths of keys and values are multiples of W.
extern "C" void moetool_attend(const Attention* a, int threads) {
  switch (a->numbers) {
    case F32: return attend<F32>(*a, threads);
    case BF16: return attend<BF16>(*a, threads);
    case F16: return attend<F16>(*a, threads);
  }
}
