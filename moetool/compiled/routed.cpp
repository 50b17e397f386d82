// Products of a few tokens with stored matrices, each token with the matrices of its own expert, on a CPU.
//
// One token is bound by memory: a matrix is read once, as it is stored, and decoded in registers, next to the
// multiplication; a dense copy of it is never written. Up to four tokens of one expert share the decoding. Sums are
// fp32 and come in the same order whatever the number of threads and tokens. Shapes of which bytes do not serve whole
// rows are unpacked row by row into a buffer first, which takes about twice as long.
//
// Decoding to fp32 takes longer than memory does. Where it may, a product of plain codes is one of whole numbers
// (`whole.h`); for a token that is not finite it is not.
#include "sparse.h"
#include "trellis_rows.h"
#include "work.h"

// Rows of numbers may end within a vector: the last one then begins W before their end, where the others have been, and
// meets zeros there.
static bool in_vectors(const Operand& m) { return aligned(m) || (m.form <= F16 && !m.transposed && m.columns >= W); }
static inline vf last(const float* x, long columns) {
  float own[W];
  for (long i = 0; i < W; i++) own[i] = i < W - columns % W ? 0 : x[columns - W + i];
  return load(own);
}
// y[row] += M[row] · x for B calls of `decode` from q on, all groups; `ends` are the last vectors of x, if they are cut.
template <Form F, int N, int B> static inline void dot(const Operand m, long q, const Batch& batch, const vf* ends) {
  constexpr int P = served(F);
  const vf levels = looked_up(F) ? load(m.levels) : vf{};
  const long group = coded(F) ? m.group : m.columns, groups = m.columns / group;
  vf sums[B][P][N] = {};
  for (long g = 0; g < groups; g++) {
    const long start = g * group;
    vf part[B][P][N] = {};
    const auto add = [&](long i, const vf* x) {
#pragma GCC unroll 8
      for (int b = 0; b < B; b++) {
        vf w[P];
        decode<F>(m, levels, q + b, i, w);
#pragma GCC unroll 8
        for (int j = 0; j < P; j++)
#pragma GCC unroll 8
          for (int n = 0; n < N; n++) part[b][j][n] += w[j] * x[n];
      }
    };
    for (long i = start; i + W <= start + group; i += W) {
      vf x[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) x[n] = load(batch.x[n] + i);
      add(i, x);
    }
    if (!coded(F) && ends) add(m.columns - W, ends);
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) {
        const float s = coded(F) ? scale(m, row_of<F>(m, q + b, j) * groups + g) : 1;
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[b][j][n] += part[b][j][n] * s;
      }
  }
#pragma GCC unroll 8
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int j = 0; j < P; j++)
      for (int n = 0; n < N; n++) batch.y[n][place(m, row_of<F>(m, q + b, j))] += total(sums[b][j][n]);
}
#if defined(__AVX512VBMI__)
// The same in a trellis, for all rows that a byte serves.
template <Form F, int N> static inline void dot_many(const Operand m, const Halves& table, long q, const Batch& batch) {
  constexpr int P = bits(F) % 2 ? 8 : 8 / bits(F);
  const long groups = m.columns / m.group, stripe = m.rows / P;
  vf sums[P][N] = {};
  for (long i = 0; m.group % MANY && i < m.columns; i += MANY)  // groups end within what is decoded at a time
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) {
      float s[4];
      vf w[4];
      scales_of(m, q + j * stripe, i, s);
      decode_many<F>(m, table, q, j, i, w);
      for (int k = 0; k < 4; k++) {
        w[k] *= s[k];
        for (int n = 0; n < N; n++) sums[j][n] += w[k] * load(batch.x[n] + i + k * W);
      }
    }
  for (long g = 0; m.group % MANY == 0 && g < groups; g++) {
    vf part[P][N] = {};
    for (long i = g * m.group; i < (g + 1) * m.group; i += MANY)
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) {
        vf w[4];
        decode_many<F>(m, table, q, j, i, w);
        for (int n = 0; n < N; n++)
#pragma GCC unroll 8
          for (int k = 0; k < 4; k++) part[j][n] += w[k] * load(batch.x[n] + i + k * W);
      }
#pragma GCC unroll 8
    for (int j = 0; j < P; j++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[j][n] += part[j][n] * scale(m, (q + j * stripe) * groups + g);
  }
#pragma GCC unroll 8
  for (int j = 0; j < P; j++)
    for (int n = 0; n < N; n++) batch.y[n][place(m, q + j * stripe)] += total(sums[j][n]);
}
#endif
template <Form F, int N> static void dots(const Operand& m, long begin, long end, const Batch& batch) {
#if defined(__AVX512VBMI__)
  if constexpr (in_trellis(F))
    if (has_many(m)) {
      constexpr int each = bits(F) % 2 ? 2 : 1;  // calls that a byte is for
      const Halves& table = halves_of(m.levels);
      for (long q = begin / each; q < end / each; q++) dot_many<F, N>(m, table, q, batch);
      return;
    }
#endif
  constexpr int B = N == 1 && F != F32 ? 1 : 4 / served(F);  // one token: in one stream short rows take half the time
  vf tails[N];
  for (int n = 0; n < N && m.columns % W; n++) tails[n] = last(batch.x[n], m.columns);
  const vf* ends = m.columns % W ? tails : nullptr;
  long q = begin;
  for (; q + B <= end; q += B) dot<F, N, B>(m, q, batch, ends);
  for (; q < end; q++) dot<F, N, 1>(m, q, batch, ends);
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
      batch.y[n][place(m, r)] += rest;
    }
  }
}
// y[columns begin to end] += Σ over rows x[row] · M[row, column], B calls of `decode` from q on.
template <Form F, int N, int B> static inline void mix(const Operand m, long q, long begin, long end, const Batch& batch) {
  constexpr int P = served(F);
  const vf levels = looked_up(F) ? load(m.levels) : vf{};
  const long groups = coded(F) ? m.columns / m.group : 0;
  float x[B][P][N];
#pragma GCC unroll 8
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int j = 0; j < P; j++)
      for (int n = 0; n < N; n++) x[b][j][n] = batch.x[n][row_of<F>(m, q + b, j)];
  for (long c = begin; c < end; c += W) {
    const long g = coded(F) ? c / m.group : 0;
    vf sums[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sums[n] = load(batch.y[n] + c);
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) {
      vf w[P];
      decode<F>(m, levels, q + b, c, w);
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) {
        const float s = coded(F) ? scale(m, row_of<F>(m, q + b, j) * groups + g) : 1;
#pragma GCC unroll 8
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
      each_value(m, row, 0, m.columns, [&](long column, float value) {
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
  if (!in_vectors(m)) return m.transposed ? unaligned_mix(m, begin, end, batch) : unaligned_dots(m, begin, end, batch);
#define EACH(F) case F: return product<F>(m, begin, end, batch);
  switch (m.form) { FORMS(EACH) }
#undef EACH
}

// --------------------------------------------------------------------------------------------------------------- work
static void product(const Piece& p) {
  if (!p.whole[0]) return product(*p.matrix, p.begin, p.end, p.batch);
  Batch rest{};
  const Whole* x[TOKENS];
  float* y[TOKENS];
  int tokens = 0;
  for (int n = 0; n < p.batch.tokens; n++) {
    if (p.whole[n]->finite) {
      x[tokens] = p.whole[n];
      y[tokens++] = p.batch.y[n];
    } else {
      rest.x[rest.tokens] = p.batch.x[n];
      rest.y[rest.tokens++] = p.batch.y[n];
    }
  }
  if (tokens) whole_dots(*p.matrix, p.begin, p.end, tokens, x, y);
  if (rest.tokens) product(*p.matrix, p.begin, p.end, rest);
}
static void cut(std::vector<Piece>& pieces, const Operand& m, const Batch& batch, const Whole* const* whole) {
  long units = m.rows, size = std::max(8L, (1L << 15) / std::max(1L, (long)m.columns));
  if (m.transposed) {
    units = m.columns;
    size = std::max(1L, (1L << 18) / std::max(1L, (long)m.rows) / TILE) * TILE;
  } else if (aligned(m)) {
    units = m.rows / served((Form)m.form);
  }
  size = (size + 3) / 4 * 4;
  Piece piece{&m, 0, 0, batch, {}};
  for (int n = 0; whole && n < batch.tokens; n++) piece.whole[n] = whole[n];
  for (; piece.begin < units; piece.begin += size) {
    piece.end = std::min(units, piece.begin + size);
    pieces.push_back(piece);
  }
}
void Work::plan(const Expert* table, long count, const int64_t* experts, long pairs, const long* inputs, const float* x, long in,
                float* y, long out, bool may_round) {
  this->x = x, this->y = y, this->pairs = pairs, this->out = out;
  const auto input = [inputs](long pair) { return inputs ? inputs[pair] : pair; };
  long inner = 0, last = 0;
  order.clear();
  for (auto& stage : stages) stage.clear();
  for (long p = 0; p < pairs; p++) {
    last = std::max(last, input(p) + 1);
    if (experts[p] >= 0 && experts[p] < count) order.push_back(p);
  }
  wholes.begin(last, in);
  std::stable_sort(order.begin(), order.end(), [experts](long a, long b) { return experts[a] < experts[b]; });
  for (const long p : order)
    for (const Term& t : table[experts[p]].terms)
      if (t.last.form) inner = std::max(inner, (long)t.first.rows);
  between.assign(TERMS * inner * pairs, 0);
  for (size_t i = 0; i < order.size();) {
    const Expert& expert = table[experts[order[i]]];
    const size_t first = i;
    Batch batch{};
    for (const int64_t own = experts[order[i]]; i < order.size() && batch.tokens < TOKENS && experts[order[i]] == own; i++) {
      batch.x[batch.tokens] = x + input(order[i]) * in;
      batch.y[batch.tokens++] = y + order[i] * out;
    }
    for (int t = 0; t < TERMS; t++) {
      const Term& term = expert.terms[t];
      if (!term.first.form) continue;
      const int kind = may_round ? kind_of(term.first) : -1;
      const Whole* whole[TOKENS] = {};
      for (int n = 0; kind >= 0 && n < batch.tokens; n++) whole[n] = wholes.want(input(order[first + n]), kind);
      if (!term.last.form) { cut(stages[1 + t], term.first, batch, whole); continue; }
      Batch inward = batch, outward = batch;
      for (int n = 0; n < batch.tokens; n++)
        outward.x[n] = inward.y[n] = between.data() + ((TERMS * (first + n)) + t) * inner;
      cut(stages[0], term.first, inward, whole);
      cut(stages[1 + t], term.last, outward, nullptr);
    }
  }
  wholes.make_room();
}
void Work::share() {
#pragma omp for nowait
  for (long p = 0; p < pairs; p++) std::fill(y + p * out, y + (p + 1) * out, 0.f);
#pragma omp for
  for (long i = 0; i < (long)wholes.wanted.size(); i++) wholes.make(x, i);
  for (const auto& stage : stages) {
    if (stage.empty()) continue;
#pragma omp for schedule(dynamic)
    for (long i = 0; i < (long)stage.size(); i++) product(stage[i]);
  }
}

extern "C" void moetool_routed(const Expert* table, long count, const int64_t* experts, long pairs, const float* x,
                               long in, float* y, long out, int threads, int may_round) {
  static thread_local Work own;
  Work& work = own;  // other threads have none of what is this one's own
  work.plan(table, count, experts, pairs, nullptr, x, in, y, out, may_round);
#pragma omp parallel num_threads(threads)
  work.share();
}
