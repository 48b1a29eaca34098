// What a launch of a decode matmul passes to its kernel.
#pragma once

#include <cuda_fp16.h>

#include "gpu/decode_linear_plan.cuh"

namespace octavo::gpu::decode {

struct KernelArgs {
  Plan plan;
  Epilogue epilogue;
  int batch;
  int out_features;  // columns of `out` or of the residual
  bool out_is_float;
  void* out;
  // With a norm: x is `scaled`, and results are divided by the rms of each row.
  const float* square_sums_in;
  int parts_in;
  int hidden;
  float eps;
  // If not null (a plan that is `direct` only): of each row of x the largest result among the first `vocab`, packed by
  // octavo/random.h; and fp32 results are stored only for rows with `wanted`.
  unsigned long long* best;
  const int* wanted;
  int vocab;
  bool opens_step;  // the next kernel may start only once the previous one is done
  // kAddResidual
  float* residual;
  void* scaled;
  float* square_sums_out;
  int parts_out;
  const void* norm_weight;
  // Of what comes after this kernel: every block fetches kAheadPieces into the L2, `ahead_stride` bytes apart.
  const char* ahead;
  int ahead_stride;
  int ahead_bytes;  // of a piece
};
constexpr int kAheadPieces = 8;

// `DecodeStream::scaled` over residual * weight: keeps fp16 from overflowing.
template <class T>
inline constexpr float kScale = 1.0f;
template <>
inline constexpr float kScale<__half> = 1.0f / 16.0f;

}  // namespace octavo::gpu::decode
