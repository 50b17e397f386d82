// Products of bf16 matrices, summed in fp32, in the instructions that processors have for them: AMX's, or AVX-512's.
//
// Inputs lie in tiles: the 32 columns of 16 inputs in 16 lines, each of two columns of all 16.
#pragma once
#include "vectors.h"
#if defined(__AVX512BF16__)
#define MOETOOL_TILES 1
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define MOETOOL_AMX 1
#endif

constexpr long LINE = 32;  // columns of a tile

// 16 vectors of 16 numbers of 32 bits, rows for columns.
static inline void transpose(const __m512i* in, __m512i* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    const __m512i p = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), q = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), s = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    out[i] = _mm512_shuffle_i32x4(p, r, 0x88);
    out[i + 4] = _mm512_shuffle_i32x4(q, s, 0x88);
    out[i + 8] = _mm512_shuffle_i32x4(p, r, 0xdd);
    out[i + 12] = _mm512_shuffle_i32x4(q, s, 0xdd);
  }
}
// 16 inputs, of which `count` are there, as tiles: `out` has `columns` rounded up to whole lines, 16 times.
static void pack(const uint16_t* x, long count, long columns, uint16_t* out) {
  for (long i = 0; i < columns; i += LINE) {
    const __mmask32 mask = columns - i >= LINE ? ~0u : (1u << (columns - i)) - 1;
    __m512i lines[16];
    for (int n = 0; n < 16; n++)
      lines[n] = n < count ? _mm512_maskz_loadu_epi16(mask, x + n * columns + i) : _mm512_setzero_si512();
    transpose(lines, lines);
    for (int n = 0; n < 16; n++) _mm512_store_si512(out + 16 * i + 32 * n, lines[n]);
  }
}
// y[input][row] = c[row][first + input], rounded, of at most 16 each; rows of y are `apart` numbers long.
static void put(const float* const* c, long first, uint16_t* y, long apart, long rows, long inputs) {
  __m512i lines[16];
  for (int n = 0; n < 16; n++) lines[n] = _mm512_loadu_si512(c[n] + first);
  transpose(lines, lines);
  for (int n = 0; n < inputs; n++)
    _mm256_mask_storeu_epi16(y + n * apart, (1u << rows) - 1, (__m256i)_mm512_cvtneps_pbh((__m512)lines[n]));
}

// c[M rows, N times 16 inputs] += a[M rows, columns] · tiles.
template <int M, int N>
static void vectors(const uint16_t* a, long apart, const uint16_t* tiles, long next, long columns, float* c, long width) {
  __m512 sums[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sums[m][n] = _mm512_loadu_ps(c + m * width + 16 * n);
  for (long i = 0; i < columns; i += 2) {
    __m512bh x[N];
    for (int n = 0; n < N; n++) x[n] = (__m512bh)_mm512_load_si512(tiles + n * next + 16 * i);
    for (int m = 0; m < M; m++) {
      int32_t pair;
      memcpy(&pair, a + m * apart + i, 4);
      for (int n = 0; n < N; n++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], x[n], (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) _mm512_storeu_ps(c + m * width + 16 * n, sums[m][n]);
}
#if defined(MOETOOL_AMX)
static bool has_amx() {
  static const bool allowed = !syscall(SYS_arch_prctl, 0x1023, 18);  // a process has to ask for tiles
  return allowed;
}
// The same with M and N times 16.
template <int M, int N>
static void amx(const uint16_t* a, long apart, const uint16_t* tiles, long next, long columns, float* c, long width) {
  _tile_loadd(0, c, 4 * width);
  if (N > 1) _tile_loadd(1, c + 16, 4 * width);
  if (M > 1) _tile_loadd(2, c + 16 * width, 4 * width);
  if (M > 1 && N > 1) _tile_loadd(3, c + 16 * width + 16, 4 * width);
  for (long i = 0; i < columns; i += LINE) {
    _tile_loadd(6, tiles + 16 * i, 64);
    _tile_loadd(4, a + i, 2 * apart);
    _tile_dpbf16ps(0, 4, 6);
    if (N > 1) _tile_loadd(7, tiles + next + 16 * i, 64);
    if (N > 1) _tile_dpbf16ps(1, 4, 7);
    if (M > 1) _tile_loadd(5, a + 16 * apart + i, 2 * apart);
    if (M > 1) _tile_dpbf16ps(2, 5, 6);
    if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, 4 * width);
  if (N > 1) _tile_stored(1, c + 16, 4 * width);
  if (M > 1) _tile_stored(2, c + 16 * width, 4 * width);
  if (M > 1 && N > 1) _tile_stored(3, c + 16 * width + 16, 4 * width);
}
#else
static bool has_amx() { return false; }
#endif
// Threads call it before `multiply` and after.
static void begin_tiles() {
#if defined(MOETOOL_AMX)
  if (!has_amx()) return;
  alignas(64) uint8_t config[64] = {1};  // 8 tiles of 16 rows of 64 bytes
  for (int i = 0; i < 8; i++) { config[16 + 2 * i] = 64; config[48 + i] = 16; }
  _tile_loadconfig(config);
#endif
}
static void end_tiles() {
#if defined(MOETOOL_AMX)
  if (has_amx()) _tile_release();
#endif
}
// c[rows, 16 · count] += a[rows, columns] · count tiles, `next` numbers from one to another. Rows come in multiples of
// 16, columns of `LINE`.
static void multiply(const uint16_t* a, long rows, long apart, const uint16_t* tiles, long count, long next,
                     long columns, float* c) {
  const long width = 16 * count;
#if defined(MOETOOL_AMX)
  if (has_amx()) {
    for (long r = 0; r < rows; r += 32)
      for (long n = 0; n < count; n += 2) {
        const bool two = r + 16 < rows;
        (n + 1 < count ? two ? amx<2, 2> : amx<1, 2> : two ? amx<2, 1> : amx<1, 1>)(
            a + r * apart, apart, tiles + n * next, next, columns, c + r * width + 16 * n, width);
      }
    return;
  }
#endif
  for (long r = 0; r < rows; r += 8)
    for (long n = 0; n < count; n += 2)
      (n + 1 < count ? vectors<8, 2> : vectors<8, 1>)(
          a + r * apart, apart, tiles + n * next, next, columns, c + r * width + 16 * n, width);
}
#endif
