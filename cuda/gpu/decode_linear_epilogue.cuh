// What comes behind the sums of a decode matmul: residual and square sums, norm and SiLU, the best of each row; and the
// 1 / rms that the ops behind a norm divide by.
#pragma once

#include "gpu/decode_linear_args.cuh"
#include "gpu/decode_linear_sums.cuh"
#include "gpu/element.cuh"
#include "octavo/random.h"

namespace octavo::gpu::decode {

// ---- four rows of one column at a time

template <class T>
__device__ __forceinline__ void store_four(T* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = {Element<T>::pack(v.x, v.y), Element<T>::pack(v.z, v.w)};
}

__device__ __forceinline__ float silu_mul(float gate, float up) { return __fdividef(gate * up, 1.0f + __expf(-gate)); }

// To the same bits wherever it is compiled.
__device__ __forceinline__ float square_sum(float a, float b) { return __fmaf_rn(b, b, __fmul_rn(a, a)); }

// What finishing four elements of the residual needs beside their sum. Fetched while the activations are on their way.
template <class T>
struct ResidualPiece {
  float4 residual;
  uint2 norm_weight;

  __device__ __forceinline__ void fetch(const KernelArgs& args, int column, int row) {
    residual = __ldcg(reinterpret_cast<const float4*>(args.residual + int64_t{column} * args.out_features + row));
    norm_weight = __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(args.norm_weight) + row));
  }

  // Returns the sum of the four squares.
  __device__ __forceinline__ float finish(const KernelArgs& args, int column, int row, float4 sum) const {
    const int64_t at = int64_t{column} * args.out_features + row;
    const float4 h = residual + sum;
    *reinterpret_cast<float4*>(args.residual + at) = h;
    store_four<T>(
        static_cast<T*>(args.scaled) + at,
        {h.x * (Element<T>::low(norm_weight.x) * kScale<T>), h.y * (Element<T>::high(norm_weight.x) * kScale<T>),
         h.z * (Element<T>::low(norm_weight.y) * kScale<T>), h.w * (Element<T>::high(norm_weight.y) * kScale<T>)});
    return square_sum(h.x, h.y) + square_sum(h.z, h.w);
  }
};

__device__ __forceinline__ float4 operator*(float4 a, float scale) {
  return {a.x * scale, a.y * scale, a.z * scale, a.w * scale};
}

// A quad of a column behind a norm: four rows as they are, or four channels of gate and up. `own_row`: the block's
// first.
template <class T>
__device__ __forceinline__ void store_normed(const KernelArgs& args, int column, int quad, int own_row,
                                             float inverse_rms, const Partials& partials) {
  const bool gate_up = args.epilogue == Epilogue::kSiluMul;
  // Gate and up: 8 gate rows, then their 8 up rows, and so on.
  const int row = gate_up ? quad / 2 * 16 + quad % 2 * 4 : quad * 4;
  const int to = (gate_up ? own_row / 2 : own_row) + quad * 4;
  if (row >= args.plan.own_rows || to >= args.out_features) return;
  float4 v = partials.sum(column, row) * inverse_rms;
  if (gate_up) {
    const float4 up = partials.sum(column, row + 8) * inverse_rms;
    v = {silu_mul(v.x, up.x), silu_mul(v.y, up.y), silu_mul(v.z, up.z), silu_mul(v.w, up.w)};
  }
  const int64_t at = int64_t{column} * args.out_features + to;
  if (args.out_is_float) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = v;
  } else {
    store_four<T>(static_cast<T*>(args.out) + at, v);
  }
}

// The best result of each of a warp's columns: kept by one lane a column in shared memory, from tile to tile.
template <int kColumnTiles>
struct BestOfColumns {
  uint64_t* slots;        // [column]
  uint32_t wanted = ~0u;  // bit n: results of this lane's column of tile n are to be stored

  static __device__ __forceinline__ int column_in_tile() { return threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2; }

  __device__ __forceinline__ void clear(const KernelArgs& args, int first_column) {
    wanted = 0;
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = first_column + n * 8 + column_in_tile();
      if (column < args.batch && (args.wanted == nullptr || args.wanted[column] != 0)) wanted |= 1u << n;
    }
    for (int i = threadIdx.x % 32; i < kColumnTiles * 8; i += 32) slots[i] = 0;
    __syncwarp();
  }

  // Lanes 0 to 7 own a column each; the three lanes further on in steps of eight have other rows of it.
  __device__ __forceinline__ void offer(int n, uint64_t best) {
#pragma unroll
    for (int lanes = 8; lanes < 32; lanes *= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, best, lanes);
      best = best > other ? best : other;
    }
    uint64_t* slot = slots + n * 8 + column_in_tile();
    if (threadIdx.x % 32 < 8 && best > *slot) *slot = best;
  }
};

// The sums of the only chain, behind a norm, from registers: rows of a tile beside consumers that go on with the next.
template <class T, class Sums>
__device__ __forceinline__ void store_direct(const KernelArgs& args, const Sums& sums, int first_row, int first_column,
                                             int own_row, const float* inverse_rms,
                                             BestOfColumns<Sums::kColumnTiles>& best) {
  float top[Sums::kColumnTiles];
  int top_id[Sums::kColumnTiles];
  uint32_t unusable = 0;
#pragma unroll
  for (int n = 0; n < Sums::kColumnTiles; ++n) {
    top[n] = -INFINITY;
    top_id[n] = -1;
  }
  sums.visit(first_row, [&](int n, int row, int column, float low, float high) {
    column += first_column;
    const int to = own_row + row;
    if (row >= args.plan.own_rows || to >= args.out_features || column >= args.batch) return;
    const float scale = inverse_rms[column];
    low *= scale;
    high *= scale;
    const int64_t at = int64_t{column} * args.out_features + to;
    if (!args.out_is_float) {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + at) = Element<T>::pack(low, high);
    } else if (best.wanted >> n & 1) {
      *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = {low, high};
    }
    if (args.best == nullptr) return;
    if (to < args.vocab) {
      if (!(low < INFINITY)) unusable |= 1u << n;
      if (low > top[n]) top[n] = low, top_id[n] = to;
    }
    if (to + 1 < args.vocab) {
      if (!(high < INFINITY)) unusable |= 1u << n;
      if (high > top[n]) top[n] = high, top_id[n] = to + 1;
    }
  });
  if (args.best == nullptr) return;
#pragma unroll
  for (int n = 0; n < Sums::kColumnTiles; ++n) {
    best.offer(n, unusable >> n & 1 ? kUnusableScore : top_id[n] < 0 ? 0 : packed_score(top[n], top_id[n]));
  }
}

// 1 / rms of a row, by four lanes a row: one trip to L2 for the whole batch, under way while activations arrive.
template <class T>
struct InverseRms {
  static constexpr int kLanes = 4;
  static constexpr int kMost = kMaxParts / (4 * kLanes);
  float4 sums[kMost];

  __device__ __forceinline__ void fetch(const KernelArgs& args, int row, int lane) {
    const float4* from = reinterpret_cast<const float4*>(args.square_sums_in + row * args.parts_in);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int part = lane + kLanes * i;
      sums[i] = row < args.batch && part < args.parts_in / 4 ? __ldcg(from + part) : float4{};
    }
  }

  __device__ __forceinline__ void finish(float* to, const KernelArgs& args, int row, int lane) const {
    float4 sum = sums[0];
#pragma unroll
    for (int i = 1; i < kMost; ++i) sum = sum + sums[i];
    float total = (sum.x + sum.y) + (sum.z + sum.w);
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (row < args.batch && lane == 0) to[row] = rsqrtf(__fdividef(total, args.hidden) + args.eps) * (1.0f / kScale<T>);
  }
};

// The arguments lie in constant memory, whose cache is cold when a kernel starts: brings them in while there is time.
__device__ __forceinline__ void warm(const KernelArgs& args) {
#pragma unroll
  for (size_t i = 0; i < sizeof(KernelArgs) / 4; i += 8) {
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&args)[i]));
  }
}

}  // namespace octavo::gpu::decode
