// Shared vocabulary of the ops: element types and the paged KV pool. No CUDA header is needed to include this.
#pragma once

#include <cstdint>

namespace octavo {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The paged KV pool, block-major: [num_blocks][layers][2 (K, V)][kv_heads][block_size][head_dim], contiguous.
// One block of all layers is one contiguous piece, so a swap is one copy. Block 0 is scratch: padded rows point at it.
// Offsets into it exceed 2^31 elements on large cards: compute them in 64 bits.
struct KvPool {
  void* data;
  DType dtype;
  int64_t num_blocks;
  int32_t layers;
  int32_t kv_heads;
  int32_t block_size;
  int32_t head_dim;

  int64_t head_stride() const { return static_cast<int64_t>(block_size) * head_dim; }
  int64_t kv_stride() const { return kv_heads * head_stride(); }
  int64_t layer_stride() const { return 2 * kv_stride(); }
  int64_t block_stride() const { return layers * layer_stride(); }
};

// How a launch reaches the device. `stream` is a cudaStream_t, ignored by cpu ops. `pdl` asks for programmatic
// dependent launch behind the previous kernel of the stream (needs sm_90; ignored elsewhere): the op starts while that
// kernel still runs, and before waiting for it reads only weights, the step's integers (block tables, lengths,
// positions, slots, the attention plan), its sampling parameters, and K and V of earlier steps. So whatever writes
// those must be done by then: embed, advance, plan_attention and plan_prefill never let their successor start early,
// nor does the matmul that opens a step behind decode_begin; behind any other writer of them, launch one of these, or
// one op without `pdl`.
struct Launch {
  void* stream = nullptr;
  bool pdl = false;
};

// Weights that a later matmul reads: an op with time to spare asks the L2 for some of them. No result depends on it.
struct Ahead {
  const void* data = nullptr;  // 16-byte aligned
  int64_t bytes = 0;
};

}  // namespace octavo
