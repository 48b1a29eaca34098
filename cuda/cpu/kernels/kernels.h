// The ops as one instruction set compiles them. Their arguments have been checked.
#pragma once

#include <cstdint>

#include "octavo/linear.h"
#include "octavo/norm.h"
#include "octavo/paged_attention.h"
#include "octavo/silu_mul.h"
#include "octavo/write_kv.h"

namespace octavo::cpu {

inline constexpr int32_t kMaxHeadDim = 512;

// Query tokens [first, first + count) of a sequence: one task for each KV head.
struct QueryChunk {
  int32_t seq;
  int32_t first;  // row of the query tensor
  int32_t count;
  int32_t visible;  // tokens that the first one attends to; each further one sees one more
};

}  // namespace octavo::cpu

#define OCTAVO_DECLARE_KERNELS(isa)                                                                   \
  namespace octavo::cpu::isa {                                                                        \
  void linear(const LinearArgs& args);                                                                \
  void paged_attention(const PagedAttentionArgs& args, const QueryChunk* chunks, int64_t num_chunks); \
  void rms_norm(const RmsNormArgs& args);                                                             \
  void silu_mul(const SiluMulArgs& args);                                                             \
  void write_kv(const WriteKvArgs& args);                                                             \
  }

#if defined(OCTAVO_ISA)
OCTAVO_DECLARE_KERNELS(OCTAVO_ISA)
#endif
