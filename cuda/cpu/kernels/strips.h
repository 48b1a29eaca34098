// One strip of packed weights (16 columns) as fp32 vectors: exactly the values that the format defines.
#pragma once

#include "cpu/kernels/simd.h"
#include "cpu/weight_layout.h"

namespace octavo::cpu::OCTAVO_ISA {

constexpr int kStripVecs = kStripColumns / kLanes;

struct Strip {
  Vec v[kStripVecs];
};

#if !defined(__AVX2__)
OCTAVO_INLINE float half_to_float(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  float value = std::bit_cast<float>((magnitude << 13) + (112u << 23));
  if (magnitude < 0x400u) value = static_cast<float>(magnitude) * 0x1p-24f;
  if (magnitude >= 0x7c00u) value = std::bit_cast<float>((magnitude << 13) | 0x7f800000u);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}
#endif

// 16 fp16 values.
OCTAVO_INLINE void load_halves(const uint8_t* p, Vec* out) {
#if defined(__AVX512F__)
  out[0] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  out[0] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  out[1] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
#else
  float values[kStripColumns];
  for (int i = 0; i < kStripColumns; ++i) values[i] = half_to_float(p + 2 * i);
  for (int i = 0; i < kStripVecs; ++i) out[i] = load(values + i * kLanes);
#endif
}

// The numbers 0 to 15 that the lowest nibbles of 16 words stand for.
OCTAVO_INLINE void low_nibbles(const uint8_t* words, int shift, Vec* out) {
#if defined(__AVX512F__)
  const Vec numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // The permutation looks at the low four bits only.
  out[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), shift), numbers);
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 32 * i));
    out[i] = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(both, shift), _mm256_set1_epi32(15)));
  }
#else
  for (int i = 0; i < kStripVecs; ++i) {
    typedef int32_t Int __attribute__((vector_size(16)));
    typedef uint32_t Word __attribute__((vector_size(16)));
    Word word;
    __builtin_memcpy(&word, words + 16 * i, sizeof(word));
    out[i] = __builtin_convertvector(reinterpret_cast<Int>((word >> shift) & 15u), Vec);
  }
#endif
}

OCTAVO_INLINE void signed_bytes(const uint8_t* p, Vec* out) {
#if defined(__AVX512F__)
  out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    out[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i))));
  }
#else
  for (int i = 0; i < kStripVecs; ++i) {
    out[i] = Vec{
        static_cast<float>(static_cast<int8_t>(p[4 * i])), static_cast<float>(static_cast<int8_t>(p[4 * i + 1])),
        static_cast<float>(static_cast<int8_t>(p[4 * i + 2])), static_cast<float>(static_cast<int8_t>(p[4 * i + 3]))};
  }
#endif
}

// A strip's cell, opened: scale and offset are read once, then each k of the cell.
template <WeightFormat kFormat>
class StripCell {
 public:
  OCTAVO_INLINE explicit StripCell(const uint8_t* cell) : weights_(cell) {
    if constexpr (in_blocks(kFormat)) {
      load_halves(cell, scale_.v);
      weights_ += 2 * kStripColumns;
    }
    if constexpr (kFormat == WeightFormat::kQ4_1) {
      load_halves(cell + 2 * kStripColumns, offset_.v);
      weights_ += 2 * kStripColumns;
    }
    if constexpr (kFormat == WeightFormat::kQ4_0) {
      for (int i = 0; i < kStripVecs; ++i) offset_.v[i] = scale_.v[i] * splat(-8.0f);
    }
  }

  // scale * nibble is exact in fp32, so a fused multiply-add rounds as a product and a sum would.
  OCTAVO_INLINE Strip at(int k) const {
    Strip strip;
    if constexpr (kFormat == WeightFormat::kFloat32) {
#pragma GCC unroll 8
      for (int i = 0; i < kStripVecs; ++i) strip.v[i] = load(reinterpret_cast<const float*>(weights_) + i * kLanes);
    } else if constexpr (kFormat == WeightFormat::kBFloat16) {
#pragma GCC unroll 8
      for (int i = 0; i < kStripVecs; ++i) strip.v[i] = load(reinterpret_cast<const BFloat16*>(weights_) + i * kLanes);
    } else if constexpr (kFormat == WeightFormat::kQ8_0) {
      signed_bytes(weights_ + k * kStripColumns, strip.v);
#pragma GCC unroll 8
      for (int i = 0; i < kStripVecs; ++i) strip.v[i] = strip.v[i] * scale_.v[i];
    } else {
      low_nibbles(weights_ + k / kNibbleGroup * 4 * kStripColumns, k % kNibbleGroup * 4, strip.v);
#pragma GCC unroll 8
      for (int i = 0; i < kStripVecs; ++i) strip.v[i] = fma(strip.v[i], scale_.v[i], offset_.v[i]);
    }
    return strip;
  }

 private:
  const uint8_t* weights_;
  Strip scale_;
  Strip offset_;
};

}  // namespace octavo::cpu::OCTAVO_ISA
