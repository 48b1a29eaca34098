// The kernels of the instruction set in use.
#pragma once

#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace octavo::cpu {

struct Kernels {
  const char* instruction_set;
  void (*linear)(const LinearArgs&);
  void (*paged_attention)(const PagedAttentionArgs&, const QueryChunk*, int64_t);
  void (*rms_norm)(const RmsNormArgs&);
  void (*silu_mul)(const SiluMulArgs&);
  void (*write_kv)(const WriteKvArgs&);
};

const Kernels& kernels();

}  // namespace octavo::cpu
