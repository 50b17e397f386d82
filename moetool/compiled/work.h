// Products of pairs, an input and the expert that it chose: planned by one thread, done by all of a parallel region.
#pragma once
#include <vector>
#include "matrices.h"
#include "whole.h"

constexpr int TOKENS = 4;
// Tokens of one expert: their inputs and outputs.
struct Batch { int tokens; const float* x[TOKENS]; float* y[TOKENS]; };
struct Piece {
  const Operand* matrix;
  long begin, end;
  Batch batch;
  const Whole* whole[TOKENS];  // the inputs in whole numbers, if the matrix wants them
};
// Inputs in whole numbers, of every kind that a matrix wants.
struct Wholes {
  std::vector<Whole> found;       // [inputs, KINDS]
  std::vector<long> wanted;       // of these
  std::vector<uint8_t> is_wanted, memory;
  long columns = 0;

  void begin(long inputs, long in) {
    columns = in;
    wanted.clear();
    is_wanted.assign(inputs * KINDS, 0);
    found.resize(inputs * KINDS);
  }
  const Whole* want(long input, int kind) {
    const long index = input * KINDS + kind;
    if (!is_wanted[index]) wanted.push_back(index);
    is_wanted[index] = 1;
    return &found[index];
  }
  uint8_t* place(long i) { return memory.data() + (64 - (uintptr_t)memory.data() % 64) + i * whole_bytes(columns); }
  void make_room() {
    const size_t size = 64 + wanted.size() * whole_bytes(columns);
    if (memory.size() < size) memory.resize(size);
  }
  void make(const float* x, long i) {
    const long index = wanted[i];
    found[index] = in_whole_numbers(x + index / KINDS * columns, columns, index % KINDS, place(i));
  }
};
// y[p] = M(experts[p]) · x[inputs[p]] for every pair p. Kept from call to call, with its memory: a token makes hundreds.
class Work {
 public:
  // `table` has an Expert per row; experts outside 0 … count - 1 give zeros. `inputs` are those of pairs, ascending or not,
  // or null: each has its own. If it `may_round`, inputs are rounded to whole numbers where that is faster. What `x` holds
  // is read when it is done.
  void plan(const Expert* table, long count, const int64_t* experts, long pairs, const long* inputs, const float* x, long in,
            float* y, long out, bool may_round);
  void share();  // of every thread of a parallel region

 private:
  std::vector<long> order;
  std::vector<float> between;
  std::vector<Piece> stages[1 + TERMS];
  Wholes wholes;
  const float* x = nullptr;
  float* y = nullptr;
  long pairs = 0, out = 0;
};
