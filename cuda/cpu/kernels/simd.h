// Vectors of floats, one width per instruction set. Files that include this are compiled once for each set, everything
// in namespace octavo::cpu::OCTAVO_ISA, so that no symbol built for one CPU can be linked into the path of another.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu/element.h"

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo::cpu::OCTAVO_ISA {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;

OCTAVO_INLINE Vec splat(float value) { return _mm512_set1_ps(value); }
OCTAVO_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
OCTAVO_INLINE Vec load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
OCTAVO_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
OCTAVO_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
OCTAVO_INLINE Vec round(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v * 2^n for whole n in [-126, 127].
OCTAVO_INLINE Vec scale_by_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }
OCTAVO_INLINE float max_lane(Vec v) { return _mm512_reduce_max_ps(v); }

// Every lane sum adds lanes 8 apart, then 4, 2 and 1. Blends run on a port that shuffles do not.
OCTAVO_INLINE Vec fold_by_8(Vec a, Vec b) {  // 128-bit lanes a a b b
  return _mm512_mask_blend_ps(0xff00, a, b) + _mm512_shuffle_f32x4(a, b, 0x4e);
}

OCTAVO_INLINE Vec fold_by_4(Vec ab, Vec cd) {  // a c b d
  const __m512i crossed = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  return _mm512_mask_blend_ps(0xf0f0, ab, cd) + _mm512_permutex2var_ps(ab, crossed, cd);
}

// Lane sums of twice four vectors, in order, stored or added to `p` and `q`.
OCTAVO_INLINE void sum_lanes(const Vec* v, const Vec* w, bool add, float* p, float* q) {
  const Vec first = fold_by_4(fold_by_8(v[0], v[1]), fold_by_8(v[2], v[3]));
  const Vec second = fold_by_4(fold_by_8(w[0], w[1]), fold_by_8(w[2], w[3]));
  const Vec both = _mm512_mask_blend_ps(0xcccc, first, second) + _mm512_shuffle_ps(first, second, 0x4e);
  const Vec whole = both + _mm512_permute_ps(both, 0xb1);
  const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m256 sums = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, whole));
  const __m128 low = _mm256_castps256_ps128(sums);
  const __m128 high = _mm256_extractf128_ps(sums, 1);
  _mm_storeu_ps(p, add ? _mm_loadu_ps(p) + low : low);
  _mm_storeu_ps(q, add ? _mm_loadu_ps(q) + high : high);
}

// Those of four vectors.
OCTAVO_INLINE void sum_lanes(const Vec* v, bool add, float* p) {
  const Vec all = fold_by_4(fold_by_8(v[0], v[1]), fold_by_8(v[2], v[3]));
  const Vec half = all + _mm512_permute_ps(all, 0x4e);
  const Vec whole = half + _mm512_permute_ps(half, 0xb1);
  const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128 sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(order, whole));
  _mm_storeu_ps(p, add ? _mm_loadu_ps(p) + sums : sums);
}

#elif defined(__AVX2__)

using Vec = __m256;
constexpr int kLanes = 8;

OCTAVO_INLINE Vec splat(float value) { return _mm256_set1_ps(value); }
OCTAVO_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
OCTAVO_INLINE Vec load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
OCTAVO_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
OCTAVO_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
OCTAVO_INLINE Vec round(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OCTAVO_INLINE Vec scale_by_power(Vec v, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return v * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
OCTAVO_INLINE float max_lane(Vec v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

OCTAVO_INLINE void sum_lanes(const Vec* v, bool add, float* out) {
  const Vec ab = _mm256_permute2f128_ps(v[0], v[1], 0x20) + _mm256_permute2f128_ps(v[0], v[1], 0x31);
  const Vec cd = _mm256_permute2f128_ps(v[2], v[3], 0x20) + _mm256_permute2f128_ps(v[2], v[3], 0x31);
  const Vec half = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);  // a a c c | b b d d
  const Vec whole = half + _mm256_permute_ps(half, 0xb1);
  const __m128 ac = _mm256_castps256_ps128(whole);
  const __m128 bd = _mm256_extractf128_ps(whole, 1);
  const __m128 sums = _mm_unpacklo_ps(_mm_shuffle_ps(ac, ac, 0x08), _mm_shuffle_ps(bd, bd, 0x08));
  _mm_storeu_ps(out, add ? _mm_loadu_ps(out) + sums : sums);
}

#else

typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;

OCTAVO_INLINE Vec splat(float value) { return Vec{value, value, value, value}; }
OCTAVO_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
OCTAVO_INLINE Vec load(const BFloat16* p) {
  return Vec{cpu::load(p[0]), cpu::load(p[1]), cpu::load(p[2]), cpu::load(p[3])};
}
OCTAVO_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
OCTAVO_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
OCTAVO_INLINE Vec round(Vec v) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no fraction bits
  return (v + magic) - magic;
}
OCTAVO_INLINE Vec scale_by_power(Vec v, Vec n) {
  typedef int32_t Int __attribute__((vector_size(16)));
  const Int exponent = __builtin_convertvector(n, Int) + 127;
  return v * reinterpret_cast<Vec>(exponent << 23);
}
OCTAVO_INLINE float max_lane(Vec v) {
  const float low = v[0] > v[1] ? v[0] : v[1];
  const float high = v[2] > v[3] ? v[2] : v[3];
  return low > high ? low : high;
}
OCTAVO_INLINE void sum_lanes(const Vec* v, bool add, float* out) {
  for (int i = 0; i < 4; ++i) {
    const float sum = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
    out[i] = add ? out[i] + sum : sum;
  }
}

#endif

#if !defined(__AVX512F__)
OCTAVO_INLINE void sum_lanes(const Vec* v, const Vec* w, bool add, float* p, float* q) {
  sum_lanes(v, add, p);
  sum_lanes(w, add, q);
}
#endif

OCTAVO_INLINE float sum_lanes(Vec v) {
  const Vec four[4] = {v, v, v, v};
  float sums[4];
  sum_lanes(four, false, sums);
  return sums[0];
}

// The first `count` of a vector's lanes; the others are zero in a load and left alone by a store.
template <class T>
OCTAVO_INLINE Vec load_some(const T* p, int count) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int i = 0; i < count; ++i) lanes[i] = cpu::load(p[i]);
  return load(lanes);
}

OCTAVO_INLINE void store(BFloat16* p, Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) cpu::store(p[i], lanes[i]);
}

template <class T>
OCTAVO_INLINE void store_some(T* p, Vec v, int count) {
  if (count >= kLanes) return store(p, v);
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < count; ++i) cpu::store(p[i], lanes[i]);
}

// e^x to about two units in the last place; 0 below -87.3 (and for -inf), saturated above 88.
OCTAVO_INLINE Vec exp(Vec x) {
  const Vec clamped = min(max(x, splat(-87.33654f)), splat(88.0f));
  const Vec n = round(clamped * splat(1.44269504f));
  // ln 2 in two parts, so that n ln 2 is subtracted without loss.
  const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  Vec p = splat(1.0f / 5040.0f);
  p = fma(p, r, splat(1.0f / 720.0f));
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const Vec y = scale_by_power(p, n);
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(-87.33654f), _CMP_NLT_UQ), y);
#elif defined(__AVX2__)
  return _mm256_and_ps(y, _mm256_cmp_ps(x, splat(-87.33654f), _CMP_NLT_UQ));
#else
  return x < splat(-87.33654f) ? splat(0.0f) : y;
#endif
}

}  // namespace octavo::cpu::OCTAVO_ISA
