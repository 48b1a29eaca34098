// Decode matmul, out[n][row] = sum_k weight[row][k] x[n][k] for few n. Floor: the weights read once.
//
// One thread block per multiprocessor. Producer warps fill the ring of decode_linear_ring.cuh: some with weights, which
// depend on no other kernel and so are on their way before the previous kernel has ended, some with activations.
// Consumer warps multiply with mma.sync, or for 17 to 32 rows of x with wgmma (weights are the operand of many rows),
// and meet in shared memory; where a cluster shares a tile, its blocks then send each other the rows that each of them
// finishes. For more rows of x see decode_linear_warpgroup.cuh.
#pragma once

#include "gpu/decode_linear_args.cuh"
#include "gpu/decode_linear_epilogue.cuh"
#include "gpu/decode_linear_ring.cuh"
#include "gpu/decode_linear_sums.cuh"

namespace octavo::gpu::decode {

// ---- consumers

// Named barriers: of the consumers; and of them and the warps that find 1 / rms of the rows of x for them. Their
// numbers are constants: a block with one in a register claims all sixteen, and shares the multiprocessor with no
// other.
constexpr int kConsumers = 1, kNorms = 2;

template <int kBarrier>
__device__ __forceinline__ void join_barrier(int threads) {
  asm volatile("bar.sync %0,%1;" ::"n"(kBarrier), "r"(threads) : "memory");
}
template <int kBarrier>
__device__ __forceinline__ void arrive_at_barrier(int threads) {
  asm volatile("bar.arrive %0,%1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Sends every block of the cluster the rows it finishes; returns this block's, [source block][column][own row].
__device__ __forceinline__ Partials exchange(const KernelArgs& args, const Partials& mine, unsigned char* shared,
                                             uint32_t barrier, int thread, int threads) {
  const Plan& plan = args.plan;
  const int rank = blockIdx.x & (plan.cluster() - 1);
  const int count_stride = plan.columns * plan.own_rows;
  const uint32_t to = ptx::shared_address(shared + plan.exchange_offset) + rank * count_stride * 4;
  ptx::wait_at_cluster_barrier();  // every block has set up its barrier
#pragma unroll 1
  for (int i = thread; i < args.batch * plan.quads << plan.cluster_bits; i += threads) {
    const int owner = i & (plan.cluster() - 1);
    const int column = plan.column_of(i >> plan.cluster_bits);
    const int row = ((i >> plan.cluster_bits) - column * plan.quads) * 4;
    ptx::store_to_peer(ptx::peer_address(to + (column * plan.own_rows + row) * 4, owner),
                       ptx::peer_address(barrier, owner), mine.sum(column, owner * plan.own_rows + row));
  }
  ptx::wait_for_bytes(barrier);
  return {reinterpret_cast<const float*>(shared + plan.exchange_offset), plan.cluster(), count_stride, plan.own_rows};
}
#endif

// Adds this block's k-blocks of one tile that belong to this warp's chain.
template <class Sums>
__device__ __forceinline__ void add_chain(Sums& sums, const Plan& plan, const Ring& ring, Position& read) {
  [[maybe_unused]] const int lane = threadIdx.x % 32;
  [[maybe_unused]] int started = 0;
#pragma unroll 1
  for (int round = 0; round < plan.rounds; ++round) {
    wait(ring.activations_here(read.slot), read.parity);
    wait(ring.weights_here(read.slot), read.parity);
    if constexpr (!Sums::kWarpgroup) {
      sums.multiply(ring.weights(read.slot), ring.activations(read.slot));
      arrive(ring.emptied(read.slot));  // every lane: one for all behind a __syncwarp is a race to compute-sanitizer
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      sums.start(ring.weights(read.slot), ring.activations(read.slot));
      if (round > 0) {
        sums.template finish<1>();
        if (lane == 0) arrive(ring.emptied(started));
      }
      started = read.slot;
#endif
    }
    read.advance(plan.chains / plan.stage_blocks, plan.stages);
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Sums::kWarpgroup) {
    sums.template finish<0>();
    if (lane == 0) arrive(ring.emptied(started));
  }
#endif
}

// Of few rows of x, whose activations come by cp.async, the warps that copy them find the norms, too: they have the
// time. Of several tiles they copy the next one's before the first one's are wanted, and would wait for its end: not
// then.
template <class Sums>
__device__ __forceinline__ bool producers_find_norms(const KernelArgs& args) {
  return 8 * Sums::kColumnTiles <= kFewColumns && args.epilogue != Epilogue::kAddResidual &&
         args.plan.tiles <= args.plan.grid;
}

// kDirect: a plan that is `direct`, as the LM head's. Its code would slow the kernels of the layers down.
template <class T, class Sums, bool kDirect>
__device__ __forceinline__ void consume(const KernelArgs& args, const Ring& ring, unsigned char* shared) {
  const Plan& plan = args.plan;
  const int thread = threadIdx.x, warp = thread / 32;
  const int threads = 32 * plan.consumer_warps();
  const int first_row = warp % plan.row_warps * Sums::kRows;  // this warp's, in the tile
  const int first_column = warp / plan.row_warps % plan.column_warps * Sums::kColumnTiles * 8;
  const int chain = warp / (plan.row_warps * plan.column_warps);
  const int block_in_stage = chain % plan.stage_blocks;
  const int rank = blockIdx.x & (plan.cluster() - 1);
  Sums sums(block_in_stage * plan.rows + first_row, block_in_stage * plan.columns + first_column);
  const bool normed = args.epilogue != Epilogue::kAddResidual;
  float* const inverse_rms = reinterpret_cast<float*>(shared);
  warm(args);
  ptx::wait_for_previous_kernel();
  if (args.opens_step) ptx::let_next_kernel_start();

  Position read;
  read.advance(chain / plan.stage_blocks, plan.stages);
  const bool norms_come = !kDirect && producers_find_norms<Sums>(args);
  if (normed && !norms_come) {
#pragma unroll 1
    for (int first = 0; first < args.batch; first += threads / InverseRms<T>::kLanes) {
      InverseRms<T> rms;
      rms.fetch(args, first + thread / rms.kLanes, thread % rms.kLanes);
      wait(ring.activations_here(read.slot), read.parity);
      rms.finish(inverse_rms, args, first + thread / rms.kLanes, thread % rms.kLanes);
    }
    if (kDirect) join_barrier<kConsumers>(threads);  // other threads wrote some of them
  }
  [[maybe_unused]] BestOfColumns<Sums::kColumnTiles> best{reinterpret_cast<uint64_t*>(shared + plan.best_offset) +
                                                          warp * Sums::kColumnTiles * 8};
  if constexpr (kDirect) best.clear(args, first_column);
#pragma unroll 1
  for (int tile = blockIdx.x >> plan.cluster_bits; tile < plan.tiles; tile += gridDim.x >> plan.cluster_bits) {
    const int own_row = tile * plan.rows + rank * plan.own_rows;  // of the weight matrix
    ResidualPiece<T> piece;
    if (!kDirect && !normed && thread < args.batch * plan.quads) {
      const int column = plan.column_of(thread);
      piece.fetch(args, column, own_row + (thread - column * plan.quads) * 4);
    }

    sums.clear();
    add_chain(sums, plan, ring, read);
    sums.join();
    if constexpr (kDirect) {
      store_direct<T>(args, sums, first_row, first_column, own_row, inverse_rms, best);
      continue;
    }

    join_barrier<kConsumers>(threads);  // the reduction buffer is free: it lies in the ring, or the last tile used it
    float* const reduce = reinterpret_cast<float*>(shared + plan.reduce_offset);
    Partials partials{reduce, plan.chains, plan.columns * plan.reduce_stride, plan.reduce_stride};
    sums.store(reduce + chain * partials.count_stride + first_column * plan.reduce_stride, plan.reduce_stride,
               first_row, plan.rows);
    if (norms_come) {
      join_barrier<kNorms>(threads + 32 * AsyncActivations::kWarps);
    } else {
      join_barrier<kConsumers>(threads);
    }
#if __CUDA_ARCH__ >= 900
    if (plan.cluster_bits > 0) partials = exchange(args, partials, shared, ring.exchange_barrier(), thread, threads);
#endif

#pragma unroll 1
    for (int first = 0; first < args.batch * plan.quads; first += threads) {
      const int column = plan.column_of(first + thread), quad = first + thread - column * plan.quads;
      if (args.epilogue == Epilogue::kAddResidual) {
        float squares = 0.0f;
        if (column < args.batch) {
          if (first > 0) piece.fetch(args, column, own_row + quad * 4);
          squares = piece.finish(args, column, own_row + quad * 4, partials.sum(column, quad * 4));
        }
        // The quads of a column lie in neighbouring lanes: own_rows is a power of two up to 64.
#pragma unroll 1
        for (int offset = 1; offset < plan.quads; offset *= 2) squares += __shfl_xor_sync(~0u, squares, offset);
        if (column < args.batch && quad == 0) {
          args.square_sums_out[column * args.parts_out + (tile << plan.cluster_bits) + rank] = squares;
        }
      } else if (column < args.batch) {
        store_normed<T>(args, column, quad, own_row, inverse_rms[column], partials);
      }
    }
  }
  if (kDirect && args.best != nullptr) {
    join_barrier<kConsumers>(threads);
    if (thread < args.batch) {
      // Warps of one share of the columns lie next to each other, and again for each chain: here there is one chain.
      const int columns = Sums::kColumnTiles * 8, share = thread / columns;
      const uint64_t* slots = reinterpret_cast<const uint64_t*>(shared + plan.best_offset);
      uint64_t most = 0;
      for (int w = share * plan.row_warps; w < (share + 1) * plan.row_warps; ++w) {
        most = max(most, slots[w * columns + thread - share * columns]);
      }
      atomicMax(args.best + thread, static_cast<unsigned long long>(most));
    }
  }
}

// ---- producers

// Calls load(slot, row of the weight matrix, k-block) for every stage of this block, each once its slot is empty.
template <class Load>
__device__ __forceinline__ void fill(const Plan& plan, const Ring& ring, const Load& load) {
  const int rank = blockIdx.x & (plan.cluster() - 1);
  Position write;
#pragma unroll 1
  for (int tile = blockIdx.x >> plan.cluster_bits; tile < plan.tiles; tile += gridDim.x >> plan.cluster_bits) {
    // Tiles begin at different places of K: all blocks would ask the L2 for the same activations at the same time.
    int round = tile % plan.rounds;
#pragma unroll 1
    for (int left = plan.rounds; left > 0; --left) {
#pragma unroll 1
      for (int block = 0; block < plan.chains; block += plan.stage_blocks) {
        wait(ring.emptied(write.slot), write.parity ^ 1);
        load(write.slot, tile * plan.rows, ((round << plan.cluster_bits) + rank) * plan.chains + block);
        write.advance(1, plan.stages);
      }
      round = round + 1 < plan.rounds ? round + 1 : 0;
    }
  }
}

template <class Weights>
__device__ __forceinline__ void produce_weights(const Weights& weights, const Plan& plan, const Ring& ring) {
  Position landed;
  int in_flight = 0;
  fill(plan, ring, [&](int slot, int row, int k_block) {
    if (in_flight == plan.window) {
      wait(ring.weights_here(landed.slot), landed.parity);
      landed.advance(1, plan.stages);
    } else {
      ++in_flight;
    }
    weights.load(ring.weights(slot), ring.weights_here(slot), row, k_block);
  });
}

__device__ __forceinline__ void fetch_ahead(const KernelArgs& args) {
#if __CUDA_ARCH__ >= 900
  if (args.ahead_bytes == 0) return;
  const char* from = args.ahead + int64_t{blockIdx.x} * kAheadPieces * args.ahead_stride;
#pragma unroll 1
  for (int i = 0; i < kAheadPieces; ++i) ptx::fetch_into_l2(from + i * args.ahead_stride, args.ahead_bytes);
#endif
}

template <class Activations>
__device__ __forceinline__ void produce_activations(const Activations& x, const Plan& plan, const Ring& ring) {
  ptx::wait_for_previous_kernel();
  Activations::acquire();
  fill(plan, ring,
       [&](int slot, int, int k_block) { x.load(ring.activations(slot), ring.activations_here(slot), k_block); });
}

// The same, and 1 / rms of all rows of x, which `consumers` threads wait for.
template <class T>
__device__ __forceinline__ void produce_activations_and_norms(const AsyncActivations& x, const KernelArgs& args,
                                                              const Ring& ring, unsigned char* shared, int consumers) {
  constexpr int kThreads = 32 * AsyncActivations::kWarps;
  static_assert(kThreads / InverseRms<T>::kLanes >= kFewColumns);
  const int row = threadIdx.x % kThreads / InverseRms<T>::kLanes, lane = threadIdx.x % InverseRms<T>::kLanes;
  InverseRms<T> rms;
  ptx::wait_for_previous_kernel();
  rms.fetch(args, row, lane);
  produce_activations(x, args.plan, ring);
  rms.finish(reinterpret_cast<float*>(shared), args, row, lane);
  arrive_at_barrier<kNorms>(consumers + kThreads);
}

// Sets up barriers, and lets the next kernel start. `empty_arrivals`: how many say of a stage that they have read it.
// Weights are on their way only behind this: three threads share the barriers, whose setting up takes 20 clocks each.
template <class Weights, class Activations>
__device__ __forceinline__ Ring open_block(const KernelArgs& args, unsigned char* shared, int empty_arrivals) {
  const Plan& plan = args.plan;
  const int weight_bytes = plan.stage_blocks * plan.rows * 2 * kBlock;
  const Ring ring{ptx::shared_address(shared), plan.stages, weight_bytes,
                  weight_bytes + plan.stage_blocks * plan.columns * 2 * kBlock};
  if (threadIdx.x == 0) {
    if (ring.shared % 1024 != 0) __trap();
    ring.init_weights_here(Weights::kWarps * Weights::kLanes);
  } else if (threadIdx.x == 32) {
    ring.init_activations_here(Activations::kWarps * Activations::kLanes);
  } else if (threadIdx.x == 64) {
    ring.init_emptied(empty_arrivals);
#if __CUDA_ARCH__ >= 900
    if (plan.cluster_bits > 0) {
      ptx::expect_bytes(ring.exchange_barrier(), plan.cluster() * args.batch * plan.own_rows * 4);
    }
#endif
  }
  if (!args.opens_step) ptx::let_next_kernel_start();
#if __CUDA_ARCH__ >= 900
  if (plan.cluster_bits > 0) {
    __syncwarp();
    ptx::arrive_relaxed_at_cluster_barrier();
  }
#endif
  __syncthreads();
  return ring;
}

template <class T, class Sums, class Weights, class Activations, bool kDirect>
__global__ void __launch_bounds__(32 * kRegisterWarps<8 * Sums::kColumnTiles>, 1)
    linear_kernel(const __grid_constant__ typename Weights::Operand weight,
                  const __grid_constant__ typename Activations::Operand x, const __grid_constant__ KernelArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kServed = true;
#elif __CUDA_ARCH__ >= 900
  constexpr bool kServed = !Sums::kWarpgroup;
#else
  constexpr bool kServed = !Sums::kWarpgroup && !Weights::kTensorCopies;
#endif
  if constexpr (kServed) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Plan& plan = args.plan;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Ring ring = open_block<Weights, Activations>(
        args, shared, plan.stage_blocks * plan.row_warps * plan.column_warps * (Sums::kWarpgroup ? 1 : 32));
    const StageShape stage{plan.rows, plan.columns, plan.stage_blocks, args.epilogue == Epilogue::kSiluMul};
    if (warp < plan.consumer_warps()) {
      consume<T, Sums, kDirect>(args, ring, shared);
    } else if (warp < plan.consumer_warps() + Weights::kWarps) {
      if (lane < Weights::kLanes) {
        produce_weights(Weights(weight, stage), plan, ring);
        if constexpr (Weights::kTensorCopies) fetch_ahead(args);
      }
    } else if (warp < plan.consumer_warps() + Weights::kWarps + Activations::kWarps) {
      if constexpr (!kDirect && 8 * Sums::kColumnTiles <= kFewColumns) {
        if (producers_find_norms<Sums>(args)) {
          return produce_activations_and_norms<T>(Activations(x, stage), args, ring, shared,
                                                  32 * plan.consumer_warps());
        }
      }
      if (lane < Activations::kLanes) produce_activations(Activations(x, stage), plan, ring);
    }
  } else {
    __trap();  // launched on a GPU that this build has no such kernel for
  }
}

}  // namespace octavo::gpu::decode
