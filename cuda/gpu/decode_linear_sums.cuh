// The sums of a decode matmul's consumer warps: products from shared memory by mma.sync or wgmma, kept in registers,
// and where they go from there.
#pragma once

#include "gpu/decode_linear_ring.cuh"
#include "gpu/decode_linear_wgmma.cuh"
#include "gpu/element.cuh"

namespace octavo::gpu::decode {

__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Partial sums in shared memory, [count][column][row], added in order.
struct Partials {
  static constexpr int kMost = 8;
  const float* first;
  int count;
  int count_stride;
  int column_stride;

  __device__ __forceinline__ float4 sum(int column, int row) const {
    const float* at = first + column * column_stride + row;
    float4 sum = *reinterpret_cast<const float4*>(at);
#pragma unroll
    for (int i = 1; i < kMost; ++i) {
      if (i < count) sum = sum + *reinterpret_cast<const float4*>(at + i * count_stride);
    }
    return sum;
  }
};

template <int kColumnTiles>
__device__ __forceinline__ void store_fragments(const float (&sums)[kColumnTiles][4], float* to, int stride,
                                                int first_row, int rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + lane / 4 + i / 2 * 8;
      if (row < rows) to[(n * 8 + lane % 4 * 2 + i % 2) * stride + row] = sums[n][i];
    }
  }
}

// Calls store(column tile, row, column, sum of that row, of the next) for the lane's part of each fragment:
// neighbouring lanes swap, so that each has two rows of one column.
template <int kColumnTiles, class Store>
__device__ __forceinline__ void visit_row_pairs(const float (&sums)[kColumnTiles][4], int first_row,
                                                const Store& store) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane / 4 % 2 != 0;
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float left = sums[n][2 * half], right = sums[n][2 * half + 1];  // this row, two columns
      const float other = __shfl_xor_sync(~0u, odd ? left : right, 4);
      store(n, first_row + lane / 4 / 2 * 2 + half * 8, n * 8 + lane % 4 * 2 + odd, odd ? other : left,
            odd ? right : other);
    }
  }
}

// One warp's sums by mma.sync: kRowTiles tiles of 16 weight rows by kColumnTiles tiles of 8 columns.
template <class T, int kColumnTiles_, int kRowTiles>
struct WarpSums {
  static constexpr int kColumnTiles = kColumnTiles_;
  static constexpr bool kWarpgroup = false;
  static constexpr int kRows = 16 * kRowTiles;
  // A single row tile has too few independent sums to hide the latency of mma: even and odd steps get their own.
  static constexpr int kSets = kRowTiles == 1 ? 2 : 1;
  float sums[kSets][kRowTiles][kColumnTiles][4];

  // Addresses are those of this lane's line for ldmatrix; the 16-byte pieces of a line are permuted.
  uint32_t weight_line, weight_piece, x_line, x_piece;

  // The lines of this warp's rows and columns in a stage: its first weight line and first activation line.
  __device__ __forceinline__ WarpSums(int first_weight_line, int first_x_line) {
    const int lane = threadIdx.x % 32;
    weight_line = first_weight_line + lane % 16;
    x_line = first_x_line + lane % 8 + (kColumnTiles == 1 ? 0 : lane / 16 * 8);
    weight_piece = (lane / 16 ^ weight_line % 8) << 4;
    x_piece = ((kColumnTiles == 1 ? lane / 8 : lane / 8 % 2) ^ x_line % 8) << 4;
    weight_line *= 2 * kBlock;
    x_line *= 2 * kBlock;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSets * kRowTiles * kColumnTiles * 4; ++i) (&sums[0][0][0][0])[i] = 0.0f;
  }

  // Adds one k-block.
  __device__ __forceinline__ void multiply(uint32_t weights, uint32_t x) {
    uint32_t b_pair[4];
#pragma unroll
    for (int step = 0; step < kBlock / 16; ++step) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::load_matrices(a[m], weights + weight_line + m * 16 * 2 * kBlock + (weight_piece ^ step << 5));
      }
      if constexpr (kColumnTiles == 1) {  // one load brings two steps of the only column tile
        if (step % 2 == 0) ptx::load_matrices(b_pair, x + x_line + (x_piece ^ step << 5));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) add(step, m, 0, a[m], b_pair[step % 2 * 2], b_pair[step % 2 * 2 + 1]);
      } else {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n += 2) {
          uint32_t b[4];
          ptx::load_matrices(b, x + x_line + n * 8 * 2 * kBlock + (x_piece ^ step << 5));
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            add(step, m, n, a[m], b[0], b[1]);
            add(step, m, n + 1, a[m], b[2], b[3]);
          }
        }
      }
    }
  }

  // Before the sums are read.
  __device__ __forceinline__ void join() {
    if constexpr (kSets == 2) {
#pragma unroll
      for (int i = 0; i < kRowTiles * kColumnTiles * 4; ++i) (&sums[0][0][0][0])[i] += (&sums[1][0][0][0])[i];
    }
  }

  __device__ __forceinline__ void store(float* to, int stride, int first_row, int rows) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) store_fragments(sums[0][m], to, stride, first_row + m * 16, rows);
  }

  template <class Store>
  __device__ __forceinline__ void visit(int first_row, const Store& store) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) visit_row_pairs(sums[0][m], first_row + m * 16, store);
  }

 private:
  __device__ __forceinline__ void add(int step, int m, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Element<T>::mma(sums[step % kSets][m][n], a[0], a[1], a[2], a[3], b0, b1);
  }
};

// A warpgroup's sums by wgmma: 64 weight rows by kColumnTiles tiles of 8 columns, both from shared memory; each warp
// holds 16 rows. Adds in the order of WarpSums with two row tiles.
template <class T, int kColumnTiles_>
struct RowGroupSums {
  static constexpr int kColumnTiles = kColumnTiles_;
  static constexpr bool kWarpgroup = true;
  static constexpr int kRows = 16;
  float sums[kColumnTiles][4];
  uint32_t weight_line, x_line;

  __device__ __forceinline__ RowGroupSums(int first_weight_line, int first_x_line)
      : weight_line((first_weight_line - threadIdx.x / 32 % 4 * kRows) * 2 * kBlock),
        x_line(first_x_line * 2 * kBlock) {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kColumnTiles * 4; ++i) (&sums[0][0])[i] = 0.0f;
  }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Starts adding one k-block; `finish` waits until at most kPending such are under way.
  __device__ __forceinline__ void start(uint32_t weights, uint32_t x) {
    const uint64_t a = wgmma::operand(weights + weight_line), b = wgmma::operand(x + x_line);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < kBlock / 16; ++step) {
      wgmma::multiply<T>(reinterpret_cast<float (&)[kColumnTiles * 4]>(sums), a + step * 2, b + step * 2);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  template <int kPending>
  __device__ __forceinline__ void finish() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  }
#endif

  __device__ __forceinline__ void join() {}

  __device__ __forceinline__ void store(float* to, int stride, int first_row, int rows) const {
    store_fragments(sums, to, stride, first_row, rows);
  }

  template <class Store>
  __device__ __forceinline__ void visit(int first_row, const Store& store) const {
    visit_row_pairs(sums, first_row, store);
  }
};

}  // namespace octavo::gpu::decode
