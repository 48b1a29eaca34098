// How a decode step's attention is shared out: which part of which sequence each cluster of thread blocks reads.
#pragma once

#include <cstdint>

#include "octavo/paged_attention.h"

namespace octavo::gpu {

constexpr int kBlockTokens = 16;  // the pool's block size
constexpr int kStepBlocks = 2;    // KV blocks a warp holds at once
constexpr int kStepTokens = kBlockTokens * kStepBlocks;

// Part of one sequence's context for one KV head, in steps of kStepTokens. Parts of a pair lie next to each other in
// the plan, so that the last one to finish finds the others' partial results.
struct alignas(16) Split {
  int seq;  // -1: this and all that follow are empty
  int kv_head;
  int begin;   // first step
  int end;     // past the last step; may equal begin
  int length;  // tokens in the sequence's context
  int first;   // index in the plan of the pair's first part
  int count;   // parts of the pair
  int unused;
};

// The frozen side of a decode launch: from capacities and the device only.
struct DecodeGrid {
  int warps;     // a thread block
  int cluster;   // thread blocks that read one split together and merge through distributed shared memory
  int clusters;  // launched; each takes splits i, i + clusters, ... (one only, if cluster > 1)
  int capacity;  // splits the plan has room for
};

// The grid for a batch: one cluster a (sequence, KV head) where that fits, as large as it fits; else single blocks.
DecodeGrid decode_grid(int num_seqs, int kv_heads, int head_dim);

// plan_attention for a given grid.
void plan_decode(const DecodeGrid& grid, const PlanAttentionArgs& args);

// What lies in the workspace, as byte offsets. Tickets come first and have one place for every grid: they are zero
// between launches, and nothing else may be written over them.
struct DecodeWorkspace {
  DecodeWorkspace(const DecodeGrid& grid, int group, int head_dim);
  size_t tickets, plan, stats, outputs, bytes;
};

constexpr int kMaxGroup = 8;  // query heads a KV head: the columns of an mma
struct Decode {
  void* out;
  const void* query;     // [num_seqs][query_stride]: queries; if `writes` the raw qkv row
  int64_t query_stride;  // elements
  void* pool;            // at this layer
  int64_t block_stride;  // elements
  int64_t value_offset;  // elements from a block's keys to its values
  const int* block_tables;
  int max_blocks;
  const Split* plan;
  int capacity;
  int* tickets;      // [capacity][cluster]
  float2* stats;     // [capacity][cluster][kMaxGroup]
  float4* outputs;   // [capacity][group * head_dim / 4]
  float scale_log2;  // scale * log2(e): probabilities are powers of two
  int q_heads;
  int kv_heads;
  int group;
  bool writes;  // bias, QK-norm, RoPE and the write of the newest K and V are still to do; else what follows is unused
  const void* bias;
  const void* q_norm_weight;
  const void* k_norm_weight;
  float norm_eps;
  const float* cos_sin;
};

template <int kDim>
struct DecodeKernels {
  static void launch(DType dtype, const DecodeGrid& grid, const Decode& args, const Launch& launch);
  // Clusters of the kernel that the current device runs at once.
  static int resident_clusters(int warps, int cluster);
};

}  // namespace octavo::gpu
