// Products of many tokens with stored matrices, on a CPU: matrices are written out, a part at a time.
#include "rows.h"
#include "tiles.h"

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
      std::fill(row, row + columns, 0.f);
      for (long i = 0; i < count; i++) add_row(matrices[i], r, 0, columns, row, spare);
      round_row(row, columns, numbers, out + (r - begin) * columns * (numbers == F32 ? 4 : 2));
    }
  }
}

#if defined(MOETOOL_TILES)
constexpr long HIGH = 32;    // rows that are written out at a time, and
constexpr long DEEP = 1024;  // their columns: a core has them near, and memory is read in long enough runs
constexpr long WIDE = 512;   // inputs that meet them
// Rows of a matrix that is cut into stripes of `stripe` rows: `length` of every one from `first` on.
struct Rows { long stripes, stripe, first, length; };

// panel[row][begin to end]: the columns behind the end are zero up to whole lines.
static void fill(const Operand* matrices, long count, const Rows& rows, long begin, long end, uint16_t* panel) {
  const long apart = (end - begin + LINE - 1) / LINE * LINE;
  if (apart > end - begin)
    for (long p = 0; p < HIGH; p++) memset(panel + p * apart + apart - LINE, 0, 2 * LINE);
  if (rows.stripes == 8) {
    for (long i = 0; i < rows.length; i++)
      octets(matrices, count, rows.first + i, begin, end, panel + i * apart, HIGH / 8 * apart);
    return;
  }
  vf row[DEEP / W], spare[DEEP / W];
  for (long i = 0; i < rows.length; i++) {
    memset(row, 0, sizeof row);
    for (long m = 0; m < count; m++) add_row(matrices[m], rows.first + i, begin, end, (float*)row, (float*)spare);
    round_row((float*)row, end - begin, BF16, (uint8_t*)(panel + i * apart));
  }
}
// sums[panel][row][tokens]: `HIGH / stripes` rows of a stripe are in one panel, and the next ones in the next.
static void write(const float* sums, long width, const Rows& rows, long out, uint16_t* y, long tokens) {
  const long step = HIGH / rows.stripes;
  for (long s = 0; s < rows.stripes; s++)
    for (long i = 0; i < rows.length; i += 16) {
      const float* lines[16];
      for (long j = 0; j < 16; j++) lines[j] = sums + ((i + j) / step * HIGH + s * step + (i + j) % step) * width;
      for (long n = 0; n < tokens; n += 16)
        put(lines, n, y + n * out + s * rows.stripe + rows.first + i, out, std::min(16L, rows.length - i),
            std::min(16L, tokens - n));
    }
}
#endif
// Whether there is `moetool_multiply`: not every processor has products of bf16. 2 if they are AMX's.
extern "C" int moetool_multiplies() {
#if defined(MOETOOL_TILES)
  return has_amx() ? 2 : 1;
#else
  return 0;
#endif
}
// y [tokens, rows] = x [tokens, columns] · Mᵀ, M the sum of matrices, all in bf16.
extern "C" void moetool_multiply(const Operand* matrices, long count, const uint16_t* x, long tokens, uint16_t* y,
                                int threads) {
#if defined(MOETOOL_TILES)
  const long rows = matrices[0].rows, columns = matrices[0].columns, padded = (columns + LINE - 1) / LINE * LINE;
  const long stripes = has_octets(matrices, count) ? 8 : 1, stripe = rows / stripes;
  const long step = HIGH / stripes;
  long length = 4 * step;  // at least four parts for a thread, if there are enough rows
  while (length > std::max(16L, step) && stripe < 4 * threads * length) length /= 2;
  const long parts = (stripe + length - 1) / length, wide = std::min(WIDE, (tokens + 15) / 16 * 16);
  std::vector<vf> packed(wide * padded / (2 * W));
#pragma omp parallel num_threads(threads)
  {
    std::vector<vf> panel_memory(HIGH * DEEP / (2 * W)), sums_memory(length * stripes * wide / W);
    uint16_t *panel = (uint16_t*)panel_memory.data(), *tiles = (uint16_t*)packed.data();
    float* sums = (float*)sums_memory.data();
    begin_tiles();
    for (long first = 0; first < tokens; first += wide) {
      const long given = std::min(wide, tokens - first), width = (given + 15) / 16 * 16;
#pragma omp for
      for (long n = 0; n < given; n += 16)
        pack(x + (first + n) * columns, std::min(16L, given - n), columns, tiles + n * padded);
#pragma omp for schedule(dynamic)
      for (long part = 0; part < parts; part++) {
        const Rows own{stripes, stripe, part * length, std::min(length, stripe - part * length)};
        memset(sums, 0, 4 * length * stripes * width);
        for (long begin = 0; begin < columns; begin += DEEP) {
          const long end = std::min(columns, begin + DEEP), apart = (end - begin + LINE - 1) / LINE * LINE;
          for (long done = 0; done < own.length; done += step) {
            const Rows some{stripes, stripe, own.first + done, std::min(step, own.length - done)};
            fill(matrices, count, some, begin, end, panel);
            multiply(panel, HIGH, apart, tiles + 16 * begin, width / 16, 16 * padded, apart, sums + done * stripes * width);
          }
        }
        write(sums, width, own, rows, y + first * rows, given);
      }
    }
    end_tiles();
  }
#endif
}
// What this was compiled for: the instructions that are used where there are any, and whether there are threads.
extern "C" const char* moetool_built_for() {
  return
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
      "AVX-512 with VNNI"
#elif defined(__AVX512BW__)
      "AVX-512"
#elif defined(__AVX2__)
      "AVX2"
#elif defined(__ARM_NEON)
      "NEON"
#else
      "no vectors"
#endif
#if defined(_OPENMP)
      ", threads";
#else
      ", one thread";
#endif
}
