// Exponentials of 16 numbers.
#pragma once
#include <cmath>
#include "vectors.h"

static inline vf nearest_whole(vf v) {
#if defined(MOETOOL_HALVES)
  return vf(_mm256_round_ps(v.low, _MM_FROUND_CUR_DIRECTION), _mm256_round_ps(v.high, _MM_FROUND_CUR_DIRECTION));
#else
  vf whole;
  for (int i = 0; i < W; i++) whole[i] = std::rint(v[i]);
  return whole;
#endif
}
// eˣ as torch's vectors have it, by Sleef's polynomial (u10, Boost license): the same bits where there is FMA.
static inline vf exponential(vf x) {
  const vf scaled = x * 1.442695040888963407f;
  const vf whole = nearest_whole(scaled);
  const vi power = to_int(whole);
  vf s = whole * -0.693145751953125f + x;
  s = whole * -1.428606765330187045e-06f + s;
  vf u = s * 0.000198527617612853646278381f + 0.00139304355252534151077271f;
  u = u * s + 0.00833336077630519866943359f;
  u = u * s + 0.0416664853692054748535156f;
  u = u * s + 0.166666671633720397949219f;
  u = u * s + 0.5f;
  u = s * s * u + s + 1.f;
  const vi half = power >> 1;
  u = u * (vf)((vu)(half + 127) << 23) * (vf)((vu)(power - half + 127) << 23);
  u = choose(x < -104.f, vf{}, u);
  return choose(x > 100.f, vf{} + INFINITY, u);
}
