// What a launch of a many-row matmul is told; the kernel is in prefill_linear_kernel.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gpu/launch.cuh"
#include "octavo/prefill_linear.h"

namespace octavo::gpu {

constexpr int kTileRows = 128;     // of x, a thread block
constexpr int kClusterBlocks = 2;  // one above the other, sharing the weight's rows

// The tiles of a cluster, in the order in which clusters take them: eight of one column of tiles, then of the next, so
// that those in flight at one time share rows of x and of the weight in the L2.
struct PrefillTiles {
  int rows;     // tiles, a cluster high
  int columns;  // tiles
  int count;
  int steps;  // of 64 of in_features
  int out_features;
  const void* bias;

  __device__ __forceinline__ void find(int index, int& row, int& column) const {
    constexpr int kRowsAGroup = 8;
    const int group = index / (kRowsAGroup * columns);
    const int in_group = index - group * kRowsAGroup * columns;
    const int height = min(kRowsAGroup, rows - group * kRowsAGroup);
    column = in_group / height;
    row = group * kRowsAGroup + in_group - column * height;
  }
};

struct PrefillMaps {
  CUtensorMap x, weight, out;
};

template <class T>
struct PrefillLinearKernels {
  static void launch(PrefillLinear kind, int columns, const PrefillTiles& tiles, const PrefillMaps& maps,
                     const Launch& launch);
};

}  // namespace octavo::gpu
