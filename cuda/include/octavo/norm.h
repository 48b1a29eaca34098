// RMSNorm, alone or behind a residual add: residual += x; out = residual * rsqrt(mean(residual^2) + eps) * weight.
#pragma once

#include "octavo/tensor.h"

namespace octavo {

struct RmsNormArgs {
  void* out;           // [num_tokens, hidden]
  const void* x;       // [num_tokens, hidden]
  void* residual;      // [num_tokens, hidden], updated in place; null: plain RMSNorm of x
  const void* weight;  // [hidden]
  float eps;
  int32_t num_tokens;
  int32_t hidden;
  DType dtype;  // of all four; sums in fp32
  Launch launch;
};

namespace cpu {
void rms_norm(const RmsNormArgs& args);
}
namespace gpu {
void rms_norm(const RmsNormArgs& args);
}

}  // namespace octavo
