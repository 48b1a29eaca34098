// Blocks of 32 quantised weights as fp32 vectors: exactly the values that the format defines.
#pragma once

#include "cpu/kernels/simd.h"
#include "octavo/linear.h"

namespace octavo::cpu::OCTAVO_ISA {

constexpr int kBlockVecs = kBlockWeights / kLanes;

OCTAVO_INLINE float half_to_float(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
#if defined(__AVX2__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  // Rebiasing by a multiplication also takes subnormals right; infinities and NaNs get their exponent back by hand.
  float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7c00u) value = std::bit_cast<float>((magnitude << 13) | 0x7f800000u);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
#endif
}

// Whether the lanes of a decoded vector are a transposition, four by four, of the sixteen weights they stand for: what
// meets them must be permuted alike (transpose_lanes).
constexpr bool transposed([[maybe_unused]] WeightFormat format) {
#if defined(__AVX512F__)
  return format == WeightFormat::kQ4_0 || format == WeightFormat::kQ4_1;
#else
  return false;
#endif
}

#if defined(__AVX512F__)

OCTAVO_INLINE Vec transpose_lanes(Vec v) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
}

OCTAVO_INLINE void decode_nibbles(const uint8_t* nibbles, Vec scale, Vec offset, Vec* out) {
  // All that a nibble can mean in this block; scale * nibble is exact, so this rounds as a product and a sum would.
  const Vec steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Vec meanings = fma(steps, scale, offset);
  // Lane j = 4 a + b gets byte 4 b + a to its bottom; the permutation looks at its low four bits only.
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles)));
  const __m512i low = _mm512_setr_epi32(0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24);
  const __m512i high = _mm512_setr_epi32(4, 4, 4, 4, 12, 12, 12, 12, 20, 20, 20, 20, 28, 28, 28, 28);
  out[0] = _mm512_permutexvar_ps(_mm512_srlv_epi32(bytes, low), meanings);
  out[1] = _mm512_permutexvar_ps(_mm512_srlv_epi32(bytes, high), meanings);
}

OCTAVO_INLINE void decode_q4_1(const uint8_t* block, Vec* out) {
  int32_t both;
  __builtin_memcpy(&both, block, sizeof(both));
  const Vec pairs = _mm512_cvtph_ps(_mm256_set1_epi32(both));  // scale, offset, scale, offset ...
  decode_nibbles(block + 4, _mm512_moveldup_ps(pairs), _mm512_movehdup_ps(pairs), out);
}

OCTAVO_INLINE Vec decode_bytes(const uint8_t* bytes, Vec scale) {
  const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part)) * scale;
}

#elif defined(__AVX2__)

OCTAVO_INLINE Vec transpose_lanes(Vec v) { return v; }

OCTAVO_INLINE void decode_nibbles(const uint8_t* nibbles, Vec scale, Vec offset, Vec* out) {
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(both, mask);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
  const __m128i parts[4] = {low, _mm_srli_si128(low, 8), high, _mm_srli_si128(high, 8)};
  for (int i = 0; i < 4; ++i) out[i] = fma(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(parts[i])), scale, offset);
}

OCTAVO_INLINE Vec decode_bytes(const uint8_t* bytes, Vec scale) {
  const __m128i part = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part)) * scale;
}

#else

OCTAVO_INLINE Vec transpose_lanes(Vec v) { return v; }

OCTAVO_INLINE void decode_nibbles(const uint8_t* nibbles, Vec scale, Vec offset, Vec* out) {
  float values[kBlockWeights];
  for (int i = 0; i < 16; ++i) {
    values[i] = static_cast<float>(nibbles[i] & 15);
    values[16 + i] = static_cast<float>(nibbles[i] >> 4);
  }
  for (int i = 0; i < kBlockVecs; ++i) out[i] = load(values + i * kLanes) * scale + offset;
}

OCTAVO_INLINE Vec decode_bytes(const uint8_t* bytes, Vec scale) {
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = static_cast<float>(static_cast<int8_t>(bytes[i]));
  return load(values) * scale;
}

#endif

#if !defined(__AVX512F__)
OCTAVO_INLINE void decode_q4_1(const uint8_t* block, Vec* out) {
  decode_nibbles(block + 4, splat(half_to_float(block)), splat(half_to_float(block + 2)), out);
}
#endif

template <WeightFormat kFormat>
OCTAVO_INLINE void decode_block(const uint8_t* block, Vec* out) {
  if constexpr (kFormat == WeightFormat::kQ4_1) {
    decode_q4_1(block, out);
  } else if constexpr (kFormat == WeightFormat::kQ4_0) {
    const float scale = half_to_float(block);
    decode_nibbles(block + 2, splat(scale), splat(-8.0f * scale), out);
  } else {
    static_assert(kFormat == WeightFormat::kQ8_0);
    const Vec scale = splat(half_to_float(block));
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVecs; ++i) out[i] = decode_bytes(block + 2 + i * kLanes, scale);
  }
}

}  // namespace octavo::cpu::OCTAVO_ISA
