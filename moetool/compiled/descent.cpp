// Codes, scales and units of blocks that lose least at the output of a matrix
// (moetool/export/blocks/descent.py and feeding.py have the maths, in torch).
#include <algorithm>
#include <vector>

#include "levels.h"

namespace {
constexpr long MOST = 256;  // numbers in a span, and in a run of columns

// 16 columns of a row, zeros behind its end.
vf load_lanes(const float* row, long count) {
  if (count >= W) return load(row);
  vf v{};
  memcpy(&v, row, 4 * count);
  return v;
}
void store_lanes(float* row, long count, vf v) { memcpy(row, &v, 4 * std::min(W, count)); }
vf load_codes(const Nearest& nearest, const uint8_t* row, long count) {
  uint8_t own[W] = {};
  memcpy(own, row, std::min(W, count));
  return nearest.level(bytes(own));
}
void store_codes(uint8_t* row, long count, vi codes) {
  for (long i = 0; i < std::min(W, count); i++) row[i] = (uint8_t)codes[i];
}
// As `BlockLayout.as_unit` rounds.
vf as_unit(const BlockType& type, vf v) {
  v = within(v, -type.largest_unit, type.largest_unit);
  if (type.unit == 0) return v;
  uint16_t h[W];
  if (type.unit == 2) return store_f16(h, v), halves(h);
  const vu u = (vu)v;
  return (vf)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000);
}

// sums[k] = Σ_j g[k, j] v[j] for rows k of a matrix.
void product(const float* g, long stride, long rows, const vf* v, long columns, vf* sums) {
  long k = 0;
  for (; k + 4 <= rows; k += 4) {
    const float* row = g + k * stride;
    vf a{}, b{}, c{}, d{};
    for (long j = 0; j < columns; j++) {
      a += v[j] * row[j];
      b += v[j] * row[stride + j];
      c += v[j] * row[2 * stride + j];
      d += v[j] * row[3 * stride + j];
    }
    sums[k] = a, sums[k + 1] = b, sums[k + 2] = c, sums[k + 3] = d;
  }
  for (; k < rows; k++) {
    sums[k] = vf{};
    for (long j = 0; j < columns; j++) sums[k] += v[j] * g[k * stride + j];
  }
}
vf dot(const vf* a, const vf* b, long count) {
  vf sum{};
  for (long i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// Metric of 8 inputs and its inverse.
struct Metric {
  float own[TOGETHER][TOGETHER], inverse[TOGETHER][TOGETHER];
};
Metric metric_of(const float* g, long stride) {
  Metric found;
  double left[TOGETHER][2 * TOGETHER] = {};
  for (long i = 0; i < TOGETHER; i++) {
    for (long j = 0; j < TOGETHER; j++) left[i][j] = found.own[i][j] = g[i * stride + j];
    left[i][TOGETHER + i] = 1;
  }
  for (long i = 0; i < TOGETHER; i++) {  // positive definite: no pivot is zero
    const double over = 1 / left[i][i];
    for (double& number : left[i]) number *= over;
    for (long k = 0; k < TOGETHER; k++)
      if (const double times = left[k][i]; k != i)
        for (long j = 0; j < 2 * TOGETHER; j++) left[k][j] -= times * left[i][j];
  }
  for (long i = 0; i < TOGETHER; i++)
    for (long j = 0; j < TOGETHER; j++) found.inverse[i][j] = (float)left[i][TOGETHER + j];
  return found;
}

// Some blocks of a matrix, one after the other, all arrays [·, rows].
struct Span {
  long width, rows;
  const float* gram;  // [width, stride], of their inputs
  long stride;
  float* image;  // [width, rows]: of the errors of all inputs
  uint8_t* codes;
  float *scales, *minima, *d, *dmin;
};

// 16 outputs of a span.
class Lanes {
  const BlockType& type;
  const Span& span;
  const Nearest nearest;
  const NearestPoints points;
  const std::vector<Metric>& metrics;
  vf levels[MOST], image[MOST], under[MOST], beneath[MOST], a[MOST], b[MOST];

  // The image of inputs from `begin` to before `end`, after the values of `count` inputs from `part` on have changed.
  void follow(long begin, long end, long part, const vf* change, long count) {
    product(span.gram + begin * span.stride + part, span.stride, end - begin, change, count, under);
    for (long k = begin; k < end; k++) image[k] -= under[k - begin];
  }

  // The best `d` and `dmin` of a block for the codes that it has.
  void set_units(long part, const vf* scales, const vf* minima, vf& d, vf& dmin) {
    const float* gram = span.gram + part * span.stride + part;
    const long n = type.numbers, left = span.width - part;
    for (long k = 0; k < n; k++) a[k] = levels[part + k] * scales[k / type.group];
    product(gram, span.stride, left, a, n, under);
    const vf aa = dot(a, under, n), ax = dot(a, image + part, n);
    if (!type.has_minimum) {
      const vf found = as_unit(type, d + ax * inverse(aa)), step = found - d;
      const vf kept = choose(step * (2 * ax - step * aa) > 0, step, vf{});
      d = d + kept;
      for (long k = 0; k < left; k++) image[part + k] -= kept * under[k];
      return;
    }
    for (long k = 0; k < n; k++) b[k] = minima[k / type.group];
    product(gram, span.stride, left, b, n, beneath);
    const vf bb = dot(b, beneath, n), ab = dot(b, under, n), bx = dot(b, image + part, n);
    const vf determinant = aa * bb - ab * ab;
    const vi usable = determinant > 1e-4f * aa * bb;
    const vf over = choose(usable, inverse(determinant), vf{});
    const vf step = as_unit(type, d + choose(usable, (ax * bb - ab * bx) * over, ax * inverse(aa))) - d;
    const vf shift = as_unit(type, dmin - (bx * aa - ab * ax) * over) - dmin;
    const vf gain = 2 * (step * ax - shift * bx) - step * (step * aa - 2 * shift * ab) - shift * shift * bb;
    const vf steps = choose(gain > 0, step, vf{}), shifts = choose(gain > 0, shift, vf{});
    d = d + steps, dmin = dmin + shifts;
    for (long k = 0; k < left; k++) image[part + k] -= steps * under[k] - shifts * beneath[k];
  }

  // The best codes of a group's scale and minimum.
  void set_scale(long part, vf d, vf dmin, vf& scale, vf& minimum) {
    const float* gram = span.gram + part * span.stride + part;
    const long n = type.group;
    const vf *own = levels + part, *x = image + part;
    product(gram, span.stride, n, own, n, under);
    const vf aa = dot(own, under, n), ax = dot(own, x, n);
    if (!type.has_minimum) {
      const vf place = (scale + ax * inverse(aa * d) - type.scale_low) / type.scale_step;
      const vf most = vf{} + (type.scale_high - type.scale_low) / type.scale_step;
      const vf found = rounded(within(place, 0, most[0])) * type.scale_step + type.scale_low, step = (found - scale) * d;
      const vi better = step * (2 * ax - step * aa) > 0;
      scale = choose(better, found, scale);
      for (long k = 0; k < n; k++) image[part + k] -= choose(better, step, vf{}) * under[k];
      return;
    }
    float sums[MOST], sum = 0;
    vf bx{}, ab{};
    for (long k = 0; k < n; k++) {
      sums[k] = 0;
      for (long j = 0; j < n; j++) sums[k] += gram[k * span.stride + j];
      sum += sums[k], bx += x[k], ab += under[k];
    }
    const vf bb = vf{} + sum;
    vf determinant = aa * bb - ab * ab;
    determinant = choose(determinant > 1e-6f * aa * bb, determinant, 1e-6f * aa * bb);
    const vf ideal = within(scale + (ax * bb - ab * bx) * inverse(determinant * d), type.scale_low - 1, type.scale_high + 1);
    const vf nearby = rounded(ideal), down = choose(nearby > ideal, nearby - 1.f, nearby);
    const vf over = inverse(bb * dmin);
    vf most{}, best = scale, best_minimum = minimum;
    for (const vf place : {down, down + 1.f, scale}) {
      const vf tried = within(place, type.scale_low, type.scale_high), step = (tried - scale) * d;
      // Of v = a s − m, m is best where the rest of the error has no mean under the Gram matrix.
      const vf other = rounded(within(minimum + (step * ab - bx) * over, type.minimum_low, type.minimum_high));
      const vf shift = (other - minimum) * dmin;
      const vf gain = 2 * (step * ax - shift * bx) - step * (step * aa - 2 * shift * ab) - shift * shift * bb;
      const vi better = gain > most;
      most = choose(better, gain, most), best = choose(better, tried, best), best_minimum = choose(better, other, best_minimum);
    }
    const vf step = (best - scale) * d, shift = (best_minimum - minimum) * dmin;
    scale = best, minimum = best_minimum;
    for (long k = 0; k < n; k++) image[part + k] -= step * under[k] - shift * sums[k];
  }

  // The best code of every input of a group, one after the other, under an effective scale.
  void set_codes(long part, vf scale) {
    const vf over = inverse(scale);
    for (long k = 0; k < type.group; k++) {
      const float* row = span.gram + (part + k) * span.stride + part;
      const vf now = levels[part + k], place = choose(scale == 0, vf{}, now + image[part + k] * over / row[k]);
      levels[part + k] = nearest.near(place);
      const vf change = (levels[part + k] - now) * scale;
      for (long j = k + 1; j < type.group; j++) image[part + j] -= change * row[j];
    }
  }

  // The best points of a group, those of 8 inputs one after the other.
  void set_points(long part, vf scale) {
    const vf over = inverse(scale);
    for (long begin = part; begin < part + type.group; begin += TOGETHER) {
      const Metric& metric = metrics[begin / TOGETHER];
      vf places[TOGETHER], found[TOGETHER], change[TOGETHER], gain{};
      for (long k = 0; k < TOGETHER; k++) {
        vf moved{};
        for (long j = 0; j < TOGETHER; j++) moved += image[begin + j] * metric.inverse[k][j];
        places[k] = choose(scale == 0, vf{}, levels[begin + k] + moved * over);
      }
      points.near(places, metric.own, found);
      for (long k = 0; k < TOGETHER; k++) change[k] = (found[k] - levels[begin + k]) * scale;
      for (long k = 0; k < TOGETHER; k++) {
        vf own{};
        for (long j = 0; j < TOGETHER; j++) own += change[j] * metric.own[k][j];
        gain += change[k] * (2 * image[begin + k] - own);
      }
      for (long k = 0; k < TOGETHER; k++) {
        change[k] = choose(gain > 0, change[k], vf{});
        levels[begin + k] = choose(gain > 0, found[k], levels[begin + k]);
      }
      follow(begin + TOGETHER, part + type.group, begin, change, TOGETHER);
    }
  }

 public:
  Lanes(const BlockType& t, const Span& s, const std::vector<Metric>& m)
      : type(t), span(s), nearest(t), points(t), metrics(m) {}

  void descend(long row) {
    const long count = span.rows - row, groups = type.numbers / type.group;
    for (long k = 0; k < span.width; k++) {
      levels[k] = load_codes(nearest, span.codes + k * span.rows + row, count);
      image[k] = load_lanes(span.image + k * span.rows + row, count);
    }
    for (long block = 0; block < span.width / type.numbers; block++) {
      const auto at = [&](float* numbers, long i) { return numbers + i * span.rows + row; };
      vf scales[MOST / 16], minima[MOST / 16];
      for (long i = 0; i < groups; i++) {
        scales[i] = load_lanes(at(span.scales, block * groups + i), count);
        minima[i] = load_lanes(at(span.minima, block * groups + i), count);
      }
      vf d = load_lanes(at(span.d, block), count), dmin = load_lanes(at(span.dmin, block), count);
      set_units(block * type.numbers, scales, minima, d, dmin);
      for (long i = 0; i < groups; i++) {
        const long part = block * type.numbers + i * type.group;
        for (long k = 0; k < type.group; k++) a[k] = levels[part + k] * (d * scales[i]) - dmin * minima[i];
        if (groups > 1) set_scale(part, d, dmin, scales[i], minima[i]);
        const vf scale = d * scales[i], minimum = dmin * minima[i];
        type.together > 1 ? set_points(part, scale) : set_codes(part, scale);
        for (long k = 0; k < type.group; k++) a[k] = levels[part + k] * scale - minimum - a[k];
        follow(part + type.group, span.width, part, a, type.group);
        store_lanes(at(span.scales, block * groups + i), count, scales[i]);
        store_lanes(at(span.minima, block * groups + i), count, minima[i]);
      }
      store_lanes(at(span.d, block), count, d);
      store_lanes(at(span.dmin, block), count, dmin);
    }
    for (long k = 0; k < span.width; k++)
      store_codes(span.codes + k * span.rows + row, count, nearest.code(levels[k]));
  }
};

// Columns of a matrix in an order in which the first are coded first, all arrays [·, rows].
struct Run {
  long columns, rows;
  const float* factor;  // [columns, stride], upper triangular
  long stride;
  const float* moved;     // [columns, rows]: of the errors before, times the factor
  const int64_t* groups;  // [columns], of each
  const float *scales, *minima;
  float* errors;  // [columns, rows]: the numbers, and what codes leave of them
  uint8_t* codes;
};

// Codes of 16 outputs that make good for each other's errors and for those before.
void feed(const BlockType& type, const Run& run, const std::vector<Metric>& metrics, long row) {
  const Nearest nearest(type);
  const NearestPoints points(type);
  const long count = run.rows - row, step = type.together > 1 ? TOGETHER : 1;
  vf errors[MOST];
  for (long begin = 0; begin < run.columns; begin += step) {
    const float* block = run.factor + begin * run.stride + begin;
    const vf scale = load_lanes(run.scales + run.groups[begin] * run.rows + row, count), over = inverse(scale);
    const vf minimum = load_lanes(run.minima + run.groups[begin] * run.rows + row, count);
    vf makes_good[TOGETHER], places[TOGETHER], found[TOGETHER];
    for (long k = 0; k < step; k++) {
      makes_good[k] = load_lanes(run.moved + (begin + k) * run.rows + row, count);
      for (long i = 0; i < begin; i++) makes_good[k] += errors[i] * run.factor[i * run.stride + begin + k];
      for (long i = 0; i < k; i++) makes_good[k] -= makes_good[i] * block[i * run.stride + k];
      makes_good[k] /= block[k * run.stride + k];
      errors[begin + k] = load_lanes(run.errors + (begin + k) * run.rows + row, count);
      places[k] = (errors[begin + k] + makes_good[k] + minimum) * over;
    }
    if (step > 1) points.near(places, metrics[begin / TOGETHER].own, found);
    else found[0] = nearest.near(places[0]);
    for (long k = 0; k < step; k++) {
      errors[begin + k] -= found[k] * scale - minimum;
      store_lanes(run.errors + (begin + k) * run.rows + row, count, errors[begin + k]);
      store_codes(run.codes + (begin + k) * run.rows + row, count, nearest.code(found[k]));
    }
  }
}

constexpr float EQUAL[TOGETHER][TOGETHER] = {
    {1}, {0, 1}, {0, 0, 1}, {0, 0, 0, 1}, {0, 0, 0, 0, 1}, {0, 0, 0, 0, 0, 1}, {0, 0, 0, 0, 0, 0, 1}, {0, 0, 0, 0, 0, 0, 0, 1}};

// Scales and minima that suit the nearest codes of groups, all arrays [·, rows].
struct Fit {
  long columns, rows;
  const float* inputs;
  const float* weights;  // [columns]
  const float* clips;    // [tried]: shares of the scale that holds a group's largest number
  long tried;
  float *scales, *minima;  // [groups, rows]
};

// A group of 16 outputs.
class Group {
  const BlockType& type;
  const Nearest nearest;
  const NearestPoints points;
  const float* weights;
  vf x[MOST], places[MOST], values[MOST];

  void near(vf scale, vf minimum) {
    const vf over = inverse(scale);
    for (long k = 0; k < type.group; k++) places[k] = (x[k] + minimum) * over;
    if (type.together > 1)
      for (long k = 0; k < type.group; k += TOGETHER) points.near(places + k, EQUAL, values + k);
    else
      for (long k = 0; k < type.group; k++) values[k] = nearest.near(places[k]);
  }
  // The best scale and minimum for the values that are nearest under those given.
  void fit(vf& scale, vf& minimum) const {
    vf qq{}, qx{}, q{}, sum{};
    float one = 0;
    for (long k = 0; k < type.group; k++) {
      const vf weighted = values[k] * weights[k];
      qq += weighted * values[k], qx += weighted * x[k], q += weighted, sum += x[k] * weights[k], one += weights[k];
    }
    const vf alone = qx * inverse(qq);
    if (!type.has_minimum) { scale = alone; return; }
    const vf determinant = qq * one - q * q;
    const vf fitted = choose(determinant > 1e-6f * qq * one, (qx * one - q * sum) * inverse(determinant), vf{});
    const vf shift = (q * fitted - sum) / one;
    const vi usable = fitted > 0;
    if (type.minimum_low == 0) {
      const vi positive = usable & (shift > 0);
      scale = choose(positive, fitted, alone), minimum = choose(positive, shift, vf{});
    } else {
      scale = choose(usable, fitted, scale), minimum = choose(usable, shift, minimum);
    }
  }

 public:
  explicit Group(const BlockType& t) : type(t), nearest(t), points(t) {}

  void fit_scales(const Fit& own, long group, long row) {
    const long count = own.rows - row;
    vf high = vf{} - __builtin_inff(), low = vf{} + __builtin_inff();
    for (long k = 0; k < type.group; k++) {
      x[k] = load_lanes(own.inputs + (group * type.group + k) * own.rows + row, count);
      high = choose(x[k] > high, x[k], high), low = choose(x[k] < low, x[k], low);
    }
    weights = own.weights + group * type.group;
    const float lowest = type.levels[0], highest = type.levels[type.count - 1];
    if (type.has_minimum && type.minimum_low == 0) low = choose(low > 0, vf{}, low);
    const vf largest = choose(high > -low, high, low), whole = type.has_minimum ? (high - low) / highest : largest / lowest;
    const bool is_symmetric = lowest == -highest, both = !type.has_minimum && !is_symmetric && type.count <= 16;
    vf best = vf{} + __builtin_inff(), scale{}, minimum{};
    for (long i = 0; i < own.tried; i++)
      for (float sign : {1.f, -1.f}) {
        if (sign < 0 && !both) continue;
        vf tried = whole * (own.clips[i] * sign), shift = type.has_minimum ? -low * own.clips[i] : vf{};
        if (!type.has_minimum && is_symmetric) tried = size_of(tried);
        near(tried, shift);
        fit(tried, shift);
        near(tried, shift);
        vf lost{};
        for (long k = 0; k < type.group; k++) {
          const vf left = values[k] * tried - shift - x[k];
          lost += left * left * weights[k];
        }
        scale = choose(lost < best, tried, scale), minimum = choose(lost < best, shift, minimum);
        best = choose(lost < best, lost, best);
      }
    store_lanes(own.scales + group * own.rows + row, count, scale);
    store_lanes(own.minima + group * own.rows + row, count, minimum);
  }
};

std::vector<Metric> metrics_of(const float* gram, long stride, long width) {
  std::vector<Metric> found;
  for (long k = 0; k + TOGETHER <= width; k += TOGETHER) found.push_back(metric_of(gram + k * stride + k, stride));
  return found;
}
}  // namespace

// Improves the codes and scales of the blocks of a span once, one after the other.
extern "C" void moetool_descend(const BlockType* type, const Span* span, int threads) {
  const std::vector<Metric> metrics = metrics_of(span->gram, span->stride, type->together > 1 ? span->width : 0);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long row = 0; row < span->rows; row += W) Lanes(*type, *span, metrics).descend(row);
}

// Codes of a run of columns; of types of points, 8 columns have one scale.
extern "C" void moetool_feed_back(const BlockType* type, const Run* run, int threads) {
  std::vector<Metric> metrics;
  for (long k = 0; type->together > 1 && k < run->columns; k += TOGETHER) {
    Metric own;
    const float* block = run->factor + k * run->stride + k;
    for (long i = 0; i < TOGETHER; i++)
      for (long j = 0; j < TOGETHER; j++) {
        own.own[i][j] = 0;
        for (long c = std::max(i, j); c < TOGETHER; c++) own.own[i][j] += block[i * run->stride + c] * block[j * run->stride + c];
      }
    metrics.push_back(own);
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long row = 0; row < run->rows; row += W) feed(*type, *run, metrics, row);
}

// Scales and minima that suit the nearest codes.
extern "C" void moetool_fit_scales(const BlockType* type, const Fit* fit, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long row = 0; row < fit->rows; row += W) {
    Group own(*type);
    for (long group = 0; group < fit->columns / type->group; group++) own.fit_scales(*fit, group, row);
  }
}

// Codes [columns, rows] of the points nearest to places [columns, rows], of 8 columns each.
extern "C" void moetool_nearest_points(const BlockType* type, const float* places, long columns, long rows, uint8_t* codes,
                                       int threads) {
  const Nearest nearest(*type);
  const NearestPoints points(*type);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long begin = 0; begin < columns; begin += TOGETHER)
    for (long row = 0; row < rows; row += W) {
      vf own[TOGETHER], found[TOGETHER];
      for (long k = 0; k < TOGETHER; k++) own[k] = load_lanes(places + (begin + k) * rows + row, rows - row);
      points.near(own, EQUAL, found);
      for (long k = 0; k < TOGETHER; k++) store_codes(codes + (begin + k) * rows + row, rows - row, nearest.code(found[k]));
    }
}
