// out = silu(gate) * up, where each row holds gate then up.
#pragma once

#include "octavo/tensor.h"

namespace octavo {

struct SiluMulArgs {
  void* out;            // [num_tokens, inter]
  const void* gate_up;  // [num_tokens, 2 * inter]
  int32_t num_tokens;
  int32_t inter;
  DType dtype;
  Launch launch;
};

namespace cpu {
void silu_mul(const SiluMulArgs& args);
}
namespace gpu {
void silu_mul(const SiluMulArgs& args);
}

}  // namespace octavo
