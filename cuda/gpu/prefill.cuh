// What a prefill attention launch is told; the kernels are in prefill_{attention,stretch}.cuh.
#pragma once

#include <cstdint>

#include "gpu/prefill_plan.cuh"
#include "octavo/tensor.h"

namespace octavo::gpu {

struct Prefill {
  void* out;
  const void* query;
  const void* pool;  // at this layer
  int layer;
  int64_t block_stride;  // elements
  int64_t value_offset;  // elements from a block's keys to its values
  const int* block_tables;
  int max_blocks;
  const int* query_start;
  const int* context_lens;
  int num_seqs;
  float scale_log2;  // scale * log2(e): probabilities are powers of two
  int q_heads;
  int kv_heads;
  int group;
  // Of the kernel that follows a plan; see prefill_plan.cuh. blocks: 0 where another one serves.
  int blocks;
  const PrefillCut* cuts;  // [(kMaxRounds + 1) * blocks + 1]
  int* tickets;            // [blocks][warpgroups]
  float4* stats;           // [2 blocks][warpgroups][threads]
  float4* outputs;         // [2 blocks][warpgroups][head_dim / 8][threads]
};

template <int kDim>
struct PrefillKernels {
  static void launch(const Prefill& args, const KvPool& pool, int num_tokens, const Launch& launch);
};

}  // namespace octavo::gpu
