// Vectors of 16 numbers, in the instructions that the compiler was told of; plain loops elsewhere.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr long W = 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
#define MOETOOL_HALVES 1  // a vector of 16 numbers is two of 8
#include "joined.h"
static inline vf load(const float* p) { return vf(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void store(float* p, vf v) { _mm256_storeu_ps(p, v.low), _mm256_storeu_ps(p + 8, v.high); }
static inline vi load_int(const int32_t* p) { return vi(load((const float*)p)); }
static inline void store_int(int32_t* p, vi v) { store((float*)p, vf(v)); }
#else
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int16_t vh __attribute__((vector_size(64)));
static inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }
static inline vi to_int(vf v) { return __builtin_convertvector(v, vi); }
template <class V> static inline V choose(vi mask, V yes, V no) { return mask ? yes : no; }
static inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vi load_int(const int32_t* p) { vi v; memcpy(&v, p, sizeof v); return v; }
static inline void store_int(int32_t* p, vi v) { memcpy(p, &v, sizeof v); }
#endif

static inline float total(vf v) {
#if defined(MOETOOL_HALVES)
  const __m256 eight = v.low + v.high;
  __m128 few = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  few = few + _mm_movehl_ps(few, few);
  return few[0] + few[1];
#elif defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);  // in the order of the loops below, which would go through memory
#else
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
#endif
}

static inline vi bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return vi((vi::Part)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            (vi::Part)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))));
#else
  vi v; for (int i = 0; i < W; i++) v[i] = p[i]; return v;
#endif
}
static inline void bytes(const uint8_t* p, vi& v) { v = bytes(p); }
#if defined(__AVX512BW__)
static inline void bytes(const uint8_t* p, vh& v) { v = (vh)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
#endif
static inline vi shorts(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return vi((vi::Part)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
            (vi::Part)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))));
#else
  vi v; for (int i = 0; i < W; i++) v[i] = p[i]; return v;
#endif
}
// The halves of 8 bytes, the high one first, in the lowest bits of each number.
static inline vi nibbles(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i both = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
  return (vi)_mm512_or_si512(_mm512_srli_epi64(both, 4), _mm512_slli_epi64(both, 32));
#elif defined(__AVX2__)
  const __m128i once = _mm_loadl_epi64((const __m128i*)p), twice = _mm_unpacklo_epi8(once, once);
  const __m256i by = _mm256_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0);
  return vi((vi::Part)_mm256_srlv_epi32(_mm256_cvtepu8_epi32(twice), by),
            (vi::Part)_mm256_srlv_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(twice, 8)), by));
#else
  vi v; for (int i = 0; i < W; i++) v[i] = p[i / 2] >> (i % 2 ? 0 : 4); return v;
#endif
}
// table[index & 15]
static inline vf lookup(vf table, vi index) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#elif defined(__AVX2__)
  const auto eight = [&](vi::Part codes) {
    const __m256i at = (__m256i)codes;
    const __m256 low = _mm256_permutevar8x32_ps(table.low, at), high = _mm256_permutevar8x32_ps(table.high, at);
    return _mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
  };
  return vf(eight(index.low), eight(index.high));
#else
  vf v; for (int i = 0; i < W; i++) v[i] = table[index[i] & 15]; return v;
#endif
}
// table[index], of any number of entries
static inline vf gather(const float* table, vi index) {
#if defined(__AVX512F__)
  return (vf)_mm512_i32gather_ps((__m512i)index, table, 4);
#elif defined(__AVX2__)
  return vf(_mm256_i32gather_ps(table, (__m256i)index.low, 4), _mm256_i32gather_ps(table, (__m256i)index.high, 4));
#else
  vf v; for (int i = 0; i < W; i++) v[i] = table[index[i]]; return v;
#endif
}
// fp16, which not every compiler has in C++ (GCC from 12 on).
static inline float half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t u = (h & 0x7fffu) << 13;
  float v;
  memcpy(&v, &u, 4);
  v *= 0x1p112f;  // from one bias of exponents to the other
  memcpy(&u, &v, 4);
  u |= (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;  // not finite
  u |= (h & 0x8000u) << 16;
  memcpy(&v, &u, 4);
  return v;
#endif
}
static inline uint16_t to_half(float v) {
#if defined(__F16C__)
  return _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t u;
  memcpy(&u, &v, 4);
  const uint32_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u >= 0x47800000) return sign | (u > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (u >= 0x38800000) return sign | ((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
  memcpy(&v, &u, 4);  // below 2⁻¹⁴ steps are 2⁻²⁴, as fp32 has them from a half on
  v += .5f;
  memcpy(&u, &v, 4);
  return sign | (u - 0x3f000000);
#endif
}
static inline vf halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return vf(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8))));
#else
  vf v; for (int i = 0; i < W; i++) v[i] = half(p[i]); return v;
#endif
}
// 16 numbers rounded to the nearest bf16 or fp16, ties to even.
static inline void store_bf16(uint16_t* p, vf v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &rounded, sizeof rounded);
#else
  const vu u = (vu)v;
  const vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded));
#elif defined(__AVX2__)
  const __m256i both = _mm256_packus_epi32((__m256i)rounded.low, (__m256i)rounded.high);  // quarters 0, 2, 1, 3
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
#else
  for (int i = 0; i < W; i++) p[i] = (uint16_t)rounded[i];
#endif
#endif
}
static inline void store_f16(uint16_t* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.high, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; i++) p[i] = to_half(v[i]);
#endif
}
