// Self-attention of one token in bf16 from its projections to its output, by the threads of one parallel region, which wait in
// it for one another. What torch rounds between its operations is rounded here, too.
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
struct Rooms {
  std::vector<float> x, mixed;
  std::vector<uint16_t> projected, attended;
  std::vector<Task> tasks;
};

static inline vf rounded(vf v) {
  uint16_t own[W];
  store_bf16(own, v);
  return widened(own);
}
// A head's root mean square becomes 1, before the weight.
static void norm(uint16_t* head, const uint16_t* weight, long width, float epsilon) {
  vf squares{};
  for (long i = 0; i < width; i += W) squares += widened(head + i) * widened(head + i);
  const float inverse = 1 / std::sqrt(total(squares) / width + epsilon);
  for (long i = 0; i < width; i += W) store_bf16(head + i, rounded(widened(head + i) * inverse) * widened(weight + i));
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

// y [out rows] of x [columns]; its key and its value are written behind the `length` that `keys` and `values` [heads of keys,
// room, width] hold.
extern "C" void moetool_self_attention(const SelfAttention* own, const uint16_t* x, const uint16_t* cosine, const uint16_t* sine,
                                       uint16_t* keys, uint16_t* values, long room, long length, uint16_t* y, int threads) {
  static thread_local Rooms kept;
  Rooms& rooms = kept;  // other threads have none of what is this one's own
  const SelfAttention& s = *own;
  const long width = s.width, mixed = s.heads * width;
  rooms.x.resize(s.query.columns);
  rooms.projected.resize((s.heads + 2 * s.keys) * width);
  rooms.attended.resize(mixed);
  rooms.mixed.resize(mixed);
  rooms.tasks.clear();
  widen(x, 0, s.query.columns, rooms.x.data());
  uint16_t* places[] = {rooms.projected.data(), rooms.projected.data() + mixed, rooms.projected.data() + mixed + s.keys * width};
  const Projection* projections[] = {&s.query, &s.key, &s.value};
  for (int p = 0; p < 3; p++)
    for (long begin = 0, step = piece(*projections[p]); begin < projections[p]->rows; begin += step)
      rooms.tasks.push_back({projections[p], begin, std::min((long)projections[p]->rows, begin + step), places[p]});
  const Cached key{(const uint8_t*)keys, 0, room * width, width}, value{(const uint8_t*)values, 0, room * width, width};
  const Attention attention{BF16,  1,     s.keys,  s.heads / s.keys, length + 1, width, width, (const uint8_t*)places[0],
                            key,   value, nullptr, 0,                s.scale,    (uint8_t*)rooms.attended.data()};
  const long step = piece(s.out);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores;
#pragma omp for schedule(dynamic)
    for (long i = 0; i < (long)rooms.tasks.size(); i++) {
      const Task& task = rooms.tasks[i];
      project(*task.projection, task.begin, task.end, rooms.x.data(), task.y);
    }
#pragma omp for
    for (long h = 0; h < s.heads + s.keys; h++) {
      const bool is_key = h >= s.heads;
      uint16_t* head = places[0] + h * width;
      if (const uint16_t* weight = is_key ? s.key_norm : s.query_norm)
        norm(head, weight, width, is_key ? s.key_epsilon : s.query_epsilon);
      rotate(head, cosine, sine, width);
      if (!is_key) continue;
      const long to = ((h - s.heads) * room + length) * width;
      memcpy(keys + to, head, 2 * width);
      memcpy(values + to, head + s.keys * width, 2 * width);
    }
#pragma omp for schedule(static)
    for (long i = 0; i < s.keys; i++) {
      attend<BF16>(attention, i, scores);
      const long each = mixed / s.keys;
      widen(rooms.attended.data(), i * each, (i + 1) * each, rooms.mixed.data());
    }
#pragma omp for schedule(dynamic)
    for (long begin = 0; begin < s.out.rows; begin += step)
      project(s.out, begin, std::min((long)s.out.rows, begin + step), rooms.mixed.data(), y);
  }
}
