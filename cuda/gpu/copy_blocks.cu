// Copies whole KV blocks, all layers at once: each is one contiguous piece. Floor: every byte read once, written once.
#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "octavo/copy_blocks.h"

namespace octavo::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;                    // 16-byte loads a thread
constexpr int kStretch = kThreads * kInFlight;  // 32 KiB a thread block
constexpr int kMaxPairsAtOnce = 65535;          // gridDim.y

// blockIdx.x: a stretch of the block; blockIdx.y: the pair, in strides of gridDim.y. `pieces` of 16 bytes a block.
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(Eight* pool, const int64_t* pairs, int num_pairs, int64_t pieces) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kStretch + threadIdx.x;
  for (int pair = blockIdx.y; pair < num_pairs; pair += gridDim.y) {
    const Eight* from = pool + pairs[2 * pair] * pieces;
    Eight* to = pool + pairs[2 * pair + 1] * pieces;
    Eight held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t piece = first + i * kThreads;
      if (piece < pieces) held[i] = from[piece];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t piece = first + i * kThreads;
      if (piece < pieces) to[piece] = held[i];
    }
  }
}

}  // namespace

void copy_blocks(const CopyBlocksArgs& args) {
  if (args.num_pairs == 0) return;
  const int64_t bytes = args.pool.block_stride() * (args.pool.dtype == DType::kFloat32 ? 4 : 2);
  require(bytes % 16 == 0, "copy_blocks: a block must be a multiple of 16 bytes");
  const int64_t pieces = bytes / 16;
  const dim3 grid(static_cast<unsigned>((pieces + kStretch - 1) / kStretch), std::min(args.num_pairs, kMaxPairsAtOnce));
  launch_kernel("copy_blocks", copy_blocks_kernel, {.grid = grid, .block = dim3(kThreads)}, args.launch,
                static_cast<Eight*>(args.pool.data), args.pairs, args.num_pairs, pieces);
}

}  // namespace octavo::gpu
