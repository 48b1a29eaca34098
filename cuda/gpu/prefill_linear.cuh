// What a launch of a many-row matmul is told; the kernel is in prefill_linear_kernel.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gpu/launch.cuh"
#include "octavo/prefill_linear.h"

namespace octavo::gpu {

constexpr int kTileRows = 128;     // of x, a thread block
constexpr int kClusterBlocks = 2;  // one above the other, sharing the weight's rows

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
// that those in flight at one time share rows of x and of the weight in the L2. Where the last round would leave half
// of the clusters idle, its tiles are halved: a cluster takes the upper or the lower half of both its blocks' rows.
struct PrefillTiles {
  int rows;     // tiles, a cluster high
  int columns;  // tiles
  int whole;    // tiles that are not halved, the first ones
  int count;    // of tiles and halves
  int steps;    // of 64 of in_features
  int num_tokens;
  int out_features;
  const void* bias;
  PrefillHeads heads;

  // The tile of tile or half `index`.
  __device__ __forceinline__ void find(int index, int& row, int& column) const {
    constexpr int kRowsAGroup = 8;
    if (index > whole) index = whole + (index - whole) / 2;
    const int group = index / (kRowsAGroup * columns);
    const int in_group = index - group * kRowsAGroup * columns;
    const int height = min(kRowsAGroup, rows - group * kRowsAGroup);
    column = in_group / height;
    row = group * kRowsAGroup + in_group - column * height;
  }
};

struct PrefillMaps {
  CUtensorMap x, half_x, weight, out;  // half_x: of halves of tiles
};

template <class T>
struct PrefillLinearKernels {
  static void launch(PrefillLinear kind, int columns, const PrefillTiles& tiles, const PrefillMaps& maps,
                     const Launch& launch);
};

}  // namespace octavo::gpu
