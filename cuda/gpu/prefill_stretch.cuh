// Prefill attention on sm_90a by blocks that stay, each for an equal stretch of the work (prefill_plan.cuh). Floor as
// in prefill_attention.cuh.
//
// Blocks stay for all their stretches. One warp fetches keys and values, 128 tokens a stage, by tensor copies: one KV
// block's head is a box of 16 lines of 128 bytes (two boxes at head_dim 128). Another fetches query rows, a box a tile,
// and stores most outputs in the same way. Two warpgroups take 64 rows each: their matrix instructions read Q, K and V
// from shared memory, scores and probabilities stay in registers, and the scores of a tile run on the tensor cores
// beside P V of the tile before, also where the tile before ends its query rows.
#pragma once

#include <cuda_runtime.h>

#include "gpu/launch.cuh"
#include "gpu/prefill_consumer.cuh"
#include "gpu/tensor_map.cuh"

namespace octavo::gpu {

struct PrefillMaps {
  CUtensorMap pool, query, out;
};

template <class T, int kDim>
class StretchPrefill {
 public:
  using Shared = StretchShared<kDim>;
  static constexpr int kThreads = 3 * 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ __forceinline__ StretchPrefill(const Prefill& args, const PrefillMaps& maps, Shared& shared)
      : args_(args), maps_(maps), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Shared::kStages; ++i) {
        ptx::init_barrier(ptx::shared_address(&shared_.full[i]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.empty[i]), kConsumerWarps);
      }
      for (int i = 0; i < 2; ++i) {
        ptx::init_barrier(ptx::shared_address(&shared_.query_full[i]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.out_full[i]), 32 * kConsumerWarps);
      }
      ptx::publish_shared_stores();
    }
    __syncthreads();
    // Registers go where they are needed: 128 * 40 + 256 * 232 = 384 * 168.
    if (threadIdx.x < 128) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      const int warp = threadIdx.x / 32;
      if (warp == 0) {
        fetch_tiles();
      } else if (warp == 1) {
        move_rows();
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      PrefillConsumer<T, kDim>(args_, shared_).run();
    }
  }

 private:
  static constexpr int kBlock = 16;  // tokens of a KV block
  static constexpr int kBlocks = Shared::kKeys / kBlock;
  static constexpr int kLines = Shared::kLines;
  static constexpr int kBoxBytes = kBlock * 128;
  static constexpr int kConsumerWarps = 8;
  static constexpr unsigned kAll = ~0u;

  // ---- the warp that fetches keys and values

  // A tile of keys and its values. Lane i has block i % 8 of it; those past the context are left out.
  struct Tile {
    int exists, head, count, id;
  };

  __device__ __forceinline__ Tile next_tile(PrefillWalk& walk, PrefillItem& item, int& tile) const {
    if (item.exists && ++tile == item.end) item = PrefillItem{};
    if (!item.exists) {
      item = walk.next();
      tile = item.place.key;
    }
    if (!item.exists) return {};
    const int* table = args_.block_tables + static_cast<int64_t>(item.place.seq) * args_.max_blocks;
    const int first = tile * kBlocks, blocks = (item.context_len + kBlock - 1) / kBlock;
    const int mine = first + lane_ % kBlocks;
    return {1, item.place.head, max(0, min(kBlocks, blocks - first)), mine < blocks ? __ldg(table + mine) : 0};
  }

  // In the order in which the consumers use them: the keys of a tile before the values of the one before. The block
  // table is read a tile ahead.
  __device__ __forceinline__ void fetch_tiles() {
    PrefillWalk walk(args_);
    PrefillItem item{};
    int at = 0;
    Tile before{}, tile = next_tile(walk, item, at);
    ptx::wait_for_previous_kernel();
    while (tile.exists) {
      const Tile next = next_tile(walk, item, at);
      fill(tile, tile.head);
      if (before.exists) fill(before, args_.kv_heads + before.head);
      before = tile;
      tile = next;
    }
    if (before.exists) fill(before, args_.kv_heads + before.head);
  }

  // One lane copies; what it tells the copies is the same in all lanes, so that it lies in uniform registers.
  __device__ __forceinline__ void fill(const Tile& tile, int head) {
    const uint32_t full = ptx::shared_address(&shared_.full[stage_]);
    const uint32_t to = ptx::shared_address(&shared_.tiles[stage_]);
    int ids[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) ids[i] = __shfl_sync(kAll, tile.id, i);
    // The first round finds every stage empty.
    ptx::wait_for_phase(ptx::shared_address(&shared_.empty[stage_]), parity_ ^ 1);
    if (ptx::elect_one()) {
      ptx::arrive_expecting(full, tile.count * kLines * kBoxBytes);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i >= tile.count) break;
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
          ptx::copy_box(to + line * Shared::kKeys * 128 + i * kBoxBytes, &maps_.pool, line * 64, 0, head, args_.layer,
                        ids[i], full);
        }
      }
    }
    __syncwarp();
    if (++stage_ == Shared::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // ---- the warp that fetches query rows and stores outputs

  __device__ __forceinline__ void move_rows() const {
    if (!ptx::elect_one()) return;
    PrefillWalk walk(args_);
    PrefillItem item = walk.next();
    ptx::wait_for_previous_kernel();
    load_queries(item, 0);
    PrefillItem next = walk.next();
    for (int buffer = 0, parity = 0; item.exists; buffer ^= 1) {
      load_queries(next, buffer ^ 1);
      const PrefillItem after = walk.next();
      ptx::wait_for_phase(ptx::shared_address(&shared_.out_full[buffer]), parity);
      if (shared_.stores[buffer]) {
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
          ptx::store_tile(&maps_.out, ptx::shared_address(shared_.query[buffer][line]), line * 64,
                          item.place.head * args_.group, item.first_token);
        }
        ptx::commit_tile_stores();
        ptx::wait_for_tile_stores();
      }
      item = next;
      next = after;
      parity ^= buffer;
    }
  }

  __device__ __forceinline__ void load_queries(const PrefillItem& item, int buffer) const {
    const uint32_t full = ptx::shared_address(&shared_.query_full[buffer]);
    shared_.item[buffer] = item;
    if (!item.exists) return ptx::arrive(full);
    // Tokens past the sequence's end are others', past the last one's zeros: their outputs go nowhere.
    ptx::arrive_expecting(full, kLines * (kPrefillTileRows / args_.group) * args_.group * 128);
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      ptx::copy_tile(ptx::shared_address(shared_.query[buffer][line]), &maps_.query, line * 64,
                     item.place.head * args_.group, item.first_token, full);
    }
  }

  const Prefill& args_;
  const PrefillMaps& maps_;
  Shared& shared_;
  const int lane_;
  int stage_ = 0, parity_ = 0;  // of the warp that fetches keys and values
#endif
};

template <class T, int kDim>
__global__ void __launch_bounds__(StretchPrefill<T, kDim>::kThreads, 1)
    prefill_stretch_kernel(const __grid_constant__ Prefill args, const __grid_constant__ PrefillMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char stretch_shared[];
  ptx::let_next_kernel_start();
  StretchPrefill<T, kDim>(args, maps, *reinterpret_cast<StretchShared<kDim>*>(stretch_shared)).run();
#endif
}

template <class T, int kDim>
void launch_stretch_prefill(const Prefill& args, const KvPool& pool, int num_tokens, const Launch& launch) {
  constexpr size_t kSharedBytes = sizeof(StretchShared<kDim>);
  allow_shared_bytes<prefill_stretch_kernel<T, kDim>>(kSharedBytes);
  using Size = cuuint64_t;
  const auto bytes = [](int64_t elements) { return static_cast<Size>(elements) * sizeof(T); };
  // Elements of a head, heads, tokens.
  const auto rows = [&](const void* data) {
    return swizzled_map<3>(
        data, pool.dtype, {kDim, static_cast<Size>(args.q_heads), static_cast<Size>(num_tokens)},
        {bytes(kDim), bytes(static_cast<int64_t>(args.q_heads) * kDim)},
        {64, static_cast<cuuint32_t>(args.group), static_cast<cuuint32_t>(kPrefillTileRows / args.group)});
  };
  PrefillMaps maps;
  // Elements of a head, tokens of a block, keys' then values' heads, layers, blocks.
  maps.pool =
      swizzled_map<5>(pool.data, pool.dtype,
                      {kDim, static_cast<Size>(pool.block_size), 2 * static_cast<Size>(pool.kv_heads),
                       static_cast<Size>(pool.layers), static_cast<Size>(pool.num_blocks)},
                      {bytes(kDim), bytes(pool.head_stride()), bytes(pool.layer_stride()), bytes(pool.block_stride())},
                      {64, static_cast<cuuint32_t>(pool.block_size), 1, 1, 1});
  maps.query = rows(args.query);
  maps.out = rows(args.out);
  launch_kernel(
      "paged_attention", prefill_stretch_kernel<T, kDim>,
      {.grid = dim3(args.blocks), .block = dim3(StretchPrefill<T, kDim>::kThreads), .shared_bytes = kSharedBytes},
      launch, args, maps);
}

}  // namespace octavo::gpu
