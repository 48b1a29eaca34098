// Element types of the CPU ops: all arithmetic is fp32, storage is fp32 or bf16 (round to nearest even).
#pragma once

#include <bit>
#include <cstdint>

#include "octavo/tensor.h"

namespace octavo::cpu {

struct BFloat16 {
  uint16_t bits;
};

inline float load(float value) { return value; }
inline float load(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

inline void store(float& place, float value) { place = value; }
inline void store(BFloat16& place, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  place.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[noreturn]] void refuse_float16();  // throws OpError

// Calls f(float{}) or f(BFloat16{}).
template <class F>
void with_element(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      break;
  }
  refuse_float16();
}

}  // namespace octavo::cpu
