// Words of 16 bits that are looked up, multiplied and added up in int32, in the instructions that the compiler was told
// of: AVX-512's or AVX's VNNI, AVX2's, or plain loops. All give the same integers.
#pragma once
#include "vectors.h"

typedef int32_t vi8 __attribute__((vector_size(32)));
typedef float vf8 __attribute__((vector_size(32)));

struct Narrow {
  typedef uint16_t Words __attribute__((vector_size(32)));
  typedef vi8 Ints;
  typedef vf8 Sums;
  static constexpr long COLUMNS = 32;  // bytes of a vector
  static Words load(const void* p) { Words v; memcpy(&v, p, sizeof v); return v; }
  static float total(Sums v) {
    for (int half = 4; half; half /= 2)
      for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
  }
  // sum += a · x, signed, of two words each.
  static Ints add(Ints sum, Words a, Words x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (Ints)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)a, (__m256i)x);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)x);
#elif defined(__AVX2__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)x);
#else
    for (int i = 0; i < 16; i++) sum[i / 2] += (int16_t)a[i] * (int16_t)x[i];
    return sum;
#endif
  }
  // Bytes as words, half of them; and table[code & 15] for the codes in bytes. Both in the order that `in_order` gives
  // their columns.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  static Words word(Words bytes, int side) { return (bytes >> (8 * side)) & 255; }
  typedef __m256i Table;
  static Table table(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static void levels(const Table& t, Words codes, Words* out) {
    for (int odd = 0; odd < 2; odd++) out[odd] = (Words)_mm256_permutexvar_epi16((__m256i)(codes >> (8 * odd)), t);
  }
#elif defined(MOETOOL_HALVES)  // as `in_order` has it
  static Words word(Words bytes, int side) {
    const __m256i all = (__m256i)bytes, none = _mm256_setzero_si256();
    return (Words)(side ? _mm256_unpackhi_epi8(all, none) : _mm256_unpacklo_epi8(all, none));
  }
  struct Table { __m256i low, high; };
  static Table table(const int16_t* p) {
    alignas(16) uint8_t low[16], high[16];
    for (int i = 0; i < 16; i++) { low[i] = (uint8_t)p[i]; high[i] = (uint8_t)(p[i] >> 8); }
    return {_mm256_broadcastsi128_si256(*(__m128i*)low), _mm256_broadcastsi128_si256(*(__m128i*)high)};
  }
  static void levels(const Table& t, Words codes, Words* out) {
    const __m256i at = (__m256i)(codes & 0x0f0f), low = _mm256_shuffle_epi8(t.low, at), high = _mm256_shuffle_epi8(t.high, at);
    out[0] = (Words)_mm256_unpacklo_epi8(low, high), out[1] = (Words)_mm256_unpackhi_epi8(low, high);
  }
#else
  static Words word(Words bytes, int side) { return (bytes >> (8 * side)) & 255; }
  struct Table { int16_t at[16]; };
  static Table table(const int16_t* p) { Table t; memcpy(t.at, p, sizeof t.at); return t; }
  static void levels(const Table& t, Words codes, Words* out) {
    for (int odd = 0; odd < 2; odd++)
      for (int i = 0; i < 16; i++) out[odd][i] = (uint16_t)t.at[codes[i] >> (8 * odd) & 15];
  }
#endif
};

#if defined(__AVX512BW__) && defined(__AVX512VL__)
struct Wide {
  typedef uint16_t Words __attribute__((vector_size(64)));
  typedef vi Ints;
  typedef vf Sums;
  typedef __m512i Table;
  static constexpr long COLUMNS = 64;
  static Words load(const void* p) { Words v; memcpy(&v, p, sizeof v); return v; }
  static float total(Sums v) { return ::total(v); }
  static Ints add(Ints sum, Words a, Words x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)x);
#else
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)x);
#endif
  }
  static Words word(Words bytes, int side) { return (bytes >> (8 * side)) & 255; }
  static Table table(const int16_t* p) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p)); }
  static void levels(const Table& t, Words codes, Words* out) {
    for (int odd = 0; odd < 2; odd++) out[odd] = (Words)_mm512_permutexvar_epi16((__m512i)(codes >> (8 * odd)), t);
  }
};
#else
typedef Narrow Wide;
#endif
// The words that stand for 16 numbers of an input, from column i on, in the order in which `levels` has their columns. Within
// as many columns as a vector has bytes the even ones come before the odd ones; in AVX2 the first 8 and the third 8 of 32
// before the others, since bytes are made words in halves of a vector.
static inline void in_order(vi numbers, long i, long columns, int16_t* words) {
#if defined(MOETOOL_HALVES)
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)numbers.low, (__m256i)numbers.high), 0xd8);
  int16_t* to = words + i / 32 * 32 + i % 32 / 2;
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(both));
  _mm_storeu_si128((__m128i*)(to + 16), _mm256_extracti128_si256(both, 1));
#else
  int16_t* even = words + i / columns * columns + i % columns / 2;
  for (int j = 0; j < W / 2; j++) even[j] = (int16_t)numbers[2 * j], even[columns / 2 + j] = (int16_t)numbers[2 * j + 1];
#endif
}
