// Prefill attention on sm_90a. Floor and row packing as in prefill_attention.cuh.
//
// One producer warp fetches keys and values, 128 tokens a stage, two stages each, by tensor copies: one KV block's head
// is a box of 16 lines of 128 bytes (two boxes at head_dim 128). Two consumer warpgroups take 64 rows each. Their
// matrix instructions read K and V from shared memory, scores and probabilities stay in registers, and the scores of a
// tile run on the tensor cores beside P V of the tile before, so that softmax hides behind both.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/prefill_rows.cuh"
#include "gpu/ptx.cuh"
#include "gpu/tensor_map.cuh"
#include "gpu/wgmma.cuh"

namespace octavo::gpu {

template <int kDim>
struct WarpgroupShared {
  static constexpr int kRows = 128;
  static constexpr int kKeys = 128;
  static constexpr int kStages = 2;
  static constexpr int kLines = kDim / 64;  // 128-byte lines of a row
  using Rows = unsigned char[kLines][kRows][128];
  using Keys = unsigned char[kLines][kKeys][128];

  alignas(1024) Rows query;  // later the output
  alignas(1024) Keys key[kStages];
  alignas(1024) Keys value[kStages];
  alignas(8) uint64_t key_full[kStages], key_empty[kStages];
  alignas(8) uint64_t value_full[kStages], value_empty[kStages];
};

template <class T, int kDim>
class WarpgroupPrefill {
 public:
  using Shared = WarpgroupShared<kDim>;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (1 + kConsumers);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ __forceinline__ WarpgroupPrefill(const Prefill& args, const CUtensorMap& pool, Shared& shared)
      : args_(args), pool_(pool), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (!rows_.find(args_, blockIdx.x)) return;
    tiles_ = (rows_.visible + kKeys - 1) / kKeys;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        ptx::init_barrier(ptx::shared_address(&shared_.key_full[stage]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.value_full[stage]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.key_empty[stage]), 4 * kConsumers);
        ptx::init_barrier(ptx::shared_address(&shared_.value_empty[stage]), 4 * kConsumers);
      }
      ptx::publish_shared_stores();
    }
    __syncthreads();
    // Registers go where they are needed: 128 * 24 + 256 * 240 of 65536.
    if (threadIdx.x < 128) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
      if (threadIdx.x < 32) produce();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
      consume();
    }
  }

 private:
  static constexpr int kBlock = 16;  // tokens of a KV block
  static constexpr int kKeys = Shared::kKeys;
  static constexpr int kStages = Shared::kStages;
  static constexpr int kLines = Shared::kLines;
  static constexpr int kBoxBytes = kBlock * 128;
  static constexpr int kRowsAGroup = 64;
  static constexpr int kPieces = kDim / 8;   // 16-byte pieces of a row
  static constexpr int kScores = kKeys / 2;  // floats a thread: groups of eight columns, four floats each
  static constexpr int kOutputs = kDim / 2;
  static constexpr unsigned kAll = ~0u;
  using Products = wgmma::Warpgroup<T, kKeys>;  // Q K^T
  using Sums = wgmma::Warpgroup<T, kDim>;       // P V

  // ---- producer

  __device__ __forceinline__ void produce() {
    const int* table = args_.block_tables + static_cast<int64_t>(rows_.seq) * args_.max_blocks;
    const int blocks = (rows_.context_len + kBlock - 1) / kBlock;
    constexpr int kBlocks = kKeys / kBlock;
    int stage = 0, parity = 0;
    for (int tile = 0; tile < tiles_; ++tile) {
      // Lane i has block i % 8 and, at head_dim 128, line i / 8. Blocks past the context are left out.
      const int count = min(kBlocks, blocks - tile * kBlocks);
      const bool mine = lane_ < kBlocks * kLines && lane_ % kBlocks < count;
      const int id = mine ? __ldg(table + tile * kBlocks + lane_ % kBlocks) : 0;
      fill(shared_.key[stage], &shared_.key_full[stage], &shared_.key_empty[stage], parity, mine, count, blockIdx.y,
           id);
      fill(shared_.value[stage], &shared_.value_full[stage], &shared_.value_empty[stage], parity, mine, count,
           gridDim.y + blockIdx.y, id);
      advance(stage, parity);
    }
  }

  __device__ __forceinline__ void fill(typename Shared::Keys& to, uint64_t* full, uint64_t* empty, int parity,
                                       bool mine, int count, int head, int id) const {
    constexpr int kBlocks = kKeys / kBlock;
    const uint32_t arrived = ptx::shared_address(full);
    ptx::wait_for_phase(ptx::shared_address(empty), parity ^ 1);  // the first round finds every stage empty
    if (lane_ == 0) ptx::arrive_expecting(arrived, count * kLines * kBoxBytes);
    __syncwarp();
    if (!mine) return;
    const int line = lane_ / kBlocks;
    const uint32_t place = ptx::shared_address(to[line][lane_ % kBlocks * kBlock]);
    ptx::copy_box(place, &pool_, line * 64, 0, head, args_.layer, id, arrived);
  }

  static __device__ __forceinline__ void advance(int& stage, int& parity) {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // ---- consumers

  __device__ __forceinline__ int group() const { return threadIdx.x / 128 - 1; }
  __device__ __forceinline__ int in_group() const { return threadIdx.x % 128; }
  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int c() const { return lane_ % 4; }
  // The block's row of this thread's first half: its second half is eight further on.
  __device__ __forceinline__ int row() const { return group() * kRowsAGroup + in_group() / 32 * 16 + g(); }

  __device__ __forceinline__ void sync_group() const { asm volatile("bar.sync %0,128;" ::"r"(group() + 1) : "memory"); }

  static __device__ __forceinline__ unsigned char* piece_of(typename Shared::Rows& rows, int row, int piece) {
    return rows[piece / 8][row] + (piece % 8 ^ row % 8) * 16;
  }

  __device__ __forceinline__ void load_queries() const {
    for (int i = in_group(); i < kRowsAGroup * kPieces; i += 128) {
      const int row = group() * kRowsAGroup + i / kPieces, piece = i % kPieces;
      bool valid;
      const int64_t offset = rows_.offset(args_, blockIdx.y, kDim, row, valid);
      uint4 data = make_uint4(0, 0, 0, 0);
      if (valid) data = *reinterpret_cast<const uint4*>(static_cast<const T*>(args_.query) + offset + 8 * piece);
      *reinterpret_cast<uint4*>(piece_of(shared_.query, row, piece)) = data;
    }
    ptx::publish_shared_stores();
    sync_group();
  }

  __device__ __forceinline__ void consume() {
    load_queries();
    float score[kScores], out[kOutputs];
    uint32_t p[kKeys / 16][4];
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, fade[2];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    if (tiles_ > 0) {
      int stage = 0, parity = 0;
      ptx::wait_for_phase(ptx::shared_address(&shared_.key_full[0]), 0);
      start_scores(score, 0);
      wgmma::wait<0>();
      wgmma::pin(score);
      release(&shared_.key_empty[0]);
      softmax(score, 0, top, sum, fade);
      pack_probabilities(p, score);
      for (int tile = 1; tile < tiles_; ++tile) {
        const int value_stage = stage, value_parity = parity;
        advance(stage, parity);
        ptx::wait_for_phase(ptx::shared_address(&shared_.key_full[stage]), parity);
        start_scores(score, stage);
        ptx::wait_for_phase(ptx::shared_address(&shared_.value_full[value_stage]), value_parity);
        start_sums(out, p, value_stage);
        wgmma::wait<1>();
        wgmma::pin(score);
        release(&shared_.key_empty[stage]);
        softmax(score, tile, top, sum, fade);
        wgmma::wait<0>();
        wgmma::pin(out);
        wgmma::pin(p);
        release(&shared_.value_empty[value_stage]);
        pack_probabilities(p, score);
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) out[i] *= fade[i / 2 % 2];
      }
      ptx::wait_for_phase(ptx::shared_address(&shared_.value_full[stage]), parity);
      clear_rows_past_context(shared_.value[stage], rows_.context_len - (tiles_ - 1) * kKeys);
      start_sums(out, p, stage);
      wgmma::wait<0>();
      wgmma::pin(out);
    }
    write(out, sum);
  }

  __device__ __forceinline__ void release(uint64_t* barrier) const {
    if (lane_ == 0) ptx::arrive(ptx::shared_address(barrier));
  }

  __device__ __forceinline__ void start_scores(float (&score)[kScores], int stage) const {
    const uint32_t query = ptx::shared_address(shared_.query[0][group() * kRowsAGroup]);
    const uint32_t key = ptx::shared_address(shared_.key[stage]);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint32_t line = k / 4 * Shared::kRows * 128, in_line = k % 4 * 32;
      Products::mma(score, wgmma::k_lines(query + line + in_line), wgmma::k_lines(key + line + in_line), k > 0);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void start_sums(float (&out)[kOutputs], uint32_t (&p)[kKeys / 16][4], int stage) const {
    const uint32_t value = ptx::shared_address(shared_.value[stage]);
    wgmma::pin(out);
    wgmma::pin(p);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Sums::mma(out, p[k], wgmma::n_lines(value + k * 2048, kKeys * 128), true);
    }
    wgmma::commit();
  }

  // Probabilities against the running maximum, and by how much what was summed so far fades.
  __device__ __forceinline__ void softmax(float (&score)[kScores], int tile, float (&top)[2], float (&sum)[2],
                                          float (&fade)[2]) const {
    if ((tile + 1) * kKeys > rows_.limit(args_, group() * kRowsAGroup) + 1) mask(score, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = top[half];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        highest = fmaxf(highest, fmaxf(score[i + 2 * half], score[i + 2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, 2));
      const float base = highest == -INFINITY ? 0.0f : highest * args_.scale_log2;
      fade[half] = ptx::exp2_fast(top[half] * args_.scale_log2 - base);
      top[half] = highest;
      sum[half] *= fade[half];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int k = 2 * half; k < 2 * half + 2; ++k) {
          score[i + k] = ptx::exp2_fast(score[i + k] * args_.scale_log2 - base);
          sum[half] += score[i + k];
        }
      }
    }
  }

  __device__ __forceinline__ void mask(float (&score)[kScores], int tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = rows_.limit(args_, row() + 8 * half) - tile * kKeys - 2 * c();
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        if (2 * i > last) score[i + 2 * half] = -INFINITY;
        if (2 * i + 1 > last) score[i + 2 * half + 1] = -INFINITY;
      }
    }
  }

  // Two neighbouring groups of eight columns are one A fragment.
  static __device__ __forceinline__ void pack_probabilities(uint32_t (&p)[kKeys / 16][4],
                                                            const float (&score)[kScores]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[k][i] = Element<T>::pack(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
    }
  }

  // The pool and stale shared memory hold anything there, NaN too, which times a probability of zero is not zero. Both
  // warpgroups clear, and wait for each other.
  __device__ __forceinline__ void clear_rows_past_context(typename Shared::Keys& values, int valid) const {
    if (valid >= kKeys) return;
    const int consumer = threadIdx.x - 128;
    for (int i = consumer; i < (kKeys - valid) * 8 * kLines; i += 128 * kConsumers) {
      const int row = valid + i / (8 * kLines), piece = i % (8 * kLines);
      *reinterpret_cast<uint4*>(values[piece / 8][row] + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
    ptx::publish_shared_stores();
    asm volatile("bar.sync %0,%1;" ::"n"(kConsumers + 1), "n"(128 * kConsumers) : "memory");
  }

  // Through the warpgroup's rows of shared memory, so that global stores are 16 bytes a lane.
  __device__ __forceinline__ void write(const float (&out)[kOutputs], const float (&sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(kAll, total, 1);
      total += __shfl_xor_sync(kAll, total, 2);
      const float inverse = total > 0.0f ? 1.0f / total : 0.0f;  // an empty context gives zeros
#pragma unroll
      for (int i = 0; i < kOutputs; i += 4) {
        const uint32_t pair = Element<T>::pack(out[i + 2 * half] * inverse, out[i + 2 * half + 1] * inverse);
        *reinterpret_cast<uint32_t*>(piece_of(shared_.query, row() + 8 * half, i / 4) + 4 * c()) = pair;
      }
    }
    sync_group();
    for (int i = in_group(); i < kRowsAGroup * kPieces; i += 128) {
      const int row = group() * kRowsAGroup + i / kPieces, piece = i % kPieces;
      bool valid;
      const int64_t offset = rows_.offset(args_, blockIdx.y, kDim, row, valid);
      if (!valid) continue;
      *reinterpret_cast<uint4*>(static_cast<T*>(args_.out) + offset + 8 * piece) =
          *reinterpret_cast<const uint4*>(piece_of(shared_.query, row, piece));
    }
  }

  const Prefill& args_;
  const CUtensorMap& pool_;
  Shared& shared_;
  const int lane_;
  PrefillRows<Shared::kRows> rows_;
  int tiles_;
#endif
};

template <class T, int kDim>
__global__ void __launch_bounds__(WarpgroupPrefill<T, kDim>::kThreads, 1)
    prefill_warpgroup_kernel(const __grid_constant__ Prefill args, const __grid_constant__ CUtensorMap pool) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char warpgroup_shared[];
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  WarpgroupPrefill<T, kDim>(args, pool, *reinterpret_cast<WarpgroupShared<kDim>*>(warpgroup_shared)).run();
#endif
}

template <class T, int kDim>
void launch_warpgroup_prefill(const Prefill& args, const KvPool& pool, int num_tokens, const Launch& launch) {
  constexpr size_t kSharedBytes = sizeof(WarpgroupShared<kDim>);
  allow_shared_bytes<prefill_warpgroup_kernel<T, kDim>>(kSharedBytes);
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * sizeof(T); };
  // Elements of a head, tokens of a block, keys' then values' heads, layers, blocks.
  const CUtensorMap map =
      swizzled_map<5>(pool.data, pool.dtype,
                      {kDim, static_cast<cuuint64_t>(pool.block_size), 2 * static_cast<cuuint64_t>(pool.kv_heads),
                       static_cast<cuuint64_t>(pool.layers), static_cast<cuuint64_t>(pool.num_blocks)},
                      {bytes(kDim), bytes(pool.head_stride()), bytes(pool.layer_stride()), bytes(pool.block_stride())},
                      {64, static_cast<cuuint32_t>(pool.block_size), 1, 1, 1});
  launch_kernel("paged_attention", prefill_warpgroup_kernel<T, kDim>,
                {.grid = dim3(prefill_blocks(args, num_tokens, WarpgroupShared<kDim>::kRows), pool.kv_heads),
                 .block = dim3(WarpgroupPrefill<T, kDim>::kThreads),
                 .shared_bytes = kSharedBytes},
                launch, args, map);
}

}  // namespace octavo::gpu
