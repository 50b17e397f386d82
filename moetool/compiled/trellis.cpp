// The path through a trellis that is nearest to given numbers, by Viterbi's algorithm (moetool/numerics/trellis.py).
#include <algorithm>
#include <cstdint>
#include <vector>
#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

namespace {
// Numbers of one segment: their least costs of reaching each state, and where each came from.
struct Segment {
  long begin, end;
  std::vector<float> costs;
  std::vector<uint8_t> origins;  // [numbers, states / branches]: the symbol that left the window on the best way
};

// A state is the last symbols, the newest one in the lowest bits; `values` has what each stands for.
template <int BITS> void forward(const float* x, Segment& s, int window, const float* values, bool is_first) {
  constexpr int BRANCHES = 1 << BITS;
  const int states = 1 << window, stems = states / BRANCHES;
  std::vector<float> least(stems);
  s.costs.assign(states, is_first ? 1e30f : 0.f);
  if (is_first) s.costs[0] = 0;
  s.origins.resize((s.end - s.begin) * stems);
  float *costs = s.costs.data(), *best = least.data();
  for (long t = s.begin; t < s.end; t++) {
    uint8_t* from = s.origins.data() + (t - s.begin) * stems;
    for (int q = 0; q < stems; q++) best[q] = costs[q];
    std::fill(from, from + stems, 0);
    for (int p = 1; p < BRANCHES; p++) {
      const float* other = costs + p * stems;
      for (int q = 0; q < stems; q++) {
        const bool better = other[q] < best[q];
        best[q] = better ? other[q] : best[q];
        from[q] = better ? (uint8_t)p : from[q];
      }
    }
    const float least_of_all = t % 64 == 63 ? *std::min_element(best, best + stems) : 0.f;  // so that sums stay exact
    const float own = x[t];
    for (int q = 0; q < stems; q++) {
      const float base = best[q] - least_of_all;
      for (int c = 0; c < BRANCHES; c++) {
        const float off = own - values[q * BRANCHES + c];
        costs[q * BRANCHES + c] = base + off * off;
      }
    }
  }
}
template <int BITS>
void path(const float* x, long count, int window, long segment, const float* values, uint8_t* symbols, float* found,
          int threads) {
  constexpr int BRANCHES = 1 << BITS;
  const int states = 1 << window, stems = states / BRANCHES;
  std::vector<Segment> segments((count + segment - 1) / segment);
#pragma omp parallel for schedule(dynamic) num_threads(std::min<long>(threads, segments.size()))
  for (long i = 0; i < (long)segments.size(); i++) {
    Segment& s = segments[i];
    s.begin = i * segment, s.end = std::min(count, s.begin + segment);
    forward<BITS>(x, s, window, values, i == 0);
  }
  long stem = -1;  // of the state that the next segment begins from: its oldest symbol is open
  for (long i = (long)segments.size() - 1; i >= 0; i--) {
    const Segment& s = segments[i];
    int state = stem < 0 ? 0 : (int)stem, step = stem < 0 ? 1 : stems, last = stem < 0 ? states : BRANCHES;
    int best = state;
    for (int k = 0; k < last; k++, state += step)
      if (s.costs[state] < s.costs[best]) best = state;
    state = best;
    for (long t = s.end - 1; t >= s.begin; t--) {
      symbols[t] = (uint8_t)(state & (BRANCHES - 1));
      found[t] = values[state];
      const int q = state / BRANCHES;
      const bool is_open = t == s.begin && i > 0;
      stem = q;
      if (!is_open) state = q + s.origins[(t - s.begin) * stems + q] * stems;
    }
  }
}
template <int BITS>
void paths(const float* x, long lines, long count, int window, long segment, const float* values, uint8_t* symbols,
           float* found, int threads) {
  if (lines == 1) return path<BITS>(x, count, window, segment, values, symbols, found, threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long i = 0; i < lines; i++)
    path<BITS>(x + i * count, count, window, segment, values, symbols + i * count, found + i * count, 1);
}
}  // namespace

namespace {
// How survivors of a search go on: state n of `states` comes from n / BRANCHES + STEMS · from[n].
template <int BITS> struct Step {
  static constexpr int BRANCHES = 1 << BITS, STATES = 256, STEMS = STATES / BRANCHES;
#if defined(__AVX512DQ__)
  static constexpr int EACH = 16 / BRANCHES;  // stems of 16 states, of which there are as many predecessors
  static constexpr bool SHUFFLES = BITS < 4;

  static __m128 two(const float* low, const float* high) {
    return _mm_loadh_pi(_mm_loadl_pi(_mm_setzero_ps(), (const __m64*)low), (const __m64*)high);
  }
  static __m512 predecessors(const float* from) {
    if constexpr (BITS == 1)
      return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(from)), _mm256_loadu_ps(from + STEMS), 1);
    __m512 found = _mm512_setzero_ps();
    if constexpr (BITS == 2) {
      found = _mm512_castps128_ps512(_mm_loadu_ps(from));
      found = _mm512_insertf32x4(found, _mm_loadu_ps(from + STEMS), 1);
      found = _mm512_insertf32x4(found, _mm_loadu_ps(from + 2 * STEMS), 2);
      found = _mm512_insertf32x4(found, _mm_loadu_ps(from + 3 * STEMS), 3);
    }
    if constexpr (BITS == 3) {
      found = _mm512_castps128_ps512(two(from, from + STEMS));
      found = _mm512_insertf32x4(found, two(from + 2 * STEMS, from + 3 * STEMS), 1);
      found = _mm512_insertf32x4(found, two(from + 4 * STEMS, from + 5 * STEMS), 2);
      found = _mm512_insertf32x4(found, two(from + 6 * STEMS, from + 7 * STEMS), 3);
    }
    return found;
  }
#else
  static constexpr int EACH = STEMS;
  static constexpr bool SHUFFLES = false;
#endif
  int32_t place[STATES];  // of each state's predecessor, among those of its 16 if they are shuffled, else among all

  void take(const uint8_t* from) {
    constexpr int AMONG = SHUFFLES ? 16 : STATES, APART = SHUFFLES ? EACH : STEMS;
    for (int n = 0; n < STATES; n++) place[n] = n % AMONG / BRANCHES + APART * from[n];
  }
  // What states had, by the states that come of them.
  void go(const float* before, float* after) const {
#if defined(__AVX512DQ__)
    if constexpr (SHUFFLES) {
      for (int n = 0; n < STATES; n += 16)
        _mm512_storeu_ps(after + n, _mm512_permutexvar_ps(_mm512_loadu_si512(place + n), predecessors(before + n / BRANCHES)));
      return;
    }
#endif
    for (int n = 0; n < STATES; n++) after[n] = before[place[n]];
  }
};

// The path of numbers whose errors move the ones after them, [count, count] `links`: a survivor of the search goes by the
// errors that it has made itself. Numbers were divided by `scales` [count], and their squares count by `pivots` [count].
template <int BITS>
void linked(const float* x, long count, int begin, const float* values, const float* links, long stride,
            const float* scales, const float* pivots, uint8_t* symbols, float* found) {
  constexpr int BRANCHES = 1 << BITS, STATES = 256, STEMS = STATES / BRANCHES;
  std::vector<float> held(2 * count * STATES), agreed(count);  // errors by state, before a step and after it
  float *errors = held.data(), *others = errors + count * STATES;
  std::vector<uint8_t> origins(count * STATES);
  float costs[STATES], next[STATES], moved[STATES], cost_of[STATES], moved_of[STATES];
  Step<BITS> step;
  std::fill(costs, costs + STATES, 1e30f);
  costs[begin] = 0;
  long recent = 0;  // the first number whose errors survivors do not all have in common
  for (long t = 0; t < count; t++) {
    const float inverse = scales[t] > 0 ? 1 / scales[t] : 1;
    for (; recent < t; recent++) {
      const float* own = errors + recent * STATES;
      int apart = 0;
      for (int p = 0; p < STATES; p++) apart += own[p] != own[0];
      if (apart) break;
      agreed[recent] = own[0];
    }
    float common = x[t];
    for (long k = 0; k < recent; k++) common += links[k * stride + t] * scales[k] * inverse * agreed[k];
    std::fill(moved, moved + STATES, common);
    for (long k = recent; k < t; k++) {
      const float link = links[k * stride + t] * scales[k] * inverse;
      const float* own = errors + k * STATES;
      for (int p = 0; p < STATES; p++) moved[p] += link * own[p];
    }
    const float weight = pivots[t] * scales[t] * scales[t];
    uint8_t* from = origins.data() + t * STATES;
    std::fill(next, next + STATES, 3e38f);
    std::fill(from, from + STATES, 0);
    for (int s = 0; s < BRANCHES; s++) {
      for (int q = 0; q < STEMS; q++)
        for (int c = 0; c < BRANCHES; c++) {
          cost_of[q * BRANCHES + c] = costs[s * STEMS + q];
          moved_of[q * BRANCHES + c] = moved[s * STEMS + q];
        }
      for (int n = 0; n < STATES; n++) {
        const float off = moved_of[n] - values[n], own = cost_of[n] + weight * off * off;
        const bool better = own < next[n];
        next[n] = better ? own : next[n];
        from[n] = better ? (uint8_t)s : from[n];
      }
    }
    step.take(from);
    for (long k = recent; k < t; k++) step.go(errors + k * STATES, others + k * STATES);
    std::swap(errors, others);
    float* own = errors + t * STATES;
    for (int n = 0; n < STATES; n++) own[n] = x[t] - values[n];
    const float least = *std::min_element(next, next + STATES);
    for (int n = 0; n < STATES; n++) costs[n] = next[n] - least;
  }
  int state = (int)(std::min_element(costs, costs + STATES) - costs);
  for (long t = count - 1; t >= 0; t--) {
    symbols[t] = (uint8_t)(state & (BRANCHES - 1));
    found[t] = values[state];
    state = state / BRANCHES + STEMS * origins[t * STATES + state];
  }
}
}  // namespace

// One line, in the state `begin` at first, of whose numbers the errors move those behind them.
extern "C" void moetool_linked_trellis(const float* x, long count, int bits, int begin, const float* values,
                                       const float* links, long stride, const float* scales, const float* pivots,
                                       uint8_t* symbols, float* found) {
  switch (bits) {
    case 1: return linked<1>(x, count, begin, values, links, stride, scales, pivots, symbols, found);
    case 2: return linked<2>(x, count, begin, values, links, stride, scales, pivots, symbols, found);
    case 3: return linked<3>(x, count, begin, values, links, stride, scales, pivots, symbols, found);
    case 4: return linked<4>(x, count, begin, values, links, stride, scales, pivots, symbols, found);
  }
}

// Of every line: symbols [lines, count] of the path, and the values [lines, count] that it goes through. A segment begins
// in a state that is open, the first one in state 0.
extern "C" void moetool_trellis(const float* x, long lines, long count, int bits, int window, long segment,
                                const float* values, uint8_t* symbols, float* found, int threads) {
  switch (bits) {
    case 1: return paths<1>(x, lines, count, window, segment, values, symbols, found, threads);
    case 2: return paths<2>(x, lines, count, window, segment, values, symbols, found, threads);
    case 3: return paths<3>(x, lines, count, window, segment, values, symbols, found, threads);
    case 4: return paths<4>(x, lines, count, window, segment, values, symbols, found, threads);
  }
}
