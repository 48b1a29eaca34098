// Matmul of many rows on sm_90a. Floor: 2 flops a weight and row on the tensor cores.
//
// A tile is 128 rows of x by kColumns rows of the weight. Two thread blocks are a cluster and take tiles one above the
// other: each fetches its own rows of x and half of the weight's, which go to both, since without that the L2 cannot
// keep the tensor cores fed. Blocks stay for all their tiles.
//
// Roles in a block: one warp fetches x and weights, 64 of in_features a stage; two warpgroups multiply, 64 rows each;
// one warp for each of them moves finished tiles out (and residuals in). The second warpgroup runs kLag stages behind
// the first, so that the epilogue of one runs beside the products of the other.
#pragma once

#include <cuda_runtime.h>

#include "gpu/element.cuh"
#include "gpu/prefill_heads.cuh"
#include "gpu/prefill_linear.cuh"
#include "gpu/ptx.cuh"
#include "gpu/wgmma.cuh"

namespace octavo::gpu {

template <PrefillLinear kKind, int kColumns>
struct PrefillLinearShared {
  static constexpr int kStages = kColumns == 128 ? 6 : 4;
  static constexpr int kOutColumns = kKind == PrefillLinear::kGateUp ? kColumns / 2 : kColumns;
  static constexpr int kLines = kOutColumns / 64;            // of 128 bytes of a tile's row; they go out one by one
  static constexpr int kBuffers = kLines == 4 ? 2 : kLines;  // of a line, in turns
  using Line = unsigned char[64][128];

  alignas(1024) unsigned char x[kStages][kTileRows][128];
  alignas(1024) unsigned char weight[kStages][kColumns][128];
  alignas(1024) Line out[2][kBuffers];  // of each warpgroup
  alignas(8) uint64_t full[kStages], empty[kStages];
  alignas(8) uint64_t out_free[2][kBuffers], out_full[2][kBuffers];  // out_free: with kAdd the residual is there
};

template <class T, PrefillLinear kKind, int kColumns>
class PrefillLinearBlock {
 public:
  using Shared = PrefillLinearShared<kKind, kColumns>;
  static constexpr int kThreads = 3 * 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ __forceinline__ PrefillLinearBlock(const PrefillTiles& tiles, const PrefillMaps& maps, Shared& shared)
      : tiles_(tiles), maps_(maps), shared_(shared), rank_(ptx::cluster_rank()), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        ptx::init_barrier(ptx::shared_address(&shared_.full[stage]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.empty[stage]), 8 * kClusterBlocks);
      }
      for (int i = 0; i < 2 * kBuffers; ++i) {
        ptx::init_barrier(ptx::shared_address(&shared_.out_free[0][i]), 1);
        ptx::init_barrier(ptx::shared_address(&shared_.out_full[0][i]), 4);
      }
      ptx::publish_barriers_to_cluster();
    }
    __syncthreads();
    ptx::arrive_at_cluster_barrier();
    ptx::wait_at_cluster_barrier();
    // Registers go where they are needed: 128 * 40 + 256 * 232 = 384 * 168.
    if (threadIdx.x < 128) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      const int warp = threadIdx.x / 32;
      if (lane_ == 0) {
        if (warp == 0) fetch();
        if (warp == 1 || warp == 2) move_out(warp - 1);
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      multiply(threadIdx.x / 128 - 1);
    }
    // The peer may still write and arrive here.
    __syncwarp();
    ptx::arrive_at_cluster_barrier();
    ptx::wait_at_cluster_barrier();
  }

 private:
  static constexpr int kStages = Shared::kStages;
  static constexpr int kLines = Shared::kLines;
  static constexpr int kBuffers = Shared::kBuffers;
  static constexpr int kLag = 2;
  // Product columns of a narrow tile; where there are none, those of any.
  static constexpr int kNarrow = kKind == PrefillLinear::kGateUp && kColumns == 256 ? kNarrowColumns : kColumns;

  struct Tile {
    int row, column;  // of out
    bool narrow;
  };

  template <int kWidth>  // product columns
  static constexpr int kOut = kKind == PrefillLinear::kGateUp ? kWidth / 2 : kWidth;

  __device__ __forceinline__ int first_tile() const { return blockIdx.x / kClusterBlocks; }
  __device__ __forceinline__ int step() const { return gridDim.x / kClusterBlocks; }
  __device__ __forceinline__ Tile tile_at(int index) const {
    int row, column;
    tiles_.find(index, row, column);
    row = (row * kClusterBlocks + static_cast<int>(rank_)) * kTileRows;
    if constexpr (kNarrow == kColumns) return {row, column * kOut<kColumns>, false};
    if (index >= tiles_.wide()) return {row, column * kOut<kNarrow>, true};
    return {row, tiles_.narrow_columns * kOut<kNarrow> + column * kOut<kColumns>, false};
  }

  static __device__ __forceinline__ void advance(int& stage, int& parity) {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Weights need not wait for the kernel before: as many stages of them as there are go out first.
  __device__ __forceinline__ void fetch() const {
    int stage = 0, parity = 0;
    const Tile first = tile_at(first_tile());
    const int early = min(kStages, tiles_.steps);
    for (int k = 0; k < early; ++k) fetch_weights(first, k, k);
    ptx::wait_for_previous_kernel();
    for (int index = first_tile(); index < tiles_.count(); index += step()) {
      const Tile tile = tile_at(index);
      for (int k = 0; k < tiles_.steps; ++k) {
        if (index != first_tile() || k >= early) {
          ptx::wait_for_phase(ptx::shared_address(&shared_.empty[stage]), parity ^ 1);
          fetch_weights(tile, k, stage);
        }
        ptx::copy_tile(ptx::shared_address(shared_.x[stage]), &maps_.x, k * 64, tile.row,
                       ptx::shared_address(&shared_.full[stage]));
        advance(stage, parity);
      }
    }
  }

  // Half of the columns for both blocks, or with kGateUp the gate rows by one block and the up rows by the other.
  __device__ __forceinline__ void fetch_weights(const Tile& tile, int k, int stage) const {
    constexpr uint16_t kBoth = (1 << kClusterBlocks) - 1;
    const int columns = tile.narrow ? kNarrow : kColumns, half = columns / kClusterBlocks;
    const int part = static_cast<int>(rank_);
    const int row = tile.column + part * (kKind == PrefillLinear::kGateUp ? tiles_.out_features : half);
    const uint32_t full = ptx::shared_address(&shared_.full[stage]);
    ptx::arrive_expecting(full, (kTileRows + columns) * 128);
    ptx::copy_tile_to_blocks(ptx::shared_address(shared_.weight[stage][part * half]),
                             tile.narrow ? &maps_.narrow_weight : &maps_.weight, k * 64, row, full, kBoth);
  }

  __device__ __forceinline__ void move_out(int group) const {
    ptx::wait_for_previous_kernel();
    int parity = 0;
    const int end = tiles_.count();
    for (int index = first_tile(); index < end; index += step()) {
      const Tile tile = tile_at(index);
      const int row = tile.row + 64 * group;
      if (index == first_tile()) {
        for (int line = 0; line < kBuffers; ++line) offer(group, line, row, tile.column + 64 * line);
      }
      for (int line = 0; line < kLines; ++line) {
        const int buffer = line % kBuffers;
        ptx::wait_for_phase(ptx::shared_address(&shared_.out_full[group][buffer]), parity);
        if (is_moved(tile.column + 64 * line)) {
          const uint32_t from = ptx::shared_address(shared_.out[group][buffer]);
          if (tile.narrow) {
            ptx::store_tile(&maps_.narrow_out, from, 64 * line, tile.column / kOut<kNarrow>, row);
          } else {
            ptx::store_tile(&maps_.out, from, tile.column + 64 * line, row);
          }
          ptx::commit_tile_stores();
          ptx::wait_for_tile_stores();
        }
        // Its next use: a later line of this tile, or the next tile's.
        if (line + kBuffers < kLines) {
          offer(group, buffer, row, tile.column + 64 * (line + kBuffers));
        } else if (index + step() < end) {
          const Tile next = tile_at(index + step());
          offer(group, buffer, next.row + 64 * group, next.column + 64 * buffer);
        }
        if (buffer == kBuffers - 1) parity ^= 1;
      }
    }
  }

  // Lines of keys and values only are written by the warps that made them.
  __device__ __forceinline__ bool is_moved(int column) const {
    return kKind != PrefillLinear::kQkv || column < tiles_.heads.q_columns();
  }

  // The buffer is free, or will be once the residual has arrived in it.
  __device__ __forceinline__ void offer(int group, int buffer, int row, int column) const {
    const uint32_t free = ptx::shared_address(&shared_.out_free[group][buffer]);
    if constexpr (kKind == PrefillLinear::kAdd) {
      ptx::arrive_expecting(free, sizeof(typename Shared::Line));
      ptx::copy_tile(ptx::shared_address(shared_.out[group][buffer]), &maps_.out, column, row, free);
    } else {
      ptx::arrive(free);
    }
  }

  struct Turn {
    int stage = 0, parity = 0;  // of the ring
    int out_parity = 0;
    bool leads;  // the other warpgroup waits for this one
  };

  __device__ __forceinline__ void multiply(int group) {
    if (group == 1) asm volatile("bar.sync 1,256;" ::: "memory");
    Turn turn{.leads = group == 0};
    int index = first_tile();
    for (; index < tiles_.wide(); index += step()) multiply_tile<kColumns>(tile_at(index), group, turn);
    if constexpr (kNarrow != kColumns) {
      for (; index < tiles_.count(); index += step()) multiply_tile<kNarrow>(tile_at(index), group, turn);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void multiply_tile(const Tile& tile, int group, Turn& turn) {
    float sums[kWidth / 2];
    if constexpr (kKind == PrefillLinear::kQkv) rows_.find(tiles_.heads, first_row(tile, group), tiles_.num_tokens);
    int before = 0;
    for (int k = 0; k < tiles_.steps; ++k) {
      if (turn.leads && k == min(kLag, tiles_.steps - 1)) {
        asm volatile("bar.arrive 1,256;" ::: "memory");
        turn.leads = false;
      }
      if constexpr (kKind == PrefillLinear::kQkv) {
        if (turns(tile)) prepare_heads(tile, group, k, turn.out_parity);
      }
      ptx::wait_for_phase(ptx::shared_address(&shared_.full[turn.stage]), turn.parity);
      start_products<kWidth>(sums, group, turn.stage, k > 0);
      wgmma::wait<1>();
      if (k > 0) release(before);
      before = turn.stage;
      advance(turn.stage, turn.parity);
    }
    wgmma::wait<0>();
    wgmma::pin(sums);
    release(before);
    if constexpr (kKind == PrefillLinear::kQkv) finish_heads(sums, tile, group);
    write<kWidth>(sums, group, tile.column, turn.out_parity);
  }

  template <int kWidth>
  __device__ __forceinline__ void start_products(float (&sums)[kWidth / 2], int group, int stage,
                                                 bool accumulate) const {
    const uint32_t x = ptx::shared_address(shared_.x[stage][64 * group]);
    const uint32_t weight = ptx::shared_address(shared_.weight[stage]);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma::Warpgroup<T, kWidth>::mma(sums, wgmma::k_lines(x + 32 * k), wgmma::k_lines(weight + 32 * k),
                                       k > 0 || accumulate);
    }
    wgmma::commit();
  }

  // A block's stage is filled by both, so both must know that it is empty.
  __device__ __forceinline__ void release(int stage) const {
    if (lane_ < kClusterBlocks) ptx::arrive_at_peer(ptx::shared_address(&shared_.empty[stage]), lane_);
  }

  // Of this warp.
  static __device__ __forceinline__ int first_row(const Tile& tile, int group) {
    return tile.row + 64 * group + static_cast<int>(threadIdx.x / 32 % 4 * 16);
  }

  // Whether there are queries or keys in the tile.
  __device__ __forceinline__ bool turns(const Tile& tile) const {
    return tile.column < tiles_.heads.q_columns() + tiles_.heads.kv_heads * tiles_.heads.head_dim;
  }

  // Fetches angles beside products: the first part, and once that is here and in registers the second.
  __device__ __forceinline__ void prepare_heads(const Tile& tile, int group, int k, int out_parity) {
    constexpr int kFirst = 8, kSecond = 4;  // steps before the last
    const uint32_t lines[2] = {line_of(group, 0), line_of(group, 1)};
    if (k == max(tiles_.steps - kFirst, 0)) {
      for (int i = 0; i < 2; ++i) ptx::wait_for_phase(ptx::shared_address(&shared_.out_free[group][i]), out_parity);
      if (tiles_.bias != nullptr && lane_ < kColumns / 64) {
        ptx::prefetch_line(static_cast<const T*>(tiles_.bias) + min(tile.column + 64 * lane_, tiles_.out_features - 8));
      }
      rows_.fetch_angles(tiles_.heads, 0, lines);
    }
    if (k == max(tiles_.steps - kSecond, 0)) {
      rows_.take_angles(lines);
      if (tiles_.heads.head_dim > 64) rows_.fetch_angles(tiles_.heads, 1, lines);
    }
  }

  // This warp's lines of a buffer.
  __device__ __forceinline__ uint32_t line_of(int group, int buffer) const {
    return ptx::shared_address(shared_.out[group][buffer][threadIdx.x / 32 % 4 * 16]);
  }

  __device__ __forceinline__ void finish_heads(float (&sums)[kColumns / 2], const Tile& tile, int group) const {
    const PrefillHeads& heads = tiles_.heads;
    const uint32_t lines[2] = {line_of(group, 0), line_of(group, 1)};
    if (tiles_.bias != nullptr) add_bias(sums, tile.column);
    if (!turns(tile)) return;
    if constexpr (kColumns % 128 == 0) {
      if (heads.head_dim == 128) rows_.template turn<T, 128>(sums, heads, tile.column, lines);
    }
    if constexpr (kColumns % 96 == 0) {
      if (heads.head_dim == 96) rows_.template turn<T, 96>(sums, heads, tile.column, lines);
    }
    if (heads.head_dim == 64) rows_.template turn<T, 64>(sums, heads, tile.column, lines);
  }

  template <int kWidth>
  __device__ __forceinline__ void write(float (&sums)[kWidth / 2], int group, int column, int& parity) const {
    static_assert((kOut<kWidth> + 63) / 64 == kLines);
    if (kKind == PrefillLinear::kPlain && tiles_.bias != nullptr) add_bias(sums, column);
    // Lane i gives the address of row i % 8 of 8x8 matrix i / 8: rows 0-7 and 8-15 of 8 columns, then of the next 8.
    const int row = threadIdx.x / 32 % 4 * 16 + lane_ % 16;
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      const int buffer = line % kBuffers;
      const uint32_t line_row = ptx::shared_address(shared_.out[group][buffer][row]);
      const auto place = [&](int pair) {
        return line_row + static_cast<uint32_t>((2 * pair + lane_ / 16 ^ row % 8) * 16);
      };
      ptx::wait_for_phase(ptx::shared_address(&shared_.out_free[group][buffer]), parity);
      uint32_t before[4][4];
      if constexpr (kKind == PrefillLinear::kAdd) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) ptx::load_matrices(before[pair], place(pair));
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        if (64 * line + 16 * pair >= kOut<kWidth>) continue;
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 32 * line + 8 * pair + 2 * i;
          float low = sums[at], high = sums[at + 1];
          if constexpr (kKind == PrefillLinear::kGateUp) {
            low = silu(low) * sums[kWidth / 4 + at];
            high = silu(high) * sums[kWidth / 4 + at + 1];
          } else if constexpr (kKind == PrefillLinear::kAdd) {
            low += Element<T>::low(before[pair][i]);
            high += Element<T>::high(before[pair][i]);
          }
          packed[i] = Element<T>::pack(low, high);
        }
        ptx::store_matrices(place(pair), packed);
      }
      if constexpr (kKind == PrefillLinear::kQkv) {
        __syncwarp();
        rows_.template write<T>(tiles_.heads, column + 64 * line, tiles_.out_features, line_of(group, buffer));
      }
      ptx::publish_shared_stores();
      __syncwarp();
      if (lane_ == 0) ptx::arrive(ptx::shared_address(&shared_.out_full[group][buffer]));
      if (buffer == kBuffers - 1) parity ^= 1;
    }
  }

  static __device__ __forceinline__ float silu(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(inverse) : "f"(1.0f + __expf(-x)));
    return x * inverse;
  }

  template <int kCount>
  __device__ __forceinline__ void add_bias(float (&sums)[kCount], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int column = first + 2 * i + 2 * (lane_ % 4);
      if (column >= tiles_.out_features) continue;
      const uint32_t pair = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(tiles_.bias) + column));
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        sums[i + half] += Element<T>::low(pair);
        sums[i + half + 1] += Element<T>::high(pair);
      }
    }
  }

  const PrefillTiles& tiles_;
  const PrefillMaps& maps_;
  Shared& shared_;
  const uint32_t rank_;
  const int lane_;
  HeadRows rows_;  // kQkv only
#endif
};

template <class T, PrefillLinear kKind, int kColumns>
__global__ void __launch_bounds__(PrefillLinearBlock<T, kKind, kColumns>::kThreads, 1)
    prefill_linear_kernel(const __grid_constant__ PrefillTiles tiles, const __grid_constant__ PrefillMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char prefill_linear_shared[];
  ptx::let_next_kernel_start();
  PrefillLinearBlock<T, kKind, kColumns>(
      tiles, maps, *reinterpret_cast<PrefillLinearShared<kKind, kColumns>*>(prefill_linear_shared))
      .run();
#endif
}

template <class T, PrefillLinear kKind, int kColumns>
void launch_prefill_linear(const PrefillTiles& tiles, const PrefillMaps& maps, const Launch& launch) {
  constexpr size_t kSharedBytes = sizeof(PrefillLinearShared<kKind, kColumns>);
  static_assert(kSharedBytes <= 227 * 1024);
  allow_shared_bytes<prefill_linear_kernel<T, kKind, kColumns>>(kSharedBytes);
  const int clusters = std::min(current_device().multiprocessors / kClusterBlocks, tiles.count());
  launch_kernel("prefill_linear", prefill_linear_kernel<T, kKind, kColumns>,
                {.grid = dim3(clusters * kClusterBlocks),
                 .block = dim3(PrefillLinearBlock<T, kKind, kColumns>::kThreads),
                 .shared_bytes = kSharedBytes,
                 .cluster = kClusterBlocks},
                launch, tiles, maps);
}

template <class T>
void PrefillLinearKernels<T>::launch(PrefillLinear kind, int columns, const PrefillTiles& tiles,
                                     const PrefillMaps& maps, const Launch& launch) {
  const auto with_columns = [&]<PrefillLinear kKind>() {
    if (columns == 256) return launch_prefill_linear<T, kKind, 256>(tiles, maps, launch);
    if constexpr (kKind != PrefillLinear::kGateUp) {
      if (columns == 192) return launch_prefill_linear<T, kKind, 192>(tiles, maps, launch);
    }
    launch_prefill_linear<T, kKind, 128>(tiles, maps, launch);
  };
  if (kind == PrefillLinear::kPlain) return with_columns.template operator()<PrefillLinear::kPlain>();
  if (kind == PrefillLinear::kAdd) return with_columns.template operator()<PrefillLinear::kAdd>();
  if (kind == PrefillLinear::kQkv) return with_columns.template operator()<PrefillLinear::kQkv>();
  with_columns.template operator()<PrefillLinear::kGateUp>();
}

}  // namespace octavo::gpu
