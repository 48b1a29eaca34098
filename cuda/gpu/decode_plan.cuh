// How a decode step's attention is shared out: which part of which sequence each cluster of thread blocks reads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "octavo/paged_attention.h"

namespace octavo::gpu {

constexpr int kBlockTokens = 16;  // the pool's block size
constexpr int kStepBlocks = 2;    // KV blocks a warp holds at once
constexpr int kStepTokens = kBlockTokens * kStepBlocks;

// A stretch of one sequence's context for one KV head, in steps of kStepTokens: what a cluster reads at a time. The
// context of a (sequence, KV head) pair may be cut into parts; part i is read by cluster `first` + i, of single blocks
// by block `first` + i * kv_heads.
struct alignas(16) Split {
  int16_t seq;  // -1: none
  int16_t kv_head;
  int begin;   // first step
  int end;     // past the last step
  int length;  // tokens in the sequence's context
  int first;   // the cluster that reads the pair's first part
  int16_t part;
  int16_t parts;
  int next;     // index in the plan of the cluster's next split; -1: none; -1 - n: one of n that all blocks share
  int empties;  // sequences without context in the whole batch: their outputs are zeros
};

constexpr int kPiecesABlock = 4;  // at most

// The frozen side of a decode launch: from capacities and the device only.
struct DecodeGrid {
  int warps;            // a thread block
  int cluster;          // thread blocks that read one split together and merge through distributed shared memory
  int clusters;         // launched; single blocks may have several splits in turn
  int fixed_parts = 0;  // > 0: contexts are cut by their own length alone, into so many parts at most; see decode_grid
  int key_steps = 2;    // of a warp, whose keys may be on their way at once: see key_steps_of

  // Clusters that a plan may name: those launched, and, of single blocks, pieces that they take as they get there.
  int shares() const { return cluster == 1 ? clusters * (1 + kPiecesABlock) : clusters; }
};

// The grid for a batch: one cluster a (sequence, KV head) where that fits, as large as it fits; else single blocks.
// `fixed`: single blocks, and the order of a sequence's sums depends on nothing but its own length.
DecodeGrid decode_grid(int num_seqs, int kv_heads, int head_dim, bool fixed);

// plan_attention for a given grid.
void plan_decode(const DecodeGrid& grid, const PlanAttentionArgs& args);

// What lies in the workspace, as byte offsets. Tickets and the number of pieces taken come first and have one place for
// every grid: they are zero between launches, and nothing else may be written over them.
struct DecodeWorkspace {
  DecodeWorkspace(const DecodeGrid& grid, int num_seqs, int kv_heads, int group, int head_dim);
  size_t tickets, taken, plan, empties, stats, outputs, bytes;
};

// Where part `part` of a pair whose first part is cluster `first`'s leaves its partial result. A cluster has at most
// two: of the pair it ends with, and of one that an earlier cluster began.
__host__ __device__ constexpr int partial_slot(int first, int part, int apart) {
  return part == 0 ? 2 * first + 1 : 2 * (first + part * apart);
}

// A warp of a large cluster seldom has a second step, and short heads need the room beside a decode matmul. Clusters of
// two have many steps a warp; they need that room where the matmuls leave it, that is for few rows.
constexpr int key_steps_of(int cluster, int head_dim, int num_seqs) {
  constexpr int kFewRows = 16;
  if (cluster == 1 || head_dim % 64 != 0) return cluster > 3 ? 1 : 2;
  return head_dim <= 64 || cluster > 3 || (cluster == 2 && num_seqs <= kFewRows) ? 1 : 2;
}

constexpr int kMaxGroup = 8;  // query heads a KV head: the columns of an mma
struct Decode {
  void* out;
  const void* query;     // [num_seqs][query_stride]: queries; if `writes` the raw qkv row
  int64_t query_stride;  // elements
  void* pool;            // at this layer
  int64_t block_stride;  // elements
  int64_t value_offset;  // elements from a block's keys to its values
  int block_tiles;       // keys or values of one head in a block, of all layers
  const int* block_tables;
  int max_blocks;
  const Split* plan;
  const int* empties;  // sequences without context
  int* tickets;        // [clusters][cluster]
  int* taken;          // pieces, and attempts that found none left
  float2* stats;       // [2 clusters][cluster][kMaxGroup]
  float4* outputs;     // [2 clusters][group * head_dim / 4]
  float scale_log2;    // scale * log2(e): probabilities are powers of two
  int q_heads;
  int kv_heads;
  int group;
  bool reads_early;  // starts reading KV before the previous kernel has ended
  bool writes;  // bias, QK-norm, RoPE and the write of the newest K and V are still to do; else what follows is unused
  const void* bias;
  const void* q_norm_weight;
  const void* k_norm_weight;
  float norm_eps;
  const float* cos_sin;
  const char* ahead;  // kIdlePieces for each block of the grid, `ahead_stride` bytes apart
  int ahead_stride;
  int ahead_bytes;  // of a piece
};
constexpr int kIdlePieces = 11;

template <int kDim>
struct DecodeKernels {
  static constexpr int kClusterWarps = 8;
  // Clusters of 6 and 3 beside those of powers of two. Three single blocks of short heads fit a multiprocessor, so that
  // few clusters pay there.
  static constexpr bool kOddClusters = kDim == 128;
  static constexpr bool kLargeClusters = kDim % 64 == 0;  // of 16, where the device runs them
  static int single_warps();                              // of a thread block in no cluster
  static void launch(const KvPool& pool, const DecodeGrid& grid, const Decode& args, const Launch& launch);
  // Clusters of the kernel that the current device runs at once.
  static int resident_clusters(int cluster);
};

}  // namespace octavo::gpu
