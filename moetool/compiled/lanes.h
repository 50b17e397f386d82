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
  // table[code & 15]
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  typedef __m256i Table;
  static Table table(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static Words look(const Table& t, Words code) { return (Words)_mm256_permutexvar_epi16((__m256i)code, t); }
#elif defined(__AVX2__)
  struct Table { __m256i low, high; };
  static Table table(const int16_t* p) {
    alignas(16) uint8_t low[16], high[16];
    for (int i = 0; i < 16; i++) { low[i] = (uint8_t)p[i]; high[i] = (uint8_t)(p[i] >> 8); }
    return {_mm256_broadcastsi128_si256(*(__m128i*)low), _mm256_broadcastsi128_si256(*(__m128i*)high)};
  }
  static Words look(const Table& t, Words code) {  // bytes of 128 and more give zero
    const Words at = code & 15;
    return (Words)_mm256_shuffle_epi8(t.low, (__m256i)(at | 0x8000)) | (Words)_mm256_shuffle_epi8(t.high, (__m256i)(at << 8 | 0x80));
  }
#else
  struct Table { int16_t at[16]; };
  static Table table(const int16_t* p) { Table t; memcpy(t.at, p, sizeof t.at); return t; }
  static Words look(const Table& t, Words code) {
    for (int i = 0; i < 16; i++) code[i] = (uint16_t)t.at[code[i] & 15];
    return code;
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
  static Table table(const int16_t* p) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p)); }
  static Words look(const Table& t, Words code) { return (Words)_mm512_permutexvar_epi16((__m512i)code, t); }
};
#else
typedef Narrow Wide;
#endif
