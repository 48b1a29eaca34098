// RMSNorm of one row.
#pragma once

#include "cpu/kernels/simd.h"

namespace octavo::cpu::OCTAVO_ISA {

// out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; `out` may be `x`.
template <class T, class X, class W>
OCTAVO_INLINE void normalise(T* out, const X* x, const W* weight, float eps, int32_t count) {
  Vec sum = splat(0.0f);
  for (int32_t i = 0; i < count; i += kLanes) {
    const Vec v = load_some(x + i, count - i);
    sum = fma(v, v, sum);
  }
  const Vec scale = splat(1.0f / __builtin_sqrtf(sum_lanes(sum) / static_cast<float>(count) + eps));
  for (int32_t i = 0; i < count; i += kLanes) {
    store_some(out + i, load_some(x + i, count - i) * scale * load_some(weight + i, count - i), count - i);
  }
}

}  // namespace octavo::cpu::OCTAVO_ISA
