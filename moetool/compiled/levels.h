// Levels of the codes in blocks, and the ones nearest to given places: of a number by itself, or of 8
// numbers that are points of a list together (moetool/export/blocks/lattice.py). 16 outputs are treated side by side.
#pragma once
#include "vectors.h"

constexpr long TOGETHER = 8;  // numbers whose signs a type of points stores together

// A kind of blocks, as moetool/format/blocks.py describes it.
struct BlockType {
  int64_t numbers, group, count;  // of a block, of those that share a scale, and of levels
  const float* levels;            // [count], ascending
  int64_t is_even, together, has_even_signs, tried;
  const int32_t* points;     // [points, together / 4]: magnitudes as bytes, the first in the lowest bits
  const int32_t* neighbors;  // [combinations of magnitudes, tried]: the points nearest to each
  float scale_low, scale_high, scale_step, minimum_low, minimum_high;
  int64_t has_minimum, unit;  // of d and dmin: fp32 (0), bf16 (1) or fp16 (2)
  float largest_unit;
};

static inline vf within(vf v, float low, float high) {  // not a number becomes `low`
  const vf l = vf{} + low, h = vf{} + high;
  v = choose(v > l, v, l);
  return choose(v < h, v, h);
}
static inline vf rounded(vf v) {  // to even, as torch does; below 2^22
  return (v + 12582912.f) - 12582912.f;
}
static inline vf inverse(vf v) { return choose(v == 0, vf{}, 1.f / v); }
static inline vf size_of(vf v) { return (vf)((vi)v & 0x7fffffff); }

// The level nearest to each place, of a number by itself.
class Nearest {
  const BlockType& type;
  const float low, high;
  vf few{};  // levels, of 16 at most
  float middles[W];

 public:
  explicit Nearest(const BlockType& t) : type(t), low(t.levels[0]), high(t.levels[t.count - 1]) {
    for (long i = 0; !t.is_even && i < t.count; i++) few[i] = t.levels[i];
    for (long i = 1; !t.is_even && i < t.count; i++) middles[i] = (t.levels[i - 1] + t.levels[i]) / 2;
  }
  vi code(vf place) const {
    if (type.is_even) return to_int(rounded(within(place, low, high)) - low);
    vi found{};
    for (long i = 1; i < type.count; i++) found -= place > middles[i];  // true is −1
    return found;
  }
  vf level(vi code) const { return type.is_even ? to_float(code) + low : lookup(few, code); }
  vf near(vf place) const { return type.is_even ? rounded(within(place, low, high)) : level(code(place)); }
};

// The points of 8 numbers that are about the nearest to their places in a metric [8, 8].
class NearestPoints {
  const BlockType& type;
  long magnitudes;
  float middles[W];

  vf square(const vf* errors, const float (*metric)[TOGETHER]) const {
    vf sum{};
    for (long i = 0; i < TOGETHER; i++) {
      vf row = errors[i] * (metric[i][i] / 2);
      for (long j = 0; j < i; j++) row += errors[j] * metric[i][j];
      sum += row * errors[i];
    }
    return sum;
  }
  // Magnitudes of a list's points, of `together` numbers from `sizes` on.
  void sizes_of(vi point, vf* sizes) const {
    for (long word = 0; word < type.together / 4; word++) {
      const vi packed = (vi)gather((const float*)type.points, point * (int)(type.together / 4) + (int)word);
      for (long k = 0; k < 4; k++) sizes[4 * word + k] = to_float((packed >> (int)(8 * k)) & 255);
    }
  }

 public:
  explicit NearestPoints(const BlockType& t) : type(t), magnitudes(t.together > 1 ? t.count / 2 : 0) {  // none of single numbers
    const float* sizes = t.levels + magnitudes;
    for (long i = 0; i + 1 < magnitudes; i++) middles[i] = (sizes[i] + sizes[i + 1]) / 2;
  }
  // Writes the signed magnitudes of the best points.
  void near(const vf* places, const float (*metric)[TOGETHER], vf* found) const {
    const long halves = TOGETHER / type.together;
    vi rows[2];  // of `neighbors`
    for (long half = 0; half < halves; half++) {
      vi row{};
      for (long k = type.together - 1; k >= 0; k--) {  // the first number changes fastest
        const vf size = size_of(places[half * type.together + k]);
        vi index{};
        for (long i = 0; i + 1 < magnitudes; i++) index -= size > middles[i];
        row = row * (int)magnitudes + index;
      }
      rows[half] = row * (int)type.tried;
    }
    vf sizes[2][8][TOGETHER];
    for (long half = 0; half < halves; half++)
      for (long t = 0; t < type.tried; t++)
        sizes_of((vi)gather((const float*)type.neighbors, rows[half] + (int)t), sizes[half][t]);
    vf least = vf{} + __builtin_inff();
    for (long k = 0; k < TOGETHER; k++) found[k] = places[k];
    for (long t = 0; t < type.tried; t++)
      for (long u = 0; u < (halves == 2 ? type.tried : 1); u++) {
        vf values[TOGETHER], errors[TOGETHER], cheapest = vf{} + __builtin_inff();
        vi odd{}, turned{};
        for (long k = 0; k < TOGETHER; k++) {
          const vf size = k < type.together ? sizes[0][t][k] : sizes[1][u][k - type.together];
          const vi negative = places[k] < 0;
          values[k] = choose(negative, -size, size);
          odd ^= negative;
          const vf cost = size_of(places[k]) * size * metric[k][k];
          const vi better = cost < cheapest;
          cheapest = choose(better, cost, cheapest);
          turned = choose(better, vi{} + (int)k, turned);
        }
        for (long k = 0; k < TOGETHER; k++) {
          if (type.has_even_signs) values[k] = choose(odd & (turned == (int)k), -values[k], values[k]);
          errors[k] = places[k] - values[k];
        }
        const vf lost = square(errors, metric);
        const vi better = (lost < least) | ((t | u) ? vi{} : vi{} - 1);  // a first one, whatever the numbers are
        least = choose(better, lost, least);
        for (long k = 0; k < TOGETHER; k++) found[k] = choose(better, values[k], found[k]);
      }
  }
};
