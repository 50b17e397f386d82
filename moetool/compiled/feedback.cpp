// Codes of one block of inputs, each making good for the errors of those before it (moetool/numerics/error_feedback.py).
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {
constexpr long TILE = 64;  // outputs that are gone through together, each by itself

// How numbers are rounded to levels: by a table of cells that `starts` finds for each output, or to whole numbers.
struct Grid {
  const float *scales, *inverse;  // [groups, rows]
  const int32_t* starts;          // [rows], or none where all outputs share one table
  const uint8_t* nearest;         // [cells of all tables], or none for whole numbers
  const float* levels;
  float first, last;  // the cell of the number zero, and the last cell of a table; or the lowest and highest whole number
};

template <bool WHOLE> void column(const Grid& g, const float* scales, const float* inverse, long row, long count,
                                  const float* moved, float* errors, uint8_t* codes, float* lost, float pivot) {
  for (long i = 0; i < count; i++) {
    const float own = moved[i] + errors[i];
    float place = own * inverse[i], value;
    if (WHOLE) {
      value = std::min(std::max(std::rint(place), g.first), g.last);
      codes[i] = (uint8_t)(value - g.first);
    } else {
      place += g.first;
      place = place > 0.f ? place : 0.f;  // what is not a number, too
      const int cell = (int)std::min(place, g.last) + (g.starts ? g.starts[row + i] : 0);
      codes[i] = g.nearest[cell];
      value = g.levels[cell];
    }
    value *= scales[i];
    errors[i] -= value;
    const float off = own - value;
    lost[i] += pivot * off * off;
  }
}
}  // namespace

// `errors`, `moved` and `codes` are [columns, rows], `links` [columns, stride], `pivots` and `groups` [columns], `lost`
// [rows]. What is written: codes; errors less the values of the codes; lost, by what each column adds; moved, of columns
// of the block by the errors of those before.
extern "C" void moetool_round_to_levels(float* errors, float* moved, uint8_t* codes, float* lost, long columns, long rows,
                                  const float* links, long stride, const float* pivots, const int32_t* groups,
                                  const float* scales, const float* inverse, const int32_t* starts,
                                  const uint8_t* nearest, const float* levels, float first, float last, int threads) {
  const Grid grid{scales, inverse, starts, nearest, levels, first, last};
  const long tiles = (rows + TILE - 1) / TILE;
#pragma omp parallel for schedule(static) num_threads(std::min<long>(threads, tiles))
  for (long tile = 0; tile < tiles; tile++) {
    const long row = tile * TILE, count = std::min(TILE, rows - row);
    for (long c = 0; c < columns; c++) {
      const long at = c * rows + row, shared = groups[c] * rows + row;
      (nearest ? column<false> : column<true>)(grid, scales + shared, inverse + shared, row, count, moved + at,
                                               errors + at, codes + at, lost + row, pivots[c]);
      const float* own = errors + at;
      for (long later = c + 1; later < columns; later++) {
        float* other = moved + later * rows + row;
        const float link = links[c * stride + later];
        for (long i = 0; i < count; i++) other[i] += link * own[i];
      }
    }
  }
}
