// Prefill attention: any number of query tokens a sequence, over the paged pool with whatever prefix is already there.
// Floor: 4 * q_heads * head_dim flops for every (query, visible key).
//
// A thread block takes 128 query rows of one KV head: tokens times the group's query heads, so that all heads of a
// group share each key and value. Keys and values come in tiles of 64 tokens (four KV blocks) into shared memory,
// values while the scores are computed, the next keys during softmax and P V. Scores and probabilities stay in
// registers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/prefill_rows.cuh"
#include "gpu/prefill_stretch.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu {

constexpr int kPrefillRows = 128;

template <class T, int kDim>
struct PrefillShared {
  static constexpr int kKeys = 64;
  static constexpr int kPitch = kDim + 8;     // an odd number of 16-byte pieces: eight rows lie in eight bank groups
  alignas(16) T query[kPrefillRows][kPitch];  // later the output
  alignas(16) T key[kKeys][kPitch];
  alignas(16) T value[kKeys][kPitch];
};

template <class T, int kDim>
class PrefillBlock {
 public:
  using Shared = PrefillShared<T, kDim>;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;

  __device__ __forceinline__ PrefillBlock(const Prefill& args, Shared& shared)
      : args_(args), shared_(shared), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {}

  __device__ __forceinline__ void run() {
    if (!rows_.find(args_, blockIdx.x)) return;
    const int tiles = (rows_.visible + kKeys - 1) / kKeys;
    load_queries();
    table_ = args_.block_tables + static_cast<int64_t>(rows_.seq) * args_.max_blocks;
    keys_ = static_cast<const T*>(args_.pool) + static_cast<int64_t>(blockIdx.y) * kBlock * kDim;
    int ids = block_ids(0);
    load_tile(shared_.key, keys_, 0, ids);
    ptx::commit_copies();

    float out[kTilesM][kDim / 8][4] = {};
    float top[kTilesM][2], sum[kTilesM][2];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      top[m][0] = top[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0.0f;
    }
    for (int tile = 0; tile < tiles; ++tile) {
      ptx::wait_for_copies<0>();
      __syncthreads();  // keys are here; nobody reads the previous values any more
      load_tile(shared_.value, keys_ + args_.value_offset, tile, ids);
      ptx::commit_copies();
      float score[kTilesM][kKeys / 8][4] = {};
      scores(score);
      if ((tile + 1) * kKeys > rows_.limit(args_, 0) + 1) mask(score, tile);
      ptx::wait_for_copies<0>();
      __syncthreads();  // values are here; nobody reads the keys any more
      if (tile + 1 < tiles) {
        if ((tile + 1) % kTilesATable == 0) ids = block_ids(tile + 1);
        load_tile(shared_.key, keys_, tile + 1, ids);
        ptx::commit_copies();
      }
      softmax(score, out, top, sum);
      add_values(out, score);
    }
    ptx::wait_for_copies<0>();
    write(out, sum);
  }

 private:
  static constexpr int kBlock = 16;  // tokens of a KV block
  static constexpr int kKeys = Shared::kKeys;
  static constexpr int kPitch = Shared::kPitch;
  static constexpr int kPieces = kDim / 8;  // 16-byte pieces of a row
  static constexpr int kRowsAWarp = kPrefillRows / kWarps;
  static constexpr int kTilesM = kRowsAWarp / 16;
  static constexpr int kTilesATable = 32 * kBlock / kKeys;  // each lane holds one entry of the block table
  static constexpr unsigned kAll = ~0u;

  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int c() const { return lane_ % 4; }

  __device__ __forceinline__ void load_queries() {
    for (int i = threadIdx.x; i < kPrefillRows * kPieces; i += kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      bool valid;
      const int64_t offset = rows_.offset(args_, blockIdx.y, kDim, row, valid);
      const T* from = static_cast<const T*>(args_.query) + (valid ? offset : 0) + 8 * piece;
      ptx::copy_async(ptx::shared_address(&shared_.query[row][8 * piece]), from, valid);
    }
  }

  __device__ __forceinline__ int block_ids(int tile) const {
    const int last = (rows_.context_len - 1) / kBlock;
    return rows_.context_len > 0 ? __ldg(table_ + min(tile * (kKeys / kBlock) + lane_, last)) : 0;
  }

  // Rows past the context are zeros: the pool holds anything there, NaN too.
  __device__ __forceinline__ void load_tile(T (&to)[kKeys][kPitch], const T* from, int tile, int ids) const {
    static_assert(kKeys * kPieces % kThreads == 0);
#pragma unroll
    for (int i = 0; i < kKeys * kPieces / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads;
      const int row = index / kPieces, piece = index % kPieces;
      const int id = __shfl_sync(kAll, ids, tile % kTilesATable * (kKeys / kBlock) + row / kBlock);
      const T* source = from + id * args_.block_stride + row % kBlock * kDim + 8 * piece;
      ptx::copy_async(ptx::shared_address(&to[row][8 * piece]), source, tile * kKeys + row < rows_.context_len);
    }
  }

  // score = Q K^T, unscaled. Rows g and g + 8 of each m-tile, columns 2c and 2c + 1 of each group of eight keys.
  __device__ __forceinline__ void scores(float (&score)[kTilesM][kKeys / 8][4]) const {
    // ldmatrix: lanes 0-15 address the rows, lanes 16-31 the same rows eight columns on.
    const uint32_t query = ptx::shared_address(&shared_.query[warp_ * kRowsAWarp + lane_ % 16][lane_ / 16 * 8]);
    // For keys: matrices are (keys 0-7, k 0-7), (keys 0-7, k 8-15), (keys 8-15, k 0-7), (keys 8-15, k 8-15).
    const uint32_t key = ptx::shared_address(&shared_.key[lane_ / 16 * 8 + lane_ % 8][lane_ / 8 % 2 * 8]);
#pragma unroll
    for (int k = 0; k < kDim; k += 16) {
      uint32_t a[kTilesM][4];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) ptx::load_matrices(a[m], query + (m * 16 * kPitch + k) * 2);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        ptx::load_matrices(b, key + (n * 16 * kPitch + k) * 2);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          Element<T>::mma(score[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          Element<T>::mma(score[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void mask(float (&score)[kTilesM][kKeys / 8][4], int tile) const {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int last = rows_.limit(args_, warp_ * kRowsAWarp + m * 16 + half * 8 + g()) - tile * kKeys - 2 * c();
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          if (n * 8 > last) score[m][n][2 * half] = -INFINITY;
          if (n * 8 + 1 > last) score[m][n][2 * half + 1] = -INFINITY;
        }
      }
    }
  }

  // Scores become probabilities against the running maximum; what was summed so far fades with it.
  __device__ __forceinline__ void softmax(float (&score)[kTilesM][kKeys / 8][4], float (&out)[kTilesM][kDim / 8][4],
                                          float (&top)[kTilesM][2], float (&sum)[kTilesM][2]) const {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = top[m][half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          highest = fmaxf(highest, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
        }
        highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, 2));
        const float base = highest == -INFINITY ? 0.0f : highest * args_.scale_log2;
        const float fade = ptx::exp2_fast(top[m][half] * args_.scale_log2 - base);
        top[m][half] = highest;
        sum[m][half] *= fade;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            score[m][n][i] = ptx::exp2_fast(score[m][n][i] * args_.scale_log2 - base);
            sum[m][half] += score[m][n][i];
          }
        }
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
          out[m][d][2 * half] *= fade;
          out[m][d][2 * half + 1] *= fade;
        }
      }
    }
  }

  // out += P V. Two neighbouring column groups of the probabilities are one A fragment.
  __device__ __forceinline__ void add_values(float (&out)[kTilesM][kDim / 8][4],
                                             const float (&p)[kTilesM][kKeys / 8][4]) const {
    const uint32_t value = ptx::shared_address(&shared_.value[lane_ % 16][lane_ / 16 * 8]);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[kTilesM][4];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        a[m][0] = Element<T>::pack(p[m][2 * k][0], p[m][2 * k][1]);
        a[m][1] = Element<T>::pack(p[m][2 * k][2], p[m][2 * k][3]);
        a[m][2] = Element<T>::pack(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
        a[m][3] = Element<T>::pack(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t b[4];
        ptx::load_matrices_transposed(b, value + (k * 16 * kPitch + d * 16) * 2);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          Element<T>::mma(out[m][2 * d], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          Element<T>::mma(out[m][2 * d + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }

  // Through the warp's own rows of shared memory, so that global stores are 16 bytes a lane.
  __device__ __forceinline__ void write(float (&out)[kTilesM][kDim / 8][4], float (&sum)[kTilesM][2]) const {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(kAll, total, 1);
        total += __shfl_xor_sync(kAll, total, 2);
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;  // an empty context gives zeros
        T* row = shared_.query[warp_ * kRowsAWarp + m * 16 + half * 8 + g()];
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
          *reinterpret_cast<uint32_t*>(row + 8 * d + 2 * c()) =
              Element<T>::pack(out[m][d][2 * half] * inverse, out[m][d][2 * half + 1] * inverse);
        }
      }
    }
    __syncwarp();
    for (int i = lane_; i < kRowsAWarp * kPieces; i += 32) {
      const int row = warp_ * kRowsAWarp + i / kPieces, piece = i % kPieces;
      bool valid;
      const int64_t offset = rows_.offset(args_, blockIdx.y, kDim, row, valid);
      if (!valid) continue;
      *reinterpret_cast<uint4*>(static_cast<T*>(args_.out) + offset + 8 * piece) =
          *reinterpret_cast<const uint4*>(&shared_.query[row][8 * piece]);
    }
  }

  const Prefill& args_;
  Shared& shared_;
  const int lane_, warp_;
  PrefillRows<kPrefillRows> rows_;
  const int* table_;
  const T* keys_;
};

template <class T, int kDim>
__global__ void __launch_bounds__(PrefillBlock<T, kDim>::kThreads, 2)
    prefill_kernel(const __grid_constant__ Prefill args) {
  extern __shared__ __align__(16) unsigned char shared[];
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  PrefillBlock<T, kDim>(args, *reinterpret_cast<PrefillShared<T, kDim>*>(shared)).run();
}

template <class T, int kDim>
void launch_portable_prefill(const Prefill& args, const KvPool& pool, int num_tokens, const Launch& launch) {
  constexpr size_t kSharedBytes = sizeof(PrefillShared<T, kDim>);
  allow_shared_bytes<prefill_kernel<T, kDim>>(kSharedBytes);
  launch_kernel("paged_attention", prefill_kernel<T, kDim>,
                {.grid = dim3(prefill_blocks(args, num_tokens, kPrefillRows), pool.kv_heads),
                 .block = dim3(PrefillBlock<T, kDim>::kThreads),
                 .shared_bytes = kSharedBytes},
                launch, args);
}

template <int kDim>
void PrefillKernels<kDim>::launch(const Prefill& args, const KvPool& pool, int num_tokens, const Launch& launch_on) {
  with_element(pool.dtype, [&]<class T>(T) {
    if constexpr (kDim % 64 == 0) {
      if (args.blocks > 0) return launch_stretch_prefill<T, kDim>(args, pool, num_tokens, launch_on);
    }
    launch_portable_prefill<T, kDim>(args, pool, num_tokens, launch_on);
  });
}

}  // namespace octavo::gpu
