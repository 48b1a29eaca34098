// What a launch of a many-row matmul is told; the kernel is in prefill_linear_kernel.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gpu/launch.cuh"
#include "octavo/prefill_linear.h"

namespace octavo::gpu {

constexpr int kTileRows = 128;       // of x, a thread block
constexpr int kClusterBlocks = 2;    // one above the other, sharing the weight's rows
constexpr int kNarrowColumns = 224;  // of the narrower tiles beside those of 256, with kGateUp

// kQkv: what becomes of the columns of a tile. Queries go where `PrefillMaps::out` says.
struct PrefillHeads {
  const void* q_norm_weight;  // [head_dim] or null
  const void* k_norm_weight;
  float norm_eps;
  const float* cos_sin;  // [positions][head_dim]
  const int* positions;
  const int64_t* slots;
  void* pool;            // at this layer
  int64_t block_stride;  // elements
  int block_shift;       // log2 of the block size
  int head_dim;
  int q_heads;
  int kv_heads;

  __device__ __forceinline__ int q_columns() const { return q_heads * head_dim; }
};

// The tiles of a cluster, in the order in which clusters take them: eight of one column of tiles, then of the next, so
// that those in flight at one time share rows of x and of the weight in the L2. With kGateUp some are narrower, so that
// the last round keeps all clusters busy; they come last, and are the first columns of the result.
struct PrefillTiles {
  int rows;            // tiles, a cluster high
  int columns;         // of wide tiles
  int narrow_columns;  // of narrow tiles
  int steps;           // of 64 of in_features
  int num_tokens;
  int out_features;
  const void* bias;
  PrefillHeads heads;

  __host__ __device__ __forceinline__ int wide() const { return rows * columns; }
  __host__ __device__ __forceinline__ int count() const { return rows * (columns + narrow_columns); }

  // Where tile `index` is, among the wide or among the narrow ones.
  __device__ __forceinline__ void find(int index, int& row, int& column) const {
    constexpr int kRowsAGroup = 8;
    const bool narrow = index >= wide();
    if (narrow) index -= wide();
    const int width = narrow ? narrow_columns : columns;
    const int group = index / (kRowsAGroup * width);
    const int in_group = index - group * kRowsAGroup * width;
    const int height = min(kRowsAGroup, rows - group * kRowsAGroup);
    column = in_group / height;
    row = group * kRowsAGroup + in_group - column * height;
  }
};

// narrow_out: [narrow columns of tiles][tokens][a tile's columns], as the axes of a box.
struct PrefillMaps {
  CUtensorMap x, weight, out, narrow_weight, narrow_out;
};

template <class T>
struct PrefillLinearKernels {
  static void launch(PrefillLinear kind, int columns, const PrefillTiles& tiles, const PrefillMaps& maps,
                     const Launch& launch);
};

}  // namespace octavo::gpu
