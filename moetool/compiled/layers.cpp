// All layers of a model on one token in one call: what each does around its experts, these, and their sum with what was before.
#include <vector>
#include "vectors.h"

struct Layer;  // of projected.cpp
struct Block;  // of block.cpp
extern "C" void moetool_layer(const Layer* own, const uint16_t* x, const uint16_t* cosine, const uint16_t* sine, uint16_t* keys,
                              uint16_t* values, long room, long length, uint16_t* stream, uint16_t* normed, int64_t* experts,
                              float* weights, int threads, int may_round);
extern "C" void moetool_block(const Block* own, const uint8_t* x, int64_t numbers, const int64_t* chosen, const uint8_t* weights,
                              int64_t weighted, long tokens, long k, uint8_t* y, int threads, int may_round);

struct Step {
  const Layer* layer;
  const Block* experts;
  int64_t chosen, rounds;  // experts of a token, and whether their weights are rounded to bf16
  uint16_t *keys, *values;
  int64_t room, length;  // of the cache, as moetool_layer takes them
};
constexpr int64_t F32 = 1, BF16 = 2;  // as matrices.h numbers them

static inline vf widened(const uint16_t* p) { return (vf)((vu)shorts(p) << 16); }

// x [hidden], a multiple of W, in bf16, becomes what the last layer gives; experts [Σ chosen] are those that were met.
extern "C" void moetool_layers(const Step* steps, long count, uint16_t* x, long hidden, const uint16_t* cosine,
                               const uint16_t* sine, int64_t* experts, int threads, int may_round) {
  static thread_local struct { std::vector<uint16_t> stream, normed, given; std::vector<float> weights; } kept;
  auto& rooms = kept;
  for (auto* own : {&rooms.stream, &rooms.normed, &rooms.given}) own->resize(hidden);
  for (long s = 0; s < count; s++) {
    const Step& step = steps[s];
    rooms.weights.resize((step.chosen + W - 1) / W * W);
    float* weights = rooms.weights.data();
    moetool_layer(step.layer, x, cosine, sine, step.keys, step.values, step.room, step.length, rooms.stream.data(),
                  rooms.normed.data(), experts, weights, threads, may_round);
    for (long i = 0; step.rounds && i < step.chosen; i += W) {
      uint16_t rounded[W];
      store_bf16(rounded, load(weights + i));
      store(weights + i, widened(rounded));
    }
    moetool_block(step.experts, (const uint8_t*)rooms.normed.data(), BF16, experts, (const uint8_t*)weights, F32, 1, step.chosen,
                  (uint8_t*)rooms.given.data(), threads, may_round);
    for (long i = 0; i < hidden; i += W) store_bf16(x + i, widened(rooms.stream.data() + i) + widened(rooms.given.data() + i));
    experts += step.chosen;
  }
}
