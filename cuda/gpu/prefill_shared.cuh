// Shared memory of prefill attention by stretches: what its roles hand to each other.
#pragma once

#include <cstdint>

#include "gpu/prefill_walk.cuh"

namespace octavo::gpu {

template <int kDim>
struct StretchShared {
  static constexpr int kRows = kPrefillTileRows;
  static constexpr int kKeys = kPrefillTileKeys;
  static constexpr int kStages = 5;
  static constexpr int kLines = kDim / 64;  // 128-byte lines of a row
  using Rows = unsigned char[kLines][kRows][128];
  using Keys = unsigned char[kLines][kKeys][128];

  alignas(1024) Rows query[2];        // of an item and the next; when an item is done its outputs
  alignas(1024) Keys tiles[kStages];  // of keys and of values, in the order in which they are used
  PrefillItem item[2];
  int stores[2];  // by buffer: the rows are outputs to be stored
  int last[2];    // by warpgroup: it merges
  alignas(8) uint64_t full[kStages], empty[kStages];
  alignas(8) uint64_t query_full[2], out_full[2];
};

// Pieces of 16 bytes are swizzled as a tensor copy leaves them.
template <int kDim>
__device__ __forceinline__ unsigned char* piece_of(typename StretchShared<kDim>::Rows& rows, int row, int piece) {
  return rows[piece / 8][row] + (piece % 8 ^ row % 8) * 16;
}

}  // namespace octavo::gpu
