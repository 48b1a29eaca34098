// Prefill attention on sm_90a by blocks that stay, each for an equal stretch of the work (prefill_plan.cuh). Floor as
// in prefill_attention.cuh.
//
// Blocks stay for their whole stretch. One warp fetches keys and values, 128 tokens a stage, two stages each, by tensor
// copies: one KV block's head is a box of 16 lines of 128 bytes (two boxes at head_dim 128). Three warps fetch the next
// query rows and store finished outputs. Two warpgroups take 64 rows each: their matrix instructions read K and V from
// shared memory, scores and probabilities stay in registers, and the scores of a tile run on the tensor cores beside
// P V of the tile before.
#pragma once

#include <cuda_runtime.h>

#include "gpu/launch.cuh"
#include "gpu/prefill_consumer.cuh"
#include "gpu/tensor_map.cuh"

namespace octavo::gpu {

template <class T, int kDim>
class StretchPrefill {
 public:
  using Shared = StretchShared<kDim>;
  static constexpr int kThreads = 3 * 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ __forceinline__ StretchPrefill(const Prefill& args, const CUtensorMap& pool, Shared& shared)
      : args_(args), pool_(pool), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        ptx::init_barrier(ptx::shared_address(&shared_.key_full[i]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.value_full[i]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.key_empty[i]), kConsumerWarps);
        ptx::init_barrier(ptx::shared_address(&shared_.value_empty[i]), kConsumerWarps);
        ptx::init_barrier(ptx::shared_address(&shared_.query_full[i]), kRowThreads);
        ptx::init_barrier(ptx::shared_address(&shared_.out_full[i]), 32 * kConsumerWarps);
      }
      ptx::publish_shared_stores();
    }
    __syncthreads();
    ptx::wait_for_previous_kernel();
    // Registers go where they are needed: 128 * 40 + 256 * 232 = 384 * 168.
    if (threadIdx.x < 128) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      if (threadIdx.x < 32) {
        fetch_keys();
      } else {
        move_rows();
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      PrefillConsumer<T, kDim>(args_, shared_).run();
    }
  }

 private:
  static_assert(Shared::kStages == 2);
  static constexpr int kBlock = 16;  // tokens of a KV block
  static constexpr int kBlocks = Shared::kKeys / kBlock;
  static constexpr int kLines = Shared::kLines;
  static constexpr int kBoxBytes = kBlock * 128;
  static constexpr int kPieces = kDim / 8;  // 16-byte pieces of a row
  static constexpr int kConsumerWarps = 8;
  static constexpr int kRowThreads = 96;
  static constexpr int kRowStep = kRowThreads / kPieces;
  using Cursor = PrefillRowCursor<kRowStep>;

  // ---- the warp that fetches keys and values

  __device__ __forceinline__ void fetch_keys() const {
    PrefillWalk walk(args_);
    int stage = 0, parity = 0;
    for (PrefillItem item = walk.next(); item.exists; item = walk.next()) {
      const int* table = args_.block_tables + static_cast<int64_t>(item.place.seq) * args_.max_blocks;
      const int blocks = (item.context_len + kBlock - 1) / kBlock;
      for (int tile = item.place.key; tile < item.end; ++tile) {
        // Lane i has block i % 8 and, at head_dim 128, line i / 8. Blocks past the context are left out.
        const int count = min(kBlocks, blocks - tile * kBlocks);
        const bool mine = lane_ < kBlocks * kLines && lane_ % kBlocks < count;
        const int id = mine ? __ldg(table + tile * kBlocks + lane_ % kBlocks) : 0;
        const int head = item.place.head;
        fill(shared_.key[stage], &shared_.key_full[stage], &shared_.key_empty[stage], parity, mine, count, head, id);
        fill(shared_.value[stage], &shared_.value_full[stage], &shared_.value_empty[stage], parity, mine, count,
             args_.kv_heads + head, id);
        if (++stage == Shared::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }

  __device__ __forceinline__ void fill(typename Shared::Keys& to, uint64_t* full, uint64_t* empty, int parity,
                                       bool mine, int count, int head, int id) const {
    const uint32_t arrived = ptx::shared_address(full);
    ptx::wait_for_phase(ptx::shared_address(empty), parity ^ 1);  // the first round finds every stage empty
    if (lane_ == 0) ptx::arrive_expecting(arrived, count * kLines * kBoxBytes);
    __syncwarp();
    if (!mine) return;
    const int line = lane_ / kBlocks;
    const uint32_t place = ptx::shared_address(to[line][lane_ % kBlocks * kBlock]);
    ptx::copy_box(place, &pool_, line * 64, 0, head, args_.layer, id, arrived);
  }

  // ---- the warps that fetch queries and store outputs; a thread has the same pieces both times

  __device__ __forceinline__ void move_rows() const {
    PrefillWalk walk(args_);
    Cursor cursor(args_, kDim);
    PrefillItem item = walk.next();
    load_queries(item, cursor, 0);
    int buffer = 0, parity = 0;
    while (item.exists) {
      const PrefillItem next = walk.next();
      load_queries(next, cursor, buffer ^ 1);
      ptx::wait_for_phase(ptx::shared_address(&shared_.out_full[buffer]), parity);
      store_outputs(item, cursor, buffer);
      item = next;
      if (buffer == 1) parity ^= 1;
      buffer ^= 1;
    }
  }

  __device__ __forceinline__ int piece() const { return (threadIdx.x - 32) % kPieces; }
  __device__ __forceinline__ int first_row() const { return (threadIdx.x - 32) / kPieces; }

  __device__ __forceinline__ void load_queries(const PrefillItem& item, Cursor& cursor, int buffer) const {
    if (threadIdx.x == 32) shared_.item[buffer] = item;
    if (item.exists) {
      const T* from = static_cast<const T*>(args_.query) + cursor.start(item, first_row()) + 8 * piece();
#pragma unroll 4
      for (int row = first_row(); row < Shared::kRows; row += kRowStep, cursor.step()) {
        const bool exists = cursor.exists();
        ptx::copy_async(ptx::shared_address(piece_of<kDim>(shared_.query[buffer], row, piece())),
                        exists ? from + cursor.offset() : args_.query, exists);
      }
      ptx::commit_copies();
      ptx::wait_for_copies<0>();
      ptx::publish_shared_stores();
    }
    ptx::arrive(ptx::shared_address(&shared_.query_full[buffer]));
  }

  __device__ __forceinline__ void store_outputs(const PrefillItem& item, Cursor& cursor, int buffer) const {
    const bool low = shared_.stores[buffer][0] != 0, high = shared_.stores[buffer][1] != 0;
    T* to = static_cast<T*>(args_.out) + cursor.start(item, first_row()) + 8 * piece();
#pragma unroll 4
    for (int row = first_row(); row < Shared::kRows; row += kRowStep, cursor.step()) {
      const uint4 data = *reinterpret_cast<const uint4*>(piece_of<kDim>(shared_.query[buffer], row, piece()));
      if (cursor.exists() && (row < 64 ? low : high)) *reinterpret_cast<uint4*>(to + cursor.offset()) = data;
    }
  }

  const Prefill& args_;
  const CUtensorMap& pool_;
  Shared& shared_;
  const int lane_;
#endif
};

template <class T, int kDim>
__global__ void __launch_bounds__(StretchPrefill<T, kDim>::kThreads, 1)
    prefill_stretch_kernel(const __grid_constant__ Prefill args, const __grid_constant__ CUtensorMap pool) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char stretch_shared[];
  ptx::let_next_kernel_start();
  StretchPrefill<T, kDim>(args, pool, *reinterpret_cast<StretchShared<kDim>*>(stretch_shared)).run();
#endif
}

template <class T, int kDim>
void launch_stretch_prefill(const Prefill& args, const KvPool& pool, const Launch& launch) {
  constexpr size_t kSharedBytes = sizeof(StretchShared<kDim>);
  allow_shared_bytes<prefill_stretch_kernel<T, kDim>>(kSharedBytes);
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * sizeof(T); };
  // Elements of a head, tokens of a block, keys' then values' heads, layers, blocks.
  const CUtensorMap map =
      swizzled_map<5>(pool.data, pool.dtype,
                      {kDim, static_cast<cuuint64_t>(pool.block_size), 2 * static_cast<cuuint64_t>(pool.kv_heads),
                       static_cast<cuuint64_t>(pool.layers), static_cast<cuuint64_t>(pool.num_blocks)},
                      {bytes(kDim), bytes(pool.head_stride()), bytes(pool.layer_stride()), bytes(pool.block_stride())},
                      {64, static_cast<cuuint32_t>(pool.block_size), 1, 1, 1});
  launch_kernel(
      "paged_attention", prefill_stretch_kernel<T, kDim>,
      {.grid = dim3(args.blocks), .block = dim3(StretchPrefill<T, kDim>::kThreads), .shared_bytes = kSharedBytes},
      launch, args, map);
}

}  // namespace octavo::gpu
