// Decode matmuls of 33 to 64 rows on sm_90a: a warpgroup multiplies 64 rows of activations by a tile of weights, so
// that no row of these is padded, and keeps the sums of all of the block's chains in registers. They are joined there,
// in the order of the kernel for few rows, and go to memory, or to the blocks of the cluster that own them, without a
// way through shared memory.
#pragma once

#include "gpu/decode_linear_kernel.cuh"
#include "gpu/decode_linear_wgmma.cuh"

namespace octavo::gpu::decode {

// What an instance is compiled for. A plan's tile may have fewer rows: what lies behind it in shared memory is
// multiplied, too, and dropped.
template <Epilogue kEpilogue_, int kRows_, int kChains_, bool kHalves_, int kCluster_, int kWarpgroupRows_>
struct WarpgroupTile {
  static constexpr Epilogue kEpilogue = kEpilogue_;
  static constexpr int kRows = kRows_;
  static constexpr int kChains = kChains_;    // of the block
  static constexpr bool kHalves = kHalves_;   // even and odd steps of 16 are summed apart: a plan with row_tiles == 1
  static constexpr int kCluster = kCluster_;  // blocks that share the tile
  static constexpr bool kNormed = kEpilogue != Epilogue::kAddResidual;
  // One chain behind a norm: no sums to join, and the next tile's are made by the other warpgroup meanwhile.
  static constexpr bool kDirect = kEpilogue == Epilogue::kStore && kChains == 1;
  // Warpgroups share the tile's rows; the last may begin with some of the one before, which it drops.
  static constexpr int kWarpgroupRows = kWarpgroupRows_;
  static constexpr int kShares = (kRows + kWarpgroupRows - 1) / kWarpgroupRows;
  static constexpr int kWarpgroups = kDirect ? 2 : kShares;
  static_assert(!kDirect || kShares == 1);
  static_assert(kNormed || kShares == 1);
  static constexpr int kNormWarps = kNormed ? 4 : 0;  // compute 1 / rms beside the others
  static constexpr int kThreads =
      32 * (4 * kWarpgroups + TensorWeights::kWarps + TensorActivations::kWarps + kNormWarps);
};

// A lane has sums of two rows of x, eight apart, and of two neighbouring rows in each eight of its warpgroup's.
struct Lane {
  int x_row, weight_row;

  __device__ __forceinline__ Lane()
      : x_row(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4), weight_row(threadIdx.x % 4 * 2) {}
};

// The rows of the tile that a warpgroup multiplies, and how many of the first belong to another.
struct Share {
  int first_row, dropped;

  template <class Tile>
  static __device__ __forceinline__ Share of() {
    if constexpr (Tile::kShares == 1) return {0, 0};
    const int begin = threadIdx.x / 128 * Tile::kWarpgroupRows;
    const int first = min(begin, Tile::kRows - Tile::kWarpgroupRows);
    return {first, begin - first};
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class T, class Tile>
struct WarpgroupSums {
  static constexpr int kSums = Tile::kWarpgroupRows / 2;
  static constexpr int kSets = Tile::kHalves ? 2 : 1;
  float sums[Tile::kChains][kSets][kSums];

  // The sums of one tile: in order of K, the chains in turn.
  __device__ __forceinline__ void add(const Plan& plan, const Ring& ring, const Share& share, Position& read) {
#pragma unroll
    for (int i = 0; i < Tile::kChains * kSets * kSums; ++i) (&sums[0][0][0])[i] = 0.0f;
    int emptying = -1;
#pragma unroll 1
    for (int round = 0; round < plan.rounds; ++round) {
#pragma unroll
      for (int chain = 0; chain < Tile::kChains; ++chain) {
        const int block = chain & (plan.stage_blocks - 1);
        if (block == 0) {
          wait(ring.activations_here(read.slot), read.parity);
          wait(ring.weights_here(read.slot), read.parity);
        }
        const uint64_t x = wgmma::operand(ring.activations(read.slot) + block * plan.columns * 2 * kBlock);
        const uint64_t weights =
            wgmma::operand(ring.weights(read.slot) + (block * plan.rows + share.first_row) * 2 * kBlock);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < kBlock / 16; ++step) {
          wgmma::multiply<T>(sums[chain][step % kSets], x + step * 2, weights + step * 2);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // all but this block's
        if (block == 0 && emptying >= 0 && threadIdx.x % 32 == 0) arrive(ring.emptied(emptying));
        if (block == plan.stage_blocks - 1) {
          emptying = read.slot;
          read.advance(1, plan.stages);
        }
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (threadIdx.x % 32 == 0) arrive(ring.emptied(emptying));
  }

  // The chains' sums, added in order, are then those of the first.
  __device__ __forceinline__ void join() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int chain = 0; chain < Tile::kChains; ++chain) {
        const float sum = kSets == 2 ? sums[chain][0][i] + sums[chain][kSets - 1][i] : sums[chain][0][i];
        sums[0][0][i] = chain == 0 ? sum : sums[0][0][i] + sum;
      }
    }
  }

  // Of the lane's `half` (the second row of x, or the first), in the eight `n` of weight rows.
  __device__ __forceinline__ float2 pair(int n, int half) const {
    return {sums[0][0][n * 4 + half * 2], sums[0][0][n * 4 + half * 2 + 1]};
  }
};

// ---- epilogues: two neighbouring rows of weights at a time

template <class T>
__device__ __forceinline__ void store_two(const KernelArgs& args, int64_t at, float2 v) {
  if (args.out_is_float) {
    *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = v;
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + at) = Element<T>::pack(v.x, v.y);
  }
}

__device__ __forceinline__ float2 operator*(float2 a, float scale) { return {a.x * scale, a.y * scale}; }

// Behind a norm: rows as they are, or channels of gate and up, of which eight and eight lie next to each other.
template <class T, class Tile>
__device__ __forceinline__ void store_tile(const KernelArgs& args, const WarpgroupSums<T, Tile>& sums, const Lane& lane,
                                           const Share& share, int own_row, const float* inverse_rms) {
  constexpr bool kGateUp = Tile::kEpilogue == Epilogue::kSiluMul;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int x_row = lane.x_row + 8 * half;
    if (x_row >= args.batch) break;
    const float scale = inverse_rms[x_row];
#pragma unroll
    for (int n = 0; n < Tile::kWarpgroupRows / 8; n += kGateUp ? 2 : 1) {
      const int row = share.first_row + n * 8;
      const int to = (kGateUp ? (own_row + row) / 2 : own_row + row) + lane.weight_row;
      if (n * 8 < share.dropped) continue;
      if (row >= args.plan.rows || to >= args.out_features) break;
      float2 v = sums.pair(n, half) * scale;
      if constexpr (kGateUp) {
        const float2 up = sums.pair(n + 1, half) * scale;
        v = {silu_mul(v.x, up.x), silu_mul(v.y, up.y)};
      }
      store_two<T>(args, int64_t{x_row} * args.out_features + to, v);
    }
  }
}

// The best results of the lane's two rows of x, from tile to tile. See KernelArgs::best.
struct BestOfRows {
  float top[2] = {-INFINITY, -INFINITY};
  int id[2] = {-1, -1};
  bool unusable[2] = {};

  __device__ __forceinline__ void offer(int half, float result, int row) {
    unusable[half] |= !(result < INFINITY);
    if (result > top[half]) {
      top[half] = result;
      id[half] = row;
    }
  }

  // Four lanes share a row of x.
  __device__ __forceinline__ void deliver(const KernelArgs& args, const Lane& lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint64_t best = unusable[half] ? kUnusableScore : id[half] < 0 ? 0 : packed_score(top[half], id[half]);
      best = max(best, __shfl_xor_sync(~0u, best, 1));
      best = max(best, __shfl_xor_sync(~0u, best, 2));
      const int x_row = lane.x_row + 8 * half;
      if (x_row < args.batch && threadIdx.x % 4 == 0) {
        atomicMax(args.best + x_row, static_cast<unsigned long long>(best));
      }
    }
  }
};

template <class T, class Tile>
__device__ __forceinline__ void store_direct(const KernelArgs& args, const WarpgroupSums<T, Tile>& sums,
                                             const Lane& lane, int own_row, const float* inverse_rms, bool (&wanted)[2],
                                             BestOfRows& best) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int x_row = lane.x_row + 8 * half;
    if (x_row >= args.batch) break;
    const float scale = inverse_rms[x_row];
#pragma unroll
    for (int n = 0; n < Tile::kRows / 8; ++n) {
      const int to = own_row + n * 8 + lane.weight_row;
      if (n * 8 >= args.plan.rows || to >= args.out_features) break;
      const float2 v = sums.pair(n, half) * scale;
      if (wanted[half]) store_two<T>(args, int64_t{x_row} * args.out_features + to, v);
      if (args.best == nullptr) continue;
      if (to < args.vocab) best.offer(half, v.x, to);
      if (to + 1 < args.vocab) best.offer(half, v.y, to + 1);
    }
  }
}

// What the block finishes of the residual stream: eights of own rows for the lane's two rows of x.
template <class T, class Tile>
struct ResidualTile {
  static constexpr int kEights = Tile::kRows / Tile::kCluster / 8;
  float2 residual[kEights][2];
  uint32_t norm_weight[kEights];

  __device__ __forceinline__ void fetch(const KernelArgs& args, const Lane& lane, int own_row) {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const int row = own_row + n * 8 + lane.weight_row;
      norm_weight[n] = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(args.norm_weight) + row));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int x_row = lane.x_row + 8 * half;
        const float* from = args.residual + int64_t{x_row} * args.out_features + row;
        residual[n][half] = x_row < args.batch ? __ldcg(reinterpret_cast<const float2*>(from)) : float2{};
      }
    }
  }

  // `sum(n, half)`: what is added.
  template <class Sum>
  __device__ __forceinline__ void finish(const KernelArgs& args, const Lane& lane, int own_row, const Sum& sum) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int x_row = lane.x_row + 8 * half;
      float squares[kEights];
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const int64_t at = int64_t{x_row} * args.out_features + own_row + n * 8 + lane.weight_row;
        const float2 add = sum(n, half);
        const float2 h = {residual[n][half].x + add.x, residual[n][half].y + add.y};
        if (x_row < args.batch) {
          *reinterpret_cast<float2*>(args.residual + at) = h;
          *reinterpret_cast<uint32_t*>(static_cast<T*>(args.scaled) + at) =
              Element<T>::pack(h.x * (Element<T>::low(norm_weight[n]) * kScale<T>),
                               h.y * (Element<T>::high(norm_weight[n]) * kScale<T>));
        }
        squares[n] = square_sum(h.x, h.y);
        squares[n] += __shfl_xor_sync(~0u, squares[n], 1);
        squares[n] += __shfl_xor_sync(~0u, squares[n], 2);
      }
#pragma unroll
      for (int apart = 1; apart < kEights; apart *= 2) {
#pragma unroll
        for (int n = 0; n < kEights; n += 2 * apart) squares[n] += squares[n + apart];
      }
      if (x_row < args.batch && threadIdx.x % 4 == 0) {
        args.square_sums_out[x_row * args.parts_out + own_row / (kEights * 8)] = squares[0];
      }
    }
  }
};

// Sends every block of the cluster the rows it finishes, [source block][row of x][own row], and waits for its own.
template <class T, class Tile>
__device__ __forceinline__ const float* exchange(const KernelArgs& args, const WarpgroupSums<T, Tile>& sums,
                                                 const Lane& lane, unsigned char* shared, uint32_t barrier, int rank) {
  constexpr int kOwn = Tile::kRows / Tile::kCluster;
  const int source_bytes = args.plan.columns * kOwn * 4;
  const uint32_t to = ptx::shared_address(shared + args.plan.exchange_offset) + rank * source_bytes;
  ptx::wait_at_cluster_barrier();  // every block has set up its barrier
#pragma unroll
  for (int owner = 0; owner < Tile::kCluster; ++owner) {
    const uint32_t peer = ptx::peer_address(to, owner), peer_barrier = ptx::peer_address(barrier, owner);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int x_row = lane.x_row + 8 * half;
      if (x_row >= args.batch) break;
#pragma unroll
      for (int n = 0; n < kOwn / 8; ++n) {
        ptx::store_to_peer(peer + (x_row * kOwn + n * 8 + lane.weight_row) * 4, peer_barrier,
                           sums.pair(owner * kOwn / 8 + n, half));
      }
    }
  }
  ptx::wait_for_bytes(barrier);
  return reinterpret_cast<const float*>(shared + args.plan.exchange_offset);
}

// Named barriers, this and the next: a warpgroup may take its tile from the ring. It must not wait there for what comes
// behind the other's: a parity says nothing of two rounds on.
constexpr int kTurn = 3;

template <class T, class Tile>
__device__ __forceinline__ void consume_by_warpgroup(const KernelArgs& args, const Ring& ring, unsigned char* shared) {
  const Plan& plan = args.plan;
  const int rank = blockIdx.x & (Tile::kCluster - 1);
  const Lane lane;
  const float* const inverse_rms = reinterpret_cast<const float*>(shared);
  warm(args);
  ptx::wait_for_previous_kernel();
  if (args.opens_step) ptx::let_next_kernel_start();

  [[maybe_unused]] bool wanted[2] = {};
  if constexpr (Tile::kDirect) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int x_row = lane.x_row + 8 * half;
      wanted[half] = x_row < args.batch && (args.wanted == nullptr || args.wanted[x_row] != 0);
    }
  }
  [[maybe_unused]] BestOfRows best;
  WarpgroupSums<T, Tile> sums;
  const Share share = Share::of<Tile>();
  Position read;
  int others_turns = Tile::kDirect ? threadIdx.x / 128 : 0;
  // The norms: while a single tile's sums are made, or before the first of several.
  const auto wait_for_norms = [] { join_barrier<kNorms>(128 * Tile::kWarpgroups + 32 * Tile::kNormWarps); };
  [[maybe_unused]] const int warpgroup = threadIdx.x / 128;
  if constexpr (Tile::kDirect) {
    wait_for_norms();
    if (warpgroup == 1) arrive_at_barrier<kTurn>(256);
  }
#pragma unroll 1
  for (int tile = blockIdx.x / Tile::kCluster; tile < plan.tiles; tile += gridDim.x / Tile::kCluster) {
    if (others_turns-- > 0) {
      read.advance(plan.rounds * Tile::kChains / plan.stage_blocks, plan.stages);
      continue;
    }
    others_turns = Tile::kDirect ? 1 : 0;
    const int own_row = tile * plan.rows + rank * plan.own_rows;  // of the weight matrix
    [[maybe_unused]] ResidualTile<T, Tile> piece;
    if constexpr (!Tile::kNormed) piece.fetch(args, lane, own_row);
    if constexpr (Tile::kDirect) warpgroup == 0 ? join_barrier<kTurn>(256) : join_barrier<kTurn + 1>(256);
    sums.add(plan, ring, share, read);
    if constexpr (Tile::kDirect) warpgroup == 0 ? arrive_at_barrier<kTurn + 1>(256) : arrive_at_barrier<kTurn>(256);
    sums.join();
    if constexpr (!Tile::kNormed && Tile::kCluster == 1) {
      piece.finish(args, lane, own_row, [&](int n, int half) { return sums.pair(n, half); });
    } else if constexpr (!Tile::kNormed) {
      constexpr int kOwn = Tile::kRows / Tile::kCluster;
      const float* all = exchange(args, sums, lane, shared, ring.exchange_barrier(), rank);
      piece.finish(args, lane, own_row, [&](int n, int half) {
        float2 sum = {0.0f, 0.0f};
        if (lane.x_row + 8 * half >= args.batch) return sum;
        const float* from = all + (lane.x_row + 8 * half) * kOwn + n * 8 + lane.weight_row;
#pragma unroll
        for (int source = 0; source < Tile::kCluster; ++source) {
          const float2 v = *reinterpret_cast<const float2*>(from + source * plan.columns * kOwn);
          sum = source == 0 ? v : float2{sum.x + v.x, sum.y + v.y};
        }
        return sum;
      });
    } else if constexpr (Tile::kDirect) {
      store_direct<T>(args, sums, lane, own_row, inverse_rms, wanted, best);
    } else {
      if (tile == static_cast<int>(blockIdx.x)) wait_for_norms();
      store_tile<T>(args, sums, lane, share, own_row, inverse_rms);
    }
  }
  if constexpr (Tile::kDirect) {
    if (args.best != nullptr) best.deliver(args, lane);
  }
}

// 1 / rms of all rows of x, by the last warps of the block, beside the consumers.
template <class T, class Tile>
__device__ __forceinline__ void norm_rows(const KernelArgs& args, unsigned char* shared) {
  constexpr int kThreads = 32 * Tile::kNormWarps, kLanes = InverseRms<T>::kLanes, kRows = kThreads / kLanes;
  const int row = (threadIdx.x - (Tile::kThreads - kThreads)) / kLanes, lane = threadIdx.x % kLanes;
  ptx::wait_for_previous_kernel();
  InverseRms<T> rms[kMaxDecodeBatch / kRows];
#pragma unroll
  for (int i = 0; i < kMaxDecodeBatch / kRows; ++i) rms[i].fetch(args, row + i * kRows, lane);
#pragma unroll
  for (int i = 0; i < kMaxDecodeBatch / kRows; ++i) {
    rms[i].finish(reinterpret_cast<float*>(shared), args, row + i * kRows, lane);
  }
  arrive_at_barrier<kNorms>(128 * Tile::kWarpgroups + kThreads);
}

#endif

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    warpgroup_kernel(const __grid_constant__ TensorWeights::Operand weight,
                     const __grid_constant__ TensorActivations::Operand x, const __grid_constant__ KernelArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring = open_block<TensorWeights, TensorActivations>(args, shared, 4 * Tile::kShares);
  const StageShape stage{args.plan.rows, args.plan.columns, args.plan.stage_blocks,
                         Tile::kEpilogue == Epilogue::kSiluMul};
  const int warp = threadIdx.x / 32 - 4 * Tile::kWarpgroups, lane = threadIdx.x % 32;
  if (warp < 0) {
    consume_by_warpgroup<T, Tile>(args, ring, shared);
  } else if (warp == 0) {
    if (lane == 0) {
      produce_weights(TensorWeights(weight, stage), args.plan, ring);
      fetch_ahead(args);
    }
  } else if (warp == 1) {
    if (lane == 0) produce_activations(TensorActivations(x, stage), args.plan, ring);
  } else if constexpr (Tile::kNormed) {
    norm_rows<T, Tile>(args, shared);
  }
#else
  __trap();  // launched on a GPU that this build has no such kernel for
#endif
}

}  // namespace octavo::gpu::decode
