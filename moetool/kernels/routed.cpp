// Products of a few tokens with stored matrices, each token with the matrices of its own expert, on a CPU.
//
// One token is bound by memory: a matrix is read once, as it is stored, and decoded in registers, next to the
// multiplication; a dense copy of it is never written. Up to four tokens of one expert share the decoding. Sums are
// fp32 and come in the same order whatever the number of threads and tokens. Shapes of which bytes do not serve whole
// rows are unpacked row by row into a buffer first, which takes about twice as long.
#include <vector>
#include "matrices.h"
#include "sparse.h"

constexpr int TOKENS = 4;
// Tokens of one expert: their inputs and outputs.
struct Batch { int tokens; const float* x[TOKENS]; float* y[TOKENS]; };

// y[row] += M[row] · x for B calls of `decode` from q on, all groups.
template <Form F, int N, int B> static inline void dot(const Operand m, long q, const Batch& batch) {
  constexpr int P = served(F);
  const vf levels = looked_up(F) ? load(m.levels) : vf{};
  const long group = coded(F) ? m.group : m.columns, groups = m.columns / group;
  vf sums[B][P][N] = {};
  for (long g = 0; g < groups; g++) {
    const long start = g * group;
    vf part[B][P][N] = {};
    for (long i = start; i < start + group; i += W) {
      vf x[N];
      for (int n = 0; n < N; n++) x[n] = load(batch.x[n] + i);
      for (int b = 0; b < B; b++) {
        vf w[P];
        decode<F>(m, levels, q + b, i, w);
        for (int j = 0; j < P; j++)
          for (int n = 0; n < N; n++) part[b][j][n] += w[j] * x[n];
      }
    }
    for (int b = 0; b < B; b++)
      for (int j = 0; j < P; j++) {
        const float s = coded(F) ? scale(m, row_of<F>(m, q + b, j) * groups + g) : 1;
        for (int n = 0; n < N; n++) sums[b][j][n] += part[b][j][n] * s;
      }
  }
  for (int b = 0; b < B; b++)
    for (int j = 0; j < P; j++)
      for (int n = 0; n < N; n++) batch.y[n][row_of<F>(m, q + b, j)] += total(sums[b][j][n]);
}
template <Form F, int N> static void dots(const Operand& m, long begin, long end, const Batch& batch) {
  constexpr int B = 4 / served(F);
  long q = begin;
  for (; q + B <= end; q += B) dot<F, N, B>(m, q, batch);
  for (; q < end; q++) dot<F, N, 1>(m, q, batch);
}
// The same where bytes do not serve whole rows: `begin` and `end` are rows.
static void unaligned_dots(const Operand& m, long begin, long end, const Batch& batch) {
  std::vector<vf> memory(m.columns / W + 1);
  float* row = (float*)memory.data();
  for (long r = begin; r < end; r++) {
    unpack(m, r, 0, m.columns, row);
    for (int n = 0; n < batch.tokens; n++) {
      vf sum = {};
      long i = 0;
      for (; i + W <= m.columns; i += W) sum += load(row + i) * load(batch.x[n] + i);
      float rest = total(sum);
      for (; i < m.columns; i++) rest += row[i] * batch.x[n][i];
      batch.y[n][r] += rest;
    }
  }
}
// y[columns begin to end] += Σ over rows x[row] · M[row, column], B calls of `decode` from q on.
template <Form F, int N, int B> static inline void mix(const Operand m, long q, long begin, long end, const Batch& batch) {
  constexpr int P = served(F);
  const vf levels = looked_up(F) ? load(m.levels) : vf{};
  const long groups = coded(F) ? m.columns / m.group : 0;
  float x[B][P][N];
  for (int b = 0; b < B; b++)
    for (int j = 0; j < P; j++)
      for (int n = 0; n < N; n++) x[b][j][n] = batch.x[n][row_of<F>(m, q + b, j)];
  for (long c = begin; c < end; c += W) {
    const long g = coded(F) ? c / m.group : 0;
    vf sums[N];
    for (int n = 0; n < N; n++) sums[n] = load(batch.y[n] + c);
    for (int b = 0; b < B; b++) {
      vf w[P];
      decode<F>(m, levels, q + b, c, w);
      for (int j = 0; j < P; j++) {
        const float s = coded(F) ? scale(m, row_of<F>(m, q + b, j) * groups + g) : 1;
        for (int n = 0; n < N; n++) sums[n] += w[j] * (s * x[b][j][n]);
      }
    }
    for (int n = 0; n < N; n++) store(batch.y[n] + c, sums[n]);
  }
}
// Row after row, as they lie in memory: y stays in the cache.
template <Form F, int N> static void mix(const Operand& m, long begin, long end, const Batch& batch) {
  constexpr int B = 4 / served(F);
  long q = 0;
  for (; q + B <= calls<F>(m); q += B) mix<F, N, B>(m, q, begin, end, batch);
  for (; q < calls<F>(m); q++) mix<F, N, 1>(m, q, begin, end, batch);
}
static void unaligned_mix(const Operand& m, long begin, long end, const Batch& batch) {
  for (long c = begin; c < end; c += TILE) {
    const long length = std::min(TILE, end - c);
    float piece[TILE] = {}, sums[TOKENS][TILE] = {};
    for (long r = 0; r < m.rows; r++) {
      unpack(m, r, c, length, piece);
      for (int n = 0; n < batch.tokens; n++)
        for (long i = 0; i < TILE; i++) sums[n][i] += piece[i] * batch.x[n][r];
    }
    for (int n = 0; n < batch.tokens; n++)
      for (long i = 0; i < length; i++) batch.y[n][c + i] += sums[n][i];
  }
}
// Rows `begin` to `end` of a sparse matrix.
static void sparse_dots(const Operand& m, long begin, long end, const Batch& batch) {
  const int32_t *at = (const int32_t*)m.scales, *stop = at + m.count;
  if (m.group == 1) {  // rows without values cost nothing
    for (const int32_t* p = std::lower_bound(at, stop, begin * m.columns); p < stop && *p < end * m.columns;) {
      const long row = *p / m.columns;
      float sums[TOKENS] = {};
      for (; p < stop && *p < (row + 1) * m.columns; p++) {
        const float value = number(m.data, m.numbers, p - at);
        for (int n = 0; n < batch.tokens; n++) sums[n] += value * batch.x[n][*p - row * m.columns];
      }
      for (int n = 0; n < batch.tokens; n++) batch.y[n][row] += sums[n];
    }
    return;
  }
  for (long row = begin; row < end; row++) {
    float sums[TOKENS] = {};
    if (!spread_dots(m, row, batch.x, batch.tokens, sums))
      each_value(m, row, [&](long column, float value) {
        for (int n = 0; n < batch.tokens; n++) sums[n] += value * batch.x[n][column];
      });
    for (int n = 0; n < batch.tokens; n++) batch.y[n][row] += sums[n];
  }
}
template <Form F, int N> static void product(const Operand& m, long begin, long end, const Batch& batch) {
  m.transposed ? mix<F, N>(m, begin, end, batch) : dots<F, N>(m, begin, end, batch);
}
template <Form F> static void product(const Operand& m, long begin, long end, const Batch& batch) {
  switch (batch.tokens) {
    case 1: return product<F, 1>(m, begin, end, batch);
    case 2: return product<F, 2>(m, begin, end, batch);
    case 3: return product<F, 3>(m, begin, end, batch);
    default: return product<F, 4>(m, begin, end, batch);
  }
}
static void product(const Operand& m, long begin, long end, const Batch& batch) {
  if (m.form == SPARSE) return sparse_dots(m, begin, end, batch);
  if (!aligned(m)) return m.transposed ? unaligned_mix(m, begin, end, batch) : unaligned_dots(m, begin, end, batch);
  switch (m.form) {
    case F32: return product<F32>(m, begin, end, batch);
    case BF16: return product<BF16>(m, begin, end, batch);
    case F16: return product<F16>(m, begin, end, batch);
    case CODES1: return product<CODES1>(m, begin, end, batch);
    case CODES2: return product<CODES2>(m, begin, end, batch);
    case CODES3: return product<CODES3>(m, begin, end, batch);
    case CODES4: return product<CODES4>(m, begin, end, batch);
    case CODES8: return product<CODES8>(m, begin, end, batch);
    case NF4: return product<NF4>(m, begin, end, batch);
    case INT8: return product<INT8>(m, begin, end, batch);
  }
}

// --------------------------------------------------------------------------------------------------------------- work
struct Piece { const Operand* matrix; long begin, end; Batch batch; };

static void cut(std::vector<Piece>& pieces, const Operand& m, const Batch& batch) {
  long units = m.rows, size = std::max(8L, (1L << 15) / std::max(1L, (long)m.columns));
  if (m.transposed) {
    units = m.columns;
    size = std::max(1L, (1L << 18) / std::max(1L, (long)m.rows) / TILE) * TILE;
  } else if (aligned(m)) {
    units = m.rows / (m.form == CODES4 ? 2 : m.form >= CODES1 && m.form <= CODES3 ? 4 : 1);
  }
  size = (size + 3) / 4 * 4;
  for (long begin = 0; begin < units; begin += size) pieces.push_back({&m, begin, std::min(units, begin + size), batch});
}
static void run(const std::vector<Piece>& pieces, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long i = 0; i < (long)pieces.size(); i++) {
    const Piece& p = pieces[i];
    product(*p.matrix, p.begin, p.end, p.batch);
  }
}

// y[p] = M(experts[p]) · x[p] for every pair p. `table` has an Expert per row; experts outside 0 … count - 1 give zeros.
extern "C" void moetool_routed(const Expert* table, long count, const int64_t* experts, long pairs, const float* x,
                               long in, float* y, long out, int threads) {
  std::vector<long> order;
  for (long p = 0; p < pairs; p++)
    if (experts[p] >= 0 && experts[p] < count) order.push_back(p);
  std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return experts[a] < experts[b]; });
  memset(y, 0, sizeof(float) * pairs * out);
  long inner = 0;
  for (long e = 0; e < count; e++)
    for (const Term& t : table[e].terms)
      if (t.last.form) inner = std::max(inner, (long)t.first.rows);
  std::vector<float> between(2 * inner * pairs);
  std::vector<Piece> stages[3];
  for (size_t i = 0; i < order.size();) {
    const Expert& expert = table[experts[order[i]]];
    Batch batch{};
    for (const int64_t own = experts[order[i]]; i < order.size() && batch.tokens < TOKENS && experts[order[i]] == own; i++) {
      batch.x[batch.tokens] = x + order[i] * in;
      batch.y[batch.tokens++] = y + order[i] * out;
    }
    for (int t = 0; t < 2; t++) {
      const Term& term = expert.terms[t];
      if (!term.first.form) continue;
      if (!term.last.form) { cut(stages[1 + t], term.first, batch); continue; }
      Batch inward = batch, outward = batch;
      for (int n = 0; n < batch.tokens; n++)
        outward.x[n] = inward.y[n] = between.data() + ((2 * (i - batch.tokens + n)) + t) * inner;
      cut(stages[0], term.first, inward);
      cut(stages[1 + t], term.last, outward);
    }
  }
  for (const auto& stage : stages) run(stage, threads);
}


// --------------------------------------------------------------------------------------------------------- unpacking
// row += M[r], scaled; `row` has as many numbers as M has columns.
template <Form F> static void add_row(const Operand m, long r, float* row) {
  const vf levels = looked_up(F) ? load(m.levels) : vf{};
  const long group = coded(F) ? m.group : m.columns, groups = m.columns / group;
  for (long g = 0; g < groups; g++) {
    const float s = coded(F) ? scale(m, r * groups + g) : 1;
    for (long i = g * group; i < (g + 1) * group; i += W)
      store(row + i, load(row + i) + decode_row<F>(m, levels, r, i) * s);
  }
}
static void add_row(const Operand& m, long r, float* row, float* spare) {
  if (m.form == SPARSE) {
    each_value(m, r, [&](long column, float value) { row[column] += value; });
    return;
  }
  if (!aligned(m)) {
    unpack(m, r, 0, m.columns, spare);
    for (long i = 0; i < m.columns; i++) row[i] += spare[i];
    return;
  }
  switch (m.form) {
    case F32: return add_row<F32>(m, r, row);
    case BF16: return add_row<BF16>(m, r, row);
    case F16: return add_row<F16>(m, r, row);
    case CODES1: return add_row<CODES1>(m, r, row);
    case CODES2: return add_row<CODES2>(m, r, row);
    case CODES3: return add_row<CODES3>(m, r, row);
    case CODES4: return add_row<CODES4>(m, r, row);
    case CODES8: return add_row<CODES8>(m, r, row);
    case NF4: return add_row<NF4>(m, r, row);
    case INT8: return add_row<INT8>(m, r, row);
  }
}
// `row` has room for whole vectors.
static void round_row(const float* row, long columns, int64_t form, uint8_t* out) {
  if (form == F32) { memcpy(out, row, 4 * columns); return; }
  for (long i = 0; i < columns; i += W) {
    uint16_t last[W];
    uint16_t* p = i + W <= columns ? (uint16_t*)out + i : last;
    form == BF16 ? store_bf16(p, load(row + i)) : store_f16(p, load(row + i));
    if (p == last) memcpy((uint16_t*)out + i, last, 2 * (columns - i));
  }
}
// What is asked for most often, in one go: codes, and a base in bf16 or codes if there is one, into bf16.
// The operands are copies: nothing that is written can be part of them, so that what is the same for all of a row is
// computed once.
template <Form F, Form BASE> static void fused_row(const Operand m, const Operand base, long r, uint16_t* out) {
  const vf levels = looked_up(F) ? load(m.levels) : vf{}, base_levels = looked_up(BASE) ? load(base.levels) : vf{};
  const long groups = m.columns / m.group;
  for (long g = 0; g < groups; g++) {
    const float s = scale(m, r * groups + g), t = coded(BASE) ? scale(base, r * groups + g) : 1;
    for (long i = g * m.group; i < (g + 1) * m.group; i += W) {
      vf w = decode_row<F>(m, levels, r, i) * s;
      if (BASE == BF16)  // 2 KB ahead: the processor's own guess ends with the page
        __builtin_prefetch((const uint16_t*)base.data + r * m.columns + i + 1024);
      if (BASE != NONE) w += decode_row<BASE>(base, base_levels, r, i) * t;
      store_bf16(out + i, w);
    }
  }
}
template <Form F> static bool fused_row(const Operand& m, const Operand& base, long r, uint16_t* out) {
  switch (base.form) {
    case NONE: fused_row<F, NONE>(m, base, r, out); return true;
    case BF16: fused_row<F, BF16>(m, base, r, out); return true;
    case CODES2: fused_row<F, CODES2>(m, base, r, out); return true;
    case CODES3: fused_row<F, CODES3>(m, base, r, out); return true;
    case CODES4: fused_row<F, CODES4>(m, base, r, out); return true;
    case CODES8: fused_row<F, CODES8>(m, base, r, out); return true;
  }
  return false;
}
static bool fused_row(const Operand* matrices, long count, long r, uint16_t* out) {
  const Operand base = count == 2 ? matrices[1] : Operand{};
  if (count > 2 || !aligned(matrices[0])) return false;
  if (base.form && (!aligned(base) || (base.form != BF16 && base.group != matrices[0].group))) return false;
  switch (matrices[0].form) {
    case CODES1: return fused_row<CODES1>(matrices[0], base, r, out);
    case CODES2: return fused_row<CODES2>(matrices[0], base, r, out);
    case CODES3: return fused_row<CODES3>(matrices[0], base, r, out);
    case CODES4: return fused_row<CODES4>(matrices[0], base, r, out);
    case CODES8: return fused_row<CODES8>(matrices[0], base, r, out);
    case NF4: return fused_row<NF4>(matrices[0], base, r, out);
  }
  return false;
}
// out [end - begin, columns] = the rows `begin` to `end` of the sum of matrices [rows, columns], in the form `numbers`.
extern "C" void moetool_unpack(const Operand* matrices, long count, long begin, long end, uint8_t* out, int64_t numbers,
                               int threads) {
  const long columns = matrices[0].columns;
#pragma omp parallel num_threads(threads)
  {
    std::vector<vf> row_memory(columns / W + 1), spare_memory(columns / W + 1);  // vectors lie where they are fast
    float *row = (float*)row_memory.data(), *spare = (float*)spare_memory.data();
#pragma omp for schedule(dynamic, 16)
    for (long r = begin; r < end; r++) {
      uint8_t* target = out + (r - begin) * columns * (numbers == F32 ? 4 : 2);
      if (numbers == BF16 && fused_row(matrices, count, r, (uint16_t*)target)) continue;
      std::fill(row, row + columns, 0.f);
      for (long i = 0; i < count; i++) add_row(matrices[i], r, row, spare);
      round_row(row, columns, numbers, target);
    }
  }
}
