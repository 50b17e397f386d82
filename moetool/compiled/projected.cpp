// Self-attention of one token in bf16 from its projections to its output, and the layer around it up to its experts, by the
// threads of one parallel region, which wait in it for one another. What torch rounds between operations is rounded here, too.
#include <cmath>
#include "attention.h"
#include "vector.h"

struct SelfAttention {
  Projection query, key, value, out;
  const uint16_t *query_norm, *key_norm;  // [width], or null
  int64_t heads, keys, width;             // heads of queries and of keys, numbers in each: a multiple of 2 W
  float query_epsilon, key_epsilon, scale;
};
struct Task { const Projection* projection; long begin, end; uint16_t* y; };
// Where a token's key and value are written: behind `length` others in memory [heads of keys, room, width].
struct Cache { uint16_t *keys, *values; long room, length; };
static inline vf rounded(vf v) {
  uint16_t own[W];
  store_bf16(own, v);
  return widened(own);
}
// The root mean square of `width` numbers becomes 1, before the weight. Out may be in.
static void norm(const uint16_t* in, const uint16_t* weight, long width, float epsilon, uint16_t* out) {
  vf squares{};
  for (long i = 0; i < width; i += W) squares += widened(in + i) * widened(in + i);
  const float inverse = 1 / std::sqrt(total(squares) / width + epsilon);
  for (long i = 0; i < width; i += W) store_bf16(out + i, rounded(widened(in + i) * inverse) * widened(weight + i));
}
// The two halves of a head are the coordinates that are rotated.
static void rotate(uint16_t* head, const uint16_t* cosine, const uint16_t* sine, long width) {
  const long half = width / 2;
  for (long i = 0; i < half; i += W) {
    const vf a = widened(head + i), b = widened(head + half + i);
    store_bf16(head + i, rounded(a * widened(cosine + i)) + rounded(-b * widened(sine + i)));
    store_bf16(head + half + i, rounded(b * widened(cosine + half + i)) + rounded(a * widened(sine + half + i)));
  }
}
static void widen(const uint16_t* from, long begin, long end, float* to) {
  for (long i = begin; i < end; i++) to[i] = number((const uint8_t*)from, BF16, i);
}

// The attention of a layer: planned by one thread, done by all of a parallel region. Kept from call to call, with its memory.
class Attending {
 public:
  void plan(const SelfAttention& own, const uint16_t* input, const Cache& cache) {
    s = own, to = cache;
    const long width = s.width, all = s.heads * width;
    x.resize(s.query.matrix.columns);
    projected.resize((s.heads + 2 * s.keys) * width);
    attended.resize(all);
    mixed.resize(all);
    tasks.clear();
    widen(input, 0, s.query.matrix.columns, x.data());
    uint16_t* places[] = {projected.data(), projected.data() + all, projected.data() + all + s.keys * width};
    const Projection* projections[] = {&s.query, &s.key, &s.value};
    for (int p = 0; p < 3; p++)
      for (long begin = 0, end = calls(*projections[p]), step = piece(*projections[p]); begin < end; begin += step)
        tasks.push_back({projections[p], begin, std::min(end, begin + step), places[p]});
    const Cached key{(const uint8_t*)to.keys, 0, to.room * width, width};
    const Cached value{(const uint8_t*)to.values, 0, to.room * width, width};
    attention = {BF16, 1, s.keys, s.heads / s.keys, to.length + 1, width, width, (const uint8_t*)places[0],
                 key, value, nullptr, 0, s.scale, (uint8_t*)attended.data()};
  }
  // y [out rows]; of every thread. If it `may_round`, inputs are rounded to whole numbers where that is faster.
  void share(const uint16_t* cosine, const uint16_t* sine, uint16_t* y, bool may_round) {
    const long width = s.width, each = s.heads / s.keys * width, step = piece(s.out), end = calls(s.out);
    Words given(x.data(), may_round), rest(mixed.data(), may_round);
#pragma omp for schedule(dynamic)
    for (long i = 0; i < (long)tasks.size(); i++) project(*tasks[i].projection, tasks[i].begin, tasks[i].end, given, tasks[i].y);
#pragma omp for
    for (long h = 0; h < s.heads + s.keys; h++) {
      const bool is_key = h >= s.heads;
      uint16_t* head = projected.data() + h * width;
      if (const uint16_t* weight = is_key ? s.key_norm : s.query_norm)
        norm(head, weight, width, is_key ? s.key_epsilon : s.query_epsilon, head);
      rotate(head, cosine, sine, width);
      if (!is_key) continue;
      const long place = ((h - s.heads) * to.room + to.length) * width;
      memcpy(to.keys + place, head, 2 * width);
      memcpy(to.values + place, head + s.keys * width, 2 * width);
    }
    std::vector<float> scores;
#pragma omp for schedule(static)
    for (long i = 0; i < s.keys; i++) {
      attend<BF16>(attention, i, scores);
      widen(attended.data(), i * each, (i + 1) * each, mixed.data());
    }
#pragma omp for schedule(dynamic)
    for (long begin = 0; begin < end; begin += step) project(s.out, begin, std::min(end, begin + step), rest, y);
  }

 private:
  SelfAttention s;
  Cache to;
  Attention attention;
  std::vector<float> x, mixed;
  std::vector<uint16_t> projected, attended;
  std::vector<Task> tasks;
};

// y [out rows] of x [columns].
extern "C" void moetool_self_attention(const SelfAttention* own, const uint16_t* x, const uint16_t* cosine, const uint16_t* sine,
                                       uint16_t* keys, uint16_t* values, long room, long length, uint16_t* y, int threads,
                                       int may_round) {
  static thread_local Attending kept;
  Attending& attending = kept;  // other threads have none of what is this one's own
  attending.plan(*own, x, {keys, values, room, length});
#pragma omp parallel num_threads(threads)
  attending.share(cosine, sine, y, may_round);
}

// What a layer does around its experts: norm, attention, what was before added, another norm, and the router if it has one.
struct Layer {
  SelfAttention attention;
  const uint16_t *before, *after;  // weights of the norms, [hidden], a multiple of W
  float before_epsilon, after_epsilon;
  Projection router;               // [experts, hidden] in bf16; of the form NONE if there is none
  int64_t chosen, normalizes;      // experts of a token, and whether their weights add up to 1
};
// The largest logits, of equal ones the first, and their shares of all.
static void choose(const Layer& layer, const uint16_t* logits, int64_t* experts, float* weights) {
  const long count = layer.router.matrix.rows;
  std::vector<float> values(count);
  widen(logits, 0, count, values.data());
  float most = -INFINITY, all = 0, sum = 0;
  for (float value : values) most = std::max(most, value);
  for (float value : values) all += std::exp(value - most);
  for (long k = 0; k < layer.chosen; k++) {
    const long best = std::max_element(values.begin(), values.end()) - values.begin();
    experts[k] = best;
    sum += weights[k] = std::exp(values[best] - most) / all;
    values[best] = -INFINITY;
  }
  for (long k = 0; layer.normalizes && k < layer.chosen; k++) weights[k] /= sum;
}
// Of x [hidden]: what goes on beside the experts, `stream`, and what they are given, `normed`; which ones, and their weights.
extern "C" void moetool_layer(const Layer* own, const uint16_t* x, const uint16_t* cosine, const uint16_t* sine, uint16_t* keys,
                              uint16_t* values, long room, long length, uint16_t* stream, uint16_t* normed, int64_t* experts,
                              float* weights, int threads, int may_round) {
  static thread_local struct { Attending attending; std::vector<float> normed; std::vector<uint16_t> logits; } kept;
  auto& rooms = kept;
  const Layer& layer = *own;
  const long hidden = layer.attention.query.matrix.columns;
  norm(x, layer.before, hidden, layer.before_epsilon, normed);
  rooms.attending.plan(layer.attention, normed, {keys, values, room, length});
  rooms.normed.resize(hidden);
  rooms.logits.resize(layer.router.matrix.rows);
#pragma omp parallel num_threads(threads)
  {
    rooms.attending.share(cosine, sine, stream, may_round);
#pragma omp single
    {
      for (long i = 0; i < hidden; i += W) store_bf16(stream + i, widened(x + i) + widened(stream + i));
      norm(stream, layer.after, hidden, layer.after_epsilon, normed);
      widen(normed, 0, hidden, rooms.normed.data());
    }
#pragma omp for
    for (long begin = 0; begin < calls(layer.router); begin += W)
      project(layer.router, begin, std::min(calls(layer.router), begin + W), rooms.normed.data(), rooms.logits.data());
  }
  if (layer.router.matrix.form) choose(layer, rooms.logits.data(), experts, weights);
}
