// What follows the QKV product of many rows, on the sums where they lie: QK-norm, rotation, and K and V into the pool.
//
// A warp has 16 rows of a tile. Lane i's sums 4 j + 2 h + k are those of row i / 4 + 8 h and column 8 j + 2 (i % 4) +
// k: four lanes have a row, and a lane both elements of every pair that is rotated.
#pragma once

#include <cuda_runtime.h>

#include "gpu/element.cuh"
#include "gpu/prefill_linear.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu {

// Row h of a lane's part of a head, kStrips strips of eight columns.
template <class T, int kStrips>
__device__ __forceinline__ void normalise_head(float* sums, int row, const T* weight, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kStrips; ++j) {
    squares += sums[4 * j + 2 * row] * sums[4 * j + 2 * row] + sums[4 * j + 2 * row + 1] * sums[4 * j + 2 * row + 1];
  }
  squares += __shfl_xor_sync(~0u, squares, 1);
  squares += __shfl_xor_sync(~0u, squares, 2);
  const float scale = rsqrtf(squares / static_cast<float>(8 * kStrips) + eps);
#pragma unroll
  for (int j = 0; j < kStrips; ++j) {
    const uint32_t pair = __ldg(reinterpret_cast<const uint32_t*>(weight + 8 * j + 2 * (threadIdx.x % 4)));
    sums[4 * j + 2 * row] *= scale * Element<T>::low(pair);
    sums[4 * j + 2 * row + 1] *= scale * Element<T>::high(pair);
  }
}

// What a warp's 16 rows of a tile need beside their sums. Angles come while the last products run, in whole lines: a
// fetch of what each lane needs would be four times as many, of a quarter of a line each. They pass through the two
// line buffers of shared memory that the rows' results will leave by, 32 cosines and 32 sines of a row at a time.
class HeadRows {
 public:
  // Positions and slots are integers of the step: there before the previous kernel.
  __device__ __forceinline__ void find(const PrefillHeads& heads, int first_row, int num_tokens) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + copied_row(i);
      position_[i] = __ldg(heads.positions + min(row, num_tokens - 1));
      slot_[i] = row < num_tokens ? static_cast<int>(__ldg(reinterpret_cast<const long long*>(heads.slots) + row)) : -1;
    }
  }

  // Starts to copy angles [32 part, 32 part + 32) of every row. lines: of cosines and of sines, this warp's.
  __device__ __forceinline__ void fetch_angles(const PrefillHeads& heads, int part, const uint32_t (&lines)[2]) const {
    const int first = 32 * part + 4 * (threadIdx.x % 8), half = heads.head_dim / 2;
    if (first < half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = heads.cos_sin + static_cast<int64_t>(position_[i]) * heads.head_dim + first;
        const uint32_t place = at(copied_row(i), threadIdx.x % 8);
        ptx::copy_async<4>(lines[0] + place, from);
        ptx::copy_async<4>(lines[1] + place, from + half);
      }
    }
    ptx::commit_copies();
  }

  // Takes the first part into registers.
  __device__ __forceinline__ void take_angles(const uint32_t (&lines)[2]) {
    ptx::wait_for_copies<0>();
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int j = 0; j < 4; ++j) first_[row][j] = read(lines, row, j);
    }
    __syncwarp();
  }

  // Norm and rotation of the queries and keys among a tile's heads.
  template <class T, int kHeadDim, int kSums>
  __device__ __forceinline__ void turn(float (&sums)[kSums], const PrefillHeads& heads, int column,
                                       const uint32_t (&lines)[2]) const {
    constexpr int kStrips = kHeadDim / 8, kHeads = 2 * kSums / kHeadDim;
    const int first = column / kHeadDim;
    const int turned = heads.q_heads + heads.kv_heads - first;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const void* weight = first + head < heads.q_heads ? heads.q_norm_weight : heads.k_norm_weight;
      if (head >= turned || weight == nullptr) continue;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        normalise_head<T, kStrips>(sums + 4 * kStrips * head, row, static_cast<const T*>(weight), heads.norm_eps);
      }
    }
    if constexpr (kStrips > 8) {
      ptx::wait_for_copies<0>();
      __syncwarp();
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int j = 0; j < kStrips / 2; ++j) {
        const float4 angle = j < 4 ? first_[row][j % 4] : read(lines, row, j % 4);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          if (head >= turned) continue;
          float* low = sums + 4 * (kStrips * head + j) + 2 * row;
          float* high = low + 2 * kStrips;
          const float a = low[0], b = low[1];
          low[0] = a * angle.x - high[0] * angle.z;
          low[1] = b * angle.y - high[1] * angle.w;
          high[0] = high[0] * angle.x + a * angle.z;
          high[1] = high[1] * angle.y + b * angle.w;
        }
      }
    }
    __syncwarp();  // the lines are free
  }

  // A line of 64 columns to K and V. Eight lanes write a row of it, four rows at a time. line: the first of the warp's
  // 16 in shared memory, swizzled; `column`: of the QKV product, which has `columns`.
  template <class T>
  __device__ __forceinline__ void write(const PrefillHeads& heads, int column, int columns, uint32_t line) const {
    const int piece = threadIdx.x % 8;
    const int in_kv = column + 8 * piece - heads.q_columns();
    if (in_kv < 0 || column + 8 * piece >= columns) return;
    // Keys and values of a layer lie head after head: [2][kv_heads][block_size][head_dim].
    const int head = in_kv / heads.head_dim;
    T* to =
        static_cast<T*>(heads.pool) + (head * heads.head_dim << heads.block_shift) + (in_kv - head * heads.head_dim);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (slot_[i] < 0) continue;
      const int in_block = slot_[i] & ((1 << heads.block_shift) - 1);
      uint32_t eight[4];
      ptx::load_shared<4>(eight, line + at(copied_row(i), piece));
      ptx::store_global(to + (slot_[i] >> heads.block_shift) * heads.block_stride + in_block * heads.head_dim, eight);
    }
  }

 private:
  // The rows whose lines this lane helps to copy, eight lanes a line.
  static __device__ __forceinline__ int copied_row(int i) { return 4 * i + threadIdx.x % 32 / 8; }
  // A piece of 16 bytes of a row's line, swizzled as tensor copies do.
  static __device__ __forceinline__ uint32_t at(int row, int piece) { return 128 * row + 16 * (piece ^ row % 8); }

  // Two cosines and two sines of a lane's strip j of four.
  static __device__ __forceinline__ float4 read(const uint32_t (&lines)[2], int row, int j) {
    const int lane = threadIdx.x % 32;
    const uint32_t place = at(lane / 4 + 8 * row, 2 * j + lane % 4 / 2) + lane % 2 * 8;
    uint32_t cosine[2], sine[2];
    ptx::load_shared<2>(cosine, lines[0] + place);
    ptx::load_shared<2>(sine, lines[1] + place);
    return {__uint_as_float(cosine[0]), __uint_as_float(cosine[1]), __uint_as_float(sine[0]), __uint_as_float(sine[1])};
  }

  int position_[4], slot_[4];  // of the copied rows; slot -1: nowhere
  float4 first_[2][4];         // angles of the first four strips of both rows
};

}  // namespace octavo::gpu
