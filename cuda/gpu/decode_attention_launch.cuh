// Launches decode attention: which instance of the kernel, with how much shared memory.
#pragma once

#include <algorithm>

#include "gpu/decode_attention.cuh"
#include "gpu/launch.cuh"
#include "gpu/tensor_map.cuh"

namespace octavo::gpu {

// One kernel and the shared memory it asks for.
struct DecodeKernel {
  void (*function)(Decode, CUtensorMap);
  size_t shared_bytes;
};

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
DecodeKernel prepared_decode_kernel() {
  constexpr auto kFunction = decode_kernel<T, Kv, kDim, kWarps, kCluster, kSteps>;
  constexpr size_t kBytes = sizeof(DecodeShared<T, Kv, kDim, kWarps, kCluster, kSteps>);
  allow_shared_bytes<kFunction>(kBytes, Kv::kTensorCopies);
  if constexpr (kCluster > 8) allow_large_clusters<kFunction>();
  return {kFunction, kBytes};
}

template <int kDim>
bool has_tensor_copies() {
  if constexpr (kDim % 64 == 0) {
    const Device& device = current_device();
    return device.capability >= 90 &&
           sizeof(DecodeShared<__nv_bfloat16, LineTile<kDim>, kDim, 8, 1, 2>) <= device.shared_bytes;
  }
  return false;
}

// Clusters have eight warps a thread block; single blocks eight, or four where more does not fit.
template <class T, int kDim>
DecodeKernel decode_kernel_of(int cluster, int warps, int key_steps) {
  if constexpr (kDim % 64 == 0) {
    if (has_tensor_copies<kDim>()) {
      using Kv = LineTile<kDim>;
      if (cluster == 1 && warps == 4) return prepared_decode_kernel<T, Kv, kDim, 4, 1, 2>();
      if constexpr (DecodeKernels<kDim>::kOddClusters) {
        if (cluster == 6) return prepared_decode_kernel<T, Kv, kDim, 8, 6, 1>();
        if (cluster == 2 && key_steps == 2) return prepared_decode_kernel<T, Kv, kDim, 8, 2, 2>();
        if (cluster == 3) return prepared_decode_kernel<T, Kv, kDim, 8, 3, 2>();
      }
      if (cluster == 16) return prepared_decode_kernel<T, Kv, kDim, 8, 16, 1>();
      return cluster == 8   ? prepared_decode_kernel<T, Kv, kDim, 8, 8, 1>()
             : cluster == 4 ? prepared_decode_kernel<T, Kv, kDim, 8, 4, 1>()
             : cluster == 2 ? prepared_decode_kernel<T, Kv, kDim, 8, 2, 1>()
                            : prepared_decode_kernel<T, Kv, kDim, 8, 1, 2>();
    }
  } else if (cluster > 1) {
    using Kv = LaneTile<kDim>;
    return cluster == 8   ? prepared_decode_kernel<T, Kv, kDim, 8, 8, 1>()
           : cluster == 4 ? prepared_decode_kernel<T, Kv, kDim, 8, 4, 1>()
                          : prepared_decode_kernel<T, Kv, kDim, 8, 2, 2>();
  }
  using Kv = LaneTile<kDim>;
  return warps == 8 ? prepared_decode_kernel<T, Kv, kDim, 8, 1, 2>() : prepared_decode_kernel<T, Kv, kDim, 4, 1, 2>();
}

// Boxes of one KV block of one head.
template <int kDim>
CUtensorMap tile_map(const KvPool& pool, const Decode& args) {
  if constexpr (kDim % 64 == 0) {
    constexpr cuuint64_t kTileBytes = TileShape<kDim>::kBytes;
    const auto tiles = static_cast<cuuint64_t>((pool.num_blocks - 1) * args.block_tiles + 2 * pool.kv_heads);
    return swizzled_map<4>(args.pool, pool.dtype, {64, kBlockTokens, kDim / 64, tiles}, {2 * kDim, 128, kTileBytes},
                           {64, kBlockTokens, kDim / 64, 1});
  }
  return {};
}

template <int kDim>
int DecodeKernels<kDim>::single_warps() {
  constexpr size_t kWanted = sizeof(DecodeShared<__nv_bfloat16, LaneTile<kDim>, kDim, 8, 1, 2>);
  return kDim > 64 && (has_tensor_copies<kDim>() || kWanted <= current_device().shared_bytes) ? 8 : 4;
}

template <int kDim>
void DecodeKernels<kDim>::launch(const KvPool& pool, const DecodeGrid& grid, const Decode& args, const Launch& launch) {
  with_element(pool.dtype, [&]<class T>(T) {
    const DecodeKernel kernel = decode_kernel_of<T, kDim>(grid.cluster, grid.warps, grid.key_steps);
    launch_kernel("paged_attention", kernel.function,
                  {.grid = dim3(grid.clusters * grid.cluster),
                   .block = dim3(grid.warps * 32),
                   .shared_bytes = kernel.shared_bytes,
                   .cluster = grid.cluster},
                  launch, args, has_tensor_copies<kDim>() ? tile_map<kDim>(pool, args) : CUtensorMap{});
  });
}

template <int kDim>
int DecodeKernels<kDim>::resident_clusters(int cluster) {
  const int warps = cluster == 1 ? single_warps() : kClusterWarps;
  const DecodeKernel kernel = decode_kernel_of<__nv_bfloat16, kDim>(cluster, warps, key_steps_of(cluster, kDim, 1));
  int count = 0;
  if (cluster == 1) {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel.function, warps * 32, kernel.shared_bytes),
          "occupancy");
    return count * current_device().multiprocessors;
  }
  cudaLaunchAttribute size;
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster * current_device().multiprocessors);
  config.blockDim = dim3(warps * 32);
  config.dynamicSmemBytes = kernel.shared_bytes;
  int largest = 0;
  check(cudaOccupancyMaxPotentialClusterSize(&largest, kernel.function, &config), "cluster size");
  if (largest < cluster) return 0;
  config.attrs = &size;
  config.numAttrs = 1;
  check(cudaOccupancyMaxActiveClusters(&count, kernel.function, &config), "cluster occupancy");
  return count;
}

}  // namespace octavo::gpu
