// RMSNorm, with the residual add in front of it. Floor: each element read once and written once (twice with a
// residual). One thread block a row; the row stays in registers between the sum of squares and the scaling.
#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "octavo/norm.h"

namespace octavo::gpu {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxPieces = 4;  // of 8 elements a thread

struct NormRows {
  Eight* out;
  const Eight* x;
  Eight* residual;
  const Eight* weight;
  float eps;
  int hidden;
};

__device__ float block_sum(float value) {
  __shared__ float of_warp[kMaxThreads / 32];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < warps ? of_warp[threadIdx.x % 32] : 0.0f;
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

template <class T, int kPieces>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const NormRows rows) {
  ptx::let_next_kernel_start();
  const int pieces = rows.hidden / 8;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * pieces;
  Eight weight[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = threadIdx.x + i * blockDim.x;
    if (piece < pieces) weight[i] = rows.weight[piece];
  }
  ptx::wait_for_previous_kernel();

  float x[kPieces][8];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = threadIdx.x + i * blockDim.x;
    if (piece >= pieces) continue;
    Eight sum = rows.x[row + piece];
    unpack<T>(x[i], sum);
    if (rows.residual != nullptr) {
      float before[8];
      unpack<T>(before, rows.residual[row + piece]);
#pragma unroll
      for (int k = 0; k < 8; ++k) x[i][k] += before[k];
      sum = pack<T>(x[i]);
      rows.residual[row + piece] = sum;
      unpack<T>(x[i], sum);  // the norm is of what was stored
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += x[i][k] * x[i][k];
  }
  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(rows.hidden) + rows.eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = threadIdx.x + i * blockDim.x;
    if (piece >= pieces) continue;
    float w[8];
    unpack<T>(w, weight[i]);
#pragma unroll
    for (int k = 0; k < 8; ++k) x[i][k] *= scale * w[k];
    rows.out[row + piece] = pack<T>(x[i]);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  require(args.hidden % 8 == 0, "rms_norm: hidden must be a multiple of 8");
  const int pieces = args.hidden / 8;
  require(pieces <= kMaxThreads * kMaxPieces, "rms_norm: hidden above 32768");
  if (args.num_tokens == 0) return;
  const NormRows rows{static_cast<Eight*>(args.out),
                      static_cast<const Eight*>(args.x),
                      static_cast<Eight*>(args.residual),
                      static_cast<const Eight*>(args.weight),
                      args.eps,
                      args.hidden};
  const int a_thread = pieces <= kMaxThreads ? 1 : kMaxPieces;
  const int threads = ((pieces + a_thread - 1) / a_thread + 31) / 32 * 32;
  with_element(args.dtype, [&]<class T>(T) {
    const auto kernel = a_thread == 1 ? rms_norm_kernel<T, 1> : rms_norm_kernel<T, kMaxPieces>;
    launch_kernel("rms_norm", kernel, {.grid = dim3(args.num_tokens), .block = dim3(threads)}, args.launch, rows);
  });
}

}  // namespace octavo::gpu
