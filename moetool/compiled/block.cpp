// Experts of a layer on a few tokens in one call: what enters, the activation, what leaves and the weighted sum, by the
// threads of one parallel region, which wait in it for one another. Nothing is allocated but for more than ever before.
#include "exponential.h"
#include "rows.h"
#include "work.h"

struct Block {
  const Expert* first;   // of every entering role (the gate before up) all experts, and then the base if it `is_based[0]`
  const Expert* second;  // down matrices of all experts, and then their base if it `is_based[1]`
  int64_t roles, experts, is_based[2];
  const float* uses;     // [roles + 1, experts]: 1 where a matrix is a delta to the base, else 0; null if all are
  int64_t hidden, inner;
};

// The activation, silu.
static inline vf activated(vf x) { return x / (1.f + exponential(-x)); }

struct Room {
  std::vector<float> hidden, weights, found, given, outputs;
  std::vector<int64_t> first, second;
  std::vector<long> inputs;
  Work entering, leaving;
};
// A vector of a row of `columns` numbers, zeros behind its end.
static inline vf load_part(const float* row, long i, long columns) {
  if (i + W <= columns) return load(row + i);
  vf v{};
  memcpy(&v, row + i, 4 * (columns - i));
  return v;
}
static inline void store_part(float* row, long i, long columns, vf v) { memcpy(row + i, &v, 4 * std::min(W, columns - i)); }

// Columns `begin` to `end` of a token's activations, times its weights, and what the base is given: their sum.
static void activate(const Block& block, const int64_t* chosen, const float* weights, long token, long tokens, long k, long begin,
                     long end, const float* found, float* given) {
  const long in = block.inner, each = k + block.is_based[0], kept = k + block.is_based[1], E = block.experts;
  for (long c = begin; c < end; c += W) {
    vf base[2] = {}, sum{};
    for (int r = 0; block.is_based[0] && r < block.roles; r++)
      base[r] = load_part(found + ((r * tokens + token) * each + k) * in, c, in);
    for (long j = 0; j < k; j++) {
      const long expert = chosen[token * k + j];
      vf value{};
      if (expert >= 0 && expert < E) {
        vf entered[2];
        for (int r = 0; r < block.roles; r++) {
          entered[r] = load_part(found + ((r * tokens + token) * each + j) * in, c, in);
          if (block.is_based[0]) entered[r] += block.uses ? base[r] * block.uses[r * E + expert] : base[r];
        }
        value = activated(entered[0]);
        if (block.roles == 2) value = value * entered[1];
        value = value * weights[token * k + j];
        sum += block.uses ? value * block.uses[block.roles * E + expert] : value;
      }
      store_part(given + (token * kept + j) * in, c, in, value);
    }
    if (block.is_based[1]) store_part(given + (token * kept + k) * in, c, in, sum);
  }
}

// y [tokens, hidden] = Σ of k experts' outputs, weighted; x and y are numbers of the form `numbers`, weights of another.
// Experts outside 0 … experts - 1 give nothing.
extern "C" void moetool_block(const Block* own, const uint8_t* x, int64_t numbers, const int64_t* chosen, const uint8_t* weights,
                              int64_t weighted, long tokens, long k, uint8_t* y, int threads, int may_round) {
  static thread_local Room kept_room;
  Room& room = kept_room;  // other threads have none of what is this one's own
  const Block& block = *own;
  const long in = block.inner, width = block.hidden, size = numbers == F32 ? 4 : 2;
  const long each = k + block.is_based[0], kept = k + block.is_based[1];
  const long stripe = block.experts + block.is_based[0];
  room.first.resize(block.roles * tokens * each);
  room.inputs.resize(block.roles * tokens * each);
  room.second.resize(tokens * kept);
  room.hidden.resize(tokens * width + W);
  room.weights.resize(tokens * k);
  room.found.resize(block.roles * tokens * each * in);
  room.given.resize(tokens * kept * in);
  room.outputs.resize(tokens * kept * width + W);
  for (long t = 0; t < tokens; t++)
    for (long j = 0; j < std::max(each, kept); j++) {
      const long expert = j < k ? chosen[t * k + j] : block.experts;
      const bool is_here = j == k || (expert >= 0 && expert < block.experts);
      for (long r = 0; j < each && r < block.roles; r++) {
        room.first[(r * tokens + t) * each + j] = is_here ? r * stripe + expert : -1;
        room.inputs[(r * tokens + t) * each + j] = t;
      }
      if (j < kept) room.second[t * kept + j] = is_here ? expert : -1;
      if (j < k) room.weights[t * k + j] = number(weights, weighted, t * k + j);
    }
  for (long i = 0; i < tokens * width; i++) room.hidden[i] = number(x, numbers, i);
  room.entering.plan(block.first, block.roles * stripe, room.first.data(), room.first.size(), room.inputs.data(),
                     room.hidden.data(), width, room.found.data(), in, may_round);
  room.leaving.plan(block.second, block.experts + block.is_based[1], room.second.data(), room.second.size(), nullptr,
                    room.given.data(), in, room.outputs.data(), width, may_round);
  const long parts = (in + TILE - 1) / TILE;
#pragma omp parallel num_threads(threads)
  {
    room.entering.share();
#pragma omp for
    for (long i = 0; i < tokens * parts; i++) {
      const long begin = i % parts * TILE;
      activate(block, chosen, room.weights.data(), i / parts, tokens, k, begin, std::min(in, begin + TILE), room.found.data(),
               room.given.data());
    }
    room.leaving.share();
#pragma omp for
    for (long t = 0; t < tokens; t++) {
      float* sum = room.outputs.data() + t * kept * width;
      for (long j = 1; j < kept; j++)
        for (long c = 0; c < width; c++) sum[c] += sum[j * width + c];
      round_row(sum, width, numbers, y + t * width * size);
    }
  }
}
