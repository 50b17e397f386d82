// Attention of one token of each sequence to the keys in a cache, on a CPU: keys and values are read once, where they lie,
// for all heads of queries that share them. Sums are fp32 and come in the same order whatever the number of threads.
#pragma once
#include <vector>
#include "exponential.h"
#include "matrices.h"

struct Cached {  // [batch, heads, length, width] of which the last dimension lies together
  const uint8_t* data;
  int64_t batch, head, token;  // from one to the next, in numbers
};
struct Attention {
  int64_t numbers, batch, heads, groups, length, width, values;  // `groups` heads of queries for each of keys
  const uint8_t* queries;  // [batch, heads · groups, width]
  Cached key, value;
  const float* bias;       // [batch, length], added to scores; null if there is none
  int64_t biased;          // from one sequence's to the next, 0 if all have the same
  float scale;
  uint8_t* out;            // [batch, heads · groups, values]
};
template <Form F> static inline vf read(const uint8_t* p, long i) {
  if (F == F32) return load((const float*)p + i);
  if (F == BF16) return (vf)((vu)shorts((const uint16_t*)p + i) << 16);
  return halves((const uint16_t*)p + i);
}
template <Form F> static inline void write(uint8_t* p, long i, vf v) {
  if (F == F32) store((float*)p + i, v);
  else if (F == BF16) store_bf16((uint16_t*)p + i, v);
  else store_f16((uint16_t*)p + i, v);
}
// scores[n][t] = queries[n] · key t, of N heads.
template <Form F, int N>
static void score(const Attention& a, const uint8_t* keys, const float* queries, float* scores, long apart) {
  for (long t = 0; t < a.length; t++) {
    vf sums[N] = {};
    for (long i = 0; i < a.width; i += W) {
      const vf key = read<F>(keys, t * a.key.token + i);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[n] += key * load(queries + n * a.width + i);
    }
    for (int n = 0; n < N; n++) scores[n * apart + t] = total(sums[n]);
  }
}
// Scores to shares, whose sum is given; none where nothing may be attended to.
static float shares(float* scores, long length, const float* bias) {
  float most = -INFINITY;
  for (long t = 0; t < length; t++) {
    if (bias) scores[t] += bias[t];
    most = scores[t] > most || scores[t] != scores[t] ? scores[t] : most;  // what is no number stays in
  }
  vf sum{};
  for (long t = 0; t < length; t += W) {
    vf own{};
    for (long i = 0; i < W; i++) own[i] = t + i < length ? scores[t + i] : -INFINITY;
    own = most == -INFINITY ? vf{} : exponential(own - most);
    store(scores + t, own);
    sum += own;
  }
  return total(sum);
}
// out[n] = Σ scores[n][t] · value t / sums[n], of N heads, 64 numbers at a time where there are so many.
template <Form F, int N, int V>
static void mix(const Attention& a, const uint8_t* values, const float* scores, long apart, const float* sums, long first, uint8_t* out) {
  vf mixed[N][V] = {};
  for (long t = 0; t < a.length; t++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const vf value = read<F>(values, t * a.value.token + first + v * W);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) mixed[n][v] += value * scores[n * apart + t];
    }
  for (int n = 0; n < N; n++)
    for (int v = 0; v < V; v++) write<F>(out, n * a.values + first + v * W, mixed[n][v] * (sums[n] ? 1 / sums[n] : 0));
}
template <Form F, int N>
static void heads(const Attention& a, long batch, long head, long group, std::vector<float>& room) {
  const long size = a.numbers == F32 ? 4 : 2, apart = (a.length + W - 1) / W * W, first = (batch * a.heads + head) * a.groups + group;
  room.resize(N * (apart + a.width));
  float *scores = room.data(), *queries = scores + N * apart, sums[N];
  for (long i = 0; i < N * a.width; i += W) store(queries + i, read<F>(a.queries, first * a.width + i) * a.scale);
  score<F, N>(a, a.key.data + size * (batch * a.key.batch + head * a.key.head), queries, scores, apart);
  for (int n = 0; n < N; n++) sums[n] = shares(scores + n * apart, a.length, a.bias ? a.bias + batch * a.biased : nullptr);
  const uint8_t* values = a.value.data + size * (batch * a.value.batch + head * a.value.head);
  uint8_t* out = a.out + size * first * a.values;
  long i = 0;
  for (; i + 4 * W <= a.values; i += 4 * W) mix<F, N, 4>(a, values, scores, apart, sums, i, out);
  for (; i < a.values; i += W) mix<F, N, 1>(a, values, scores, apart, sums, i, out);
}
// All heads of queries that share the i-th of the heads of keys, of all sequences.
template <Form F> static void attend(const Attention& a, long i, std::vector<float>& room) {
  long g = 0;
  for (; g + 4 <= a.groups; g += 4) heads<F, 4>(a, i / a.heads, i % a.heads, g, room);
  for (; g + 2 <= a.groups; g += 2) heads<F, 2>(a, i / a.heads, i % a.heads, g, room);
  for (; g < a.groups; g++) heads<F, 1>(a, i / a.heads, i % a.heads, g, room);
}
