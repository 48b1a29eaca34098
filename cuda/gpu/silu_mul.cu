// out = silu(gate) * up. Floor: 3 * rows * inter elements moved once.
#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "octavo/silu_mul.h"

namespace octavo::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 2;  // of 8 elements a thread: four 16-byte loads in flight

// blockIdx.x: a stretch of kThreads * kPieces pieces of one row; blockIdx.y: the row, in strides of gridDim.y.
template <class T>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(Eight* out, const Eight* gate_up, int rows, int pieces) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const int first = blockIdx.x * kThreads * kPieces + threadIdx.x;
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    const Eight* gate = gate_up + static_cast<int64_t>(row) * 2 * pieces;
    Eight gates[kPieces], ups[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = first + i * kThreads;
      if (piece >= pieces) continue;
      ptx::load_streaming<4>(gates[i].w, gate + piece);
      ptx::load_streaming<4>(ups[i].w, gate + pieces + piece);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = first + i * kThreads;
      if (piece >= pieces) continue;
      float g[8], u[8];
      unpack<T>(g, gates[i]);
      unpack<T>(u, ups[i]);
#pragma unroll
      for (int k = 0; k < 8; ++k) u[k] *= g[k] / (1.0f + __expf(-g[k]));
      out[static_cast<int64_t>(row) * pieces + piece] = pack<T>(u);
    }
  }
}

}  // namespace

void silu_mul(const SiluMulArgs& args) {
  require(args.inter % 8 == 0, "silu_mul: inter must be a multiple of 8");
  if (args.num_tokens == 0) return;
  const int pieces = args.inter / 8;
  const int a_block = kThreads * kPieces;
  const dim3 grid((pieces + a_block - 1) / a_block, std::min(args.num_tokens, 65535));
  with_element(args.dtype, [&]<class T>(T) {
    launch_kernel("silu_mul", silu_mul_kernel<T>, {.grid = grid, .block = dim3(kThreads)}, args.launch,
                  static_cast<Eight*>(args.out), static_cast<const Eight*>(args.gate_up), args.num_tokens, pieces);
  });
}

}  // namespace octavo::gpu
