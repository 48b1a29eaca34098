// Decode matmul, out[n][row] = sum_k weight[row][k] x[n][k] for few n: bound by reading the weights once.
//
// One thread block per multiprocessor. Two producer warps fill the ring of decode_linear_ring.cuh: one with weights,
// which depend on no other kernel and so are on their way before the previous kernel has ended, one with activations.
// Consumer warps multiply with mma.sync (weights are the 16-row operand) and meet in shared memory; where a cluster
// shares a tile, its blocks then send each other the rows each of them finishes.
#pragma once

#include "gpu/decode_linear_ring.cuh"
#include "gpu/element.cuh"
#include "octavo/error.h"

namespace octavo::gpu::decode {

struct KernelArgs {
  Plan plan;
  Epilogue epilogue;
  int batch;
  int out_features;  // columns of `out` or of the residual
  bool out_is_float;
  void* out;
  // With a norm: x is `scaled`, and results are divided by the rms of each row.
  const float* square_sums_in;
  int parts_in;
  int hidden;
  float eps;
  // kAddResidual
  float* residual;
  void* scaled;
  float* square_sums_out;
  int parts_out;
  const void* norm_weight;
};

// `DecodeStream::scaled` over residual * weight: keeps fp16 from overflowing.
template <class T>
inline constexpr float kScale = 1.0f;
template <>
inline constexpr float kScale<__half> = 1.0f / 16.0f;

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Sums `count` (a power of two) vectors that lie `stride` floats apart, as a binary tree.
template <int kCount>
__device__ __forceinline__ float4 tree_sum(const float* first, int stride) {
  if constexpr (kCount == 1) {
    return *reinterpret_cast<const float4*>(first);
  } else {
    return tree_sum<kCount / 2>(first, stride) + tree_sum<kCount / 2>(first + kCount / 2 * stride, stride);
  }
}

// Partial sums in shared memory, [count][column][row].
struct Partials {
  const float* first;
  int count;
  int count_stride;
  int column_stride;

  __device__ __forceinline__ float4 sum(int column, int row) const {
    const float* at = first + column * column_stride + row;
    switch (count) {
      case 1:
        return tree_sum<1>(at, count_stride);
      case 2:
        return tree_sum<2>(at, count_stride);
      case 4:
        return tree_sum<4>(at, count_stride);
      default:
        return tree_sum<8>(at, count_stride);
    }
  }
};

// One warp's sums: kRowTiles tiles of 16 weight rows by kColumnTiles tiles of 8 columns.
template <class T, int kColumnTiles, int kRowTiles>
struct Accumulators {
  // A single row tile has too few independent sums to hide the latency of mma: even and odd steps get their own.
  static constexpr int kSets = kRowTiles == 1 ? 2 : 1;
  float sums[kSets][kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSets * kRowTiles * kColumnTiles * 4; ++i) (&sums[0][0][0][0])[i] = 0.0f;
  }

  // Adds one k-block. Addresses are those of this lane's line in the stage; its 16-byte pieces are permuted.
  __device__ __forceinline__ void multiply(uint32_t weights, uint32_t weight_piece, uint32_t x, uint32_t x_piece) {
    uint32_t b_pair[4];
#pragma unroll
    for (int step = 0; step < kBlock / 16; ++step) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::load_matrices(a[m], weights + m * 16 * 128 + (weight_piece ^ step << 5));
      if constexpr (kColumnTiles == 1) {  // one load brings two steps of the only column tile
        if (step % 2 == 0) ptx::load_matrices(b_pair, x + (x_piece ^ step << 5));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) add(step, m, 0, a[m], b_pair[step % 2 * 2], b_pair[step % 2 * 2 + 1]);
      } else {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n += 2) {
          uint32_t b[4];
          ptx::load_matrices(b, x + n * 8 * 128 + (x_piece ^ step << 5));
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            add(step, m, n, a[m], b[0], b[1]);
            add(step, m, n + 1, a[m], b[2], b[3]);
          }
        }
      }
    }
  }

  // To `to` [column][row], rows `stride` floats apart; this warp's rows begin at `first_row` of `rows`.
  __device__ __forceinline__ void store(float* to, int stride, int first_row, int rows) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_row + m * 16 + lane / 4 + i / 2 * 8;
          float sum = sums[0][m][n][i];
          if constexpr (kSets == 2) sum += sums[1][m][n][i];
          if (row < rows) to[(n * 8 + lane % 4 * 2 + i % 2) * stride + row] = sum;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void add(int step, int m, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Element<T>::mma(sums[step % kSets][m][n], a[0], a[1], a[2], a[3], b0, b1);
  }
};

// ---- epilogues: four rows of one column at a time

template <class T>
__device__ __forceinline__ void store_four(T* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = {Element<T>::pack(v.x, v.y), Element<T>::pack(v.z, v.w)};
}

__device__ __forceinline__ float silu_mul(float gate, float up) { return __fdividef(gate * up, 1.0f + __expf(-gate)); }

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
    store_four<T>(static_cast<T*>(args.scaled) + at,
                  {h.x * (Element<T>::low(norm_weight.x) * kScale<T>), h.y * (Element<T>::high(norm_weight.x) * kScale<T>),
                   h.z * (Element<T>::low(norm_weight.y) * kScale<T>), h.w * (Element<T>::high(norm_weight.y) * kScale<T>)});
    return (h.x * h.x + h.y * h.y) + (h.z * h.z + h.w * h.w);
  }
};

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

// ---- consumers

__device__ __forceinline__ void consumer_barrier(int threads) {
  asm volatile("bar.sync 1,%0;" ::"r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Sends every block of the cluster the rows it finishes; returns this block's, [source block][column][own row].
__device__ __forceinline__ Partials exchange(const KernelArgs& args, const Partials& mine, unsigned char* shared,
                                             uint32_t barrier, int thread, int threads) {
  const Plan& plan = args.plan;
  const uint32_t rank = ptx::cluster_rank();
  const int quads = plan.rows / 4;
  const uint32_t to = ptx::shared_address(shared + plan.exchange_offset);
  ptx::wait_at_cluster_barrier();  // every block has set up its barrier
  for (int i = thread; i < args.batch * quads; i += threads) {
    const int column = i / quads;
    const int row = i % quads * 4;
    const uint32_t owner = row / plan.own_rows;
    const uint32_t at = to + ((rank * plan.columns + column) * plan.own_rows + row % plan.own_rows) * 4;
    ptx::store_to_peer(ptx::peer_address(at, owner), ptx::peer_address(barrier, owner), mine.sum(column, row));
  }
  ptx::wait_for_bytes(barrier);
  return {reinterpret_cast<const float*>(shared + plan.exchange_offset), plan.cluster, plan.columns * plan.own_rows,
          plan.own_rows};
}
#endif

template <class T, int kColumnTiles, int kRowTiles>
__device__ __forceinline__ void consume(const KernelArgs& args, const Ring& ring, unsigned char* shared) {
  const Plan& plan = args.plan;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int threads = 32 * plan.consumer_warps();
  const int row_warp = warp % plan.row_warps;
  const int chain = warp / plan.row_warps;
  const int rank = blockIdx.x % plan.cluster;
  const int quads = 1 << plan.quad_bits;  // lanes for the quads of a column in the epilogue
  const int quad_mask = quads - 1;

  // This lane's line for ldmatrix, and the permutation of its 16-byte pieces (see the sources).
  const int block_in_stage = chain % plan.stage_blocks;
  const int weight_line = block_in_stage * plan.rows + row_warp * kRowTiles * 16 + lane % 16;
  const int x_line = block_in_stage * kColumnTiles * 8 + (kColumnTiles == 1 ? lane % 8 : lane % 8 + lane / 16 * 8);
  const uint32_t weight_piece = (lane / 16 ^ weight_line % 8) << 4;
  const uint32_t x_piece = ((kColumnTiles == 1 ? lane / 8 : lane / 8 % 2) ^ x_line % 8) << 4;

  const bool normed = args.epilogue != Epilogue::kAddResidual;
  float* const inverse_rms = reinterpret_cast<float*>(shared);
  warm(args);
  ptx::wait_for_previous_kernel();

  Position read;
  read.advance(chain / plan.stage_blocks, plan.stages);
  if (normed) {
    for (int first = 0; first < args.batch; first += threads / InverseRms<T>::kLanes) {
      InverseRms<T> rms;
      rms.fetch(args, first + thread / rms.kLanes, thread % rms.kLanes);
      wait(ring.activations_here(read.slot), read.parity);
      rms.finish(inverse_rms, args, first + thread / rms.kLanes, thread % rms.kLanes);
    }
  }
  for (int tile = blockIdx.x / plan.cluster; tile < plan.tiles; tile += gridDim.x / plan.cluster) {
    const int own_row = tile * plan.rows + rank * plan.own_rows;  // of the weight matrix
    ResidualPiece<T> piece;
    if (!normed && thread >> plan.quad_bits < args.batch) {
      piece.fetch(args, thread >> plan.quad_bits, own_row + (thread & quad_mask) * 4);
    }

    Accumulators<T, kColumnTiles, kRowTiles> accumulators;
    accumulators.clear();
    for (int round = 0; round < plan.rounds; ++round) {
      wait(ring.activations_here(read.slot), read.parity);
      wait(ring.weights_here(read.slot), read.parity);
      accumulators.multiply(ring.weights(read.slot) + weight_line * 128, weight_piece,
                            ring.activations(read.slot) + x_line * 128, x_piece);
      __syncwarp();
      if (lane == 0) arrive(ring.emptied(read.slot));
      read.advance(plan.k_warps / plan.stage_blocks, plan.stages);
    }

    consumer_barrier(threads);  // the reduction buffer is free: it lies in the ring, or the last tile used it
    float* const reduce = reinterpret_cast<float*>(shared + plan.reduce_offset);
    Partials partials{reduce, plan.k_warps, kColumnTiles * 8 * plan.reduce_stride, plan.reduce_stride};
    accumulators.store(reduce + chain * partials.count_stride, plan.reduce_stride, row_warp * kRowTiles * 16,
                       plan.rows);
    consumer_barrier(threads);
#if __CUDA_ARCH__ >= 900
    if (plan.cluster > 1) partials = exchange(args, partials, shared, ring.exchange_barrier(), thread, threads);
#endif

    switch (args.epilogue) {
      case Epilogue::kStore:
        for (int i = thread; i < args.batch * quads; i += threads) {
          const int column = i >> plan.quad_bits, row = (i & quad_mask) * 4;
          if (row >= plan.own_rows || own_row + row >= args.out_features) continue;
          float4 sum = partials.sum(column, row);
          const float scale = inverse_rms[column];
          sum = {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale};
          const int64_t at = int64_t{column} * args.out_features + own_row + row;
          if (args.out_is_float) {
            *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = sum;
          } else {
            store_four<T>(static_cast<T*>(args.out) + at, sum);
          }
        }
        break;
      case Epilogue::kSiluMul:
        for (int i = thread; i < args.batch * quads; i += threads) {
          const int column = i >> plan.quad_bits, quad = i & quad_mask;
          const int channel = own_row / 2 + quad * 4;
          if (quad * 8 >= plan.own_rows || channel >= args.out_features) continue;
          const int row = quad / 2 * 16 + quad % 2 * 4;  // 8 gate rows, then their 8 up rows
          const float4 gate = partials.sum(column, row), up = partials.sum(column, row + 8);
          const float scale = inverse_rms[column];
          store_four<T>(static_cast<T*>(args.out) + int64_t{column} * args.out_features + channel,
                        {silu_mul(gate.x * scale, up.x * scale), silu_mul(gate.y * scale, up.y * scale),
                         silu_mul(gate.z * scale, up.z * scale), silu_mul(gate.w * scale, up.w * scale)});
        }
        break;
      case Epilogue::kAddResidual:
        for (int first = 0; first < args.batch * quads; first += threads) {
          const int column = (first + thread) >> plan.quad_bits, row = (first + thread & quad_mask) * 4;
          float squares = 0.0f;
          if (column < args.batch) {
            if (first > 0) piece.fetch(args, column, own_row + row);
            squares = piece.finish(args, column, own_row + row, partials.sum(column, row));
          }
          // The quads of a column lie in neighbouring lanes: own_rows is a power of two up to 64.
          for (int offset = 1; offset < quads; offset *= 2) squares += __shfl_xor_sync(~0u, squares, offset);
          if (column < args.batch && row == 0) {
            args.square_sums_out[column * args.parts_out + tile * plan.cluster + rank] = squares;
          }
        }
        break;
    }
  }
}

// ---- producers

// Calls load(slot, row of the weight matrix, k-block) for every stage of this block, each once its slot is empty.
template <class Load>
__device__ __forceinline__ void fill(const Plan& plan, const Ring& ring, const Load& load) {
  const int rank = blockIdx.x % plan.cluster;
  Position write;
  for (int tile = blockIdx.x / plan.cluster; tile < plan.tiles; tile += gridDim.x / plan.cluster) {
    for (int round = 0; round < plan.rounds; ++round) {
      for (int block = 0; block < plan.k_warps; block += plan.stage_blocks) {
        wait(ring.emptied(write.slot), write.parity ^ 1);
        load(write.slot, tile * plan.rows, (round * plan.cluster + rank) * plan.k_warps + block);
        write.advance(1, plan.stages);
      }
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

template <class Activations>
__device__ __forceinline__ void produce_activations(const Activations& x, const Plan& plan, const Ring& ring) {
  ptx::wait_for_previous_kernel();
  Activations::acquire();
  fill(plan, ring, [&](int slot, int, int k_block) {
    x.load(ring.activations(slot), ring.activations_here(slot), k_block);
  });
}

template <class T, int kColumnTiles, int kRowTiles, class Weights, class Activations>
__global__ void __launch_bounds__(32 * (kMaxConsumerWarps + Weights::kWarps + Activations::kWarps), 1)
    linear_kernel(const __grid_constant__ typename Weights::Operand weight,
                  const __grid_constant__ typename Activations::Operand x, const __grid_constant__ KernelArgs args) {
#if __CUDA_ARCH__ < 900
  if constexpr (Weights::kTensorCopies) return;
  else
#endif
  {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Plan& plan = args.plan;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int weight_bytes = plan.stage_blocks * plan.rows * 2 * kBlock;
    const Ring ring{ptx::shared_address(shared), plan.stages, weight_bytes,
                    weight_bytes + plan.stage_blocks * plan.columns * 2 * kBlock};
    if (threadIdx.x == 0) {
      if (ring.shared % 1024 != 0) __trap();
      ring.init(Weights::kWarps * Weights::kLanes, Activations::kWarps * Activations::kLanes,
                plan.stage_blocks * plan.row_warps);
#if __CUDA_ARCH__ >= 900
      if (plan.cluster > 1) ptx::expect_bytes(ring.exchange_barrier(), plan.cluster * args.batch * plan.own_rows * 4);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    ptx::let_next_kernel_start();
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (plan.cluster > 1) ptx::arrive_at_cluster_barrier();
#endif
    const StageShape stage{plan.rows, plan.columns, plan.stage_blocks, args.epilogue == Epilogue::kSiluMul};
    if (warp < plan.consumer_warps()) {
      consume<T, kColumnTiles, kRowTiles>(args, ring, shared);
    } else if (warp < plan.consumer_warps() + Weights::kWarps) {
      if (lane < Weights::kLanes) produce_weights(Weights(weight, stage), plan, ring);
    } else {
      if (lane < Activations::kLanes) produce_activations(Activations(x, stage), plan, ring);
    }
  }
}

}  // namespace octavo::gpu::decode
