// Decode matmul, out[n][row] = sum_k weight[row][k] x[n][k] for few n. Floor: the weights read once.
//
// One thread block per multiprocessor. Producer warps fill the ring of decode_linear_ring.cuh: some with weights, which
// depend on no other kernel and so are on their way before the previous kernel has ended, some with activations.
// Consumer warps multiply with mma.sync, or for 17 to 32 rows of x with wgmma (weights are the operand of many rows),
// and meet in shared memory; where a cluster shares a tile, its blocks then send each other the rows that each of them
// finishes. For more rows of x see decode_linear_warpgroup.cuh.
#pragma once

#include "gpu/decode_linear_ring.cuh"
#include "gpu/decode_linear_wgmma.cuh"
#include "gpu/element.cuh"
#include "octavo/error.h"
#include "octavo/random.h"

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
  // If not null (a plan that is `direct` only): of each row of x the largest result among the first `vocab`, packed by
  // octavo/random.h; and fp32 results are stored only for rows with `wanted`.
  unsigned long long* best;
  const int* wanted;
  int vocab;
  bool opens_step;  // the next kernel may start only once the previous one is done
  // kAddResidual
  float* residual;
  void* scaled;
  float* square_sums_out;
  int parts_out;
  const void* norm_weight;
  // Of what comes after this kernel: every block fetches kAheadPieces into the L2, `ahead_stride` bytes apart.
  const char* ahead;
  int ahead_stride;
  int ahead_bytes;  // of a piece
};
constexpr int kAheadPieces = 8;

// `DecodeStream::scaled` over residual * weight: keeps fp16 from overflowing.
template <class T>
inline constexpr float kScale = 1.0f;
template <>
inline constexpr float kScale<__half> = 1.0f / 16.0f;

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

// Writes a fragment of 16 rows by 8 columns per element of `sums` to `to` [column][row], columns `stride` floats apart.
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

// ---- epilogues: four rows of one column at a time

template <class T>
__device__ __forceinline__ void store_four(T* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = {Element<T>::pack(v.x, v.y), Element<T>::pack(v.z, v.w)};
}

__device__ __forceinline__ float silu_mul(float gate, float up) { return __fdividef(gate * up, 1.0f + __expf(-gate)); }

// To the same bits wherever it is compiled.
__device__ __forceinline__ float square_sum(float a, float b) { return __fmaf_rn(b, b, __fmul_rn(a, a)); }

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
    store_four<T>(
        static_cast<T*>(args.scaled) + at,
        {h.x * (Element<T>::low(norm_weight.x) * kScale<T>), h.y * (Element<T>::high(norm_weight.x) * kScale<T>),
         h.z * (Element<T>::low(norm_weight.y) * kScale<T>), h.w * (Element<T>::high(norm_weight.y) * kScale<T>)});
    return square_sum(h.x, h.y) + square_sum(h.z, h.w);
  }
};

__device__ __forceinline__ float4 operator*(float4 a, float scale) {
  return {a.x * scale, a.y * scale, a.z * scale, a.w * scale};
}

// A quad of a column behind a norm: four rows as they are, or four channels of gate and up. `own_row`: the block's
// first.
template <class T>
__device__ __forceinline__ void store_normed(const KernelArgs& args, int column, int quad, int own_row,
                                             float inverse_rms, const Partials& partials) {
  const bool gate_up = args.epilogue == Epilogue::kSiluMul;
  // Gate and up: 8 gate rows, then their 8 up rows, and so on.
  const int row = gate_up ? quad / 2 * 16 + quad % 2 * 4 : quad * 4;
  const int to = (gate_up ? own_row / 2 : own_row) + quad * 4;
  if (row >= args.plan.own_rows || to >= args.out_features) return;
  float4 v = partials.sum(column, row) * inverse_rms;
  if (gate_up) {
    const float4 up = partials.sum(column, row + 8) * inverse_rms;
    v = {silu_mul(v.x, up.x), silu_mul(v.y, up.y), silu_mul(v.z, up.z), silu_mul(v.w, up.w)};
  }
  const int64_t at = int64_t{column} * args.out_features + to;
  if (args.out_is_float) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = v;
  } else {
    store_four<T>(static_cast<T*>(args.out) + at, v);
  }
}

// The best result of each of a warp's columns: kept by one lane a column in shared memory, from tile to tile.
template <int kColumnTiles>
struct BestOfColumns {
  uint64_t* slots;        // [column]
  uint32_t wanted = ~0u;  // bit n: results of this lane's column of tile n are to be stored

  static __device__ __forceinline__ int column_in_tile() { return threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2; }

  __device__ __forceinline__ void clear(const KernelArgs& args, int first_column) {
    wanted = 0;
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = first_column + n * 8 + column_in_tile();
      if (column < args.batch && (args.wanted == nullptr || args.wanted[column] != 0)) wanted |= 1u << n;
    }
    for (int i = threadIdx.x % 32; i < kColumnTiles * 8; i += 32) slots[i] = 0;
    __syncwarp();
  }

  // Lanes 0 to 7 own a column each; the three lanes further on in steps of eight have other rows of it.
  __device__ __forceinline__ void offer(int n, uint64_t best) {
#pragma unroll
    for (int lanes = 8; lanes < 32; lanes *= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, best, lanes);
      best = best > other ? best : other;
    }
    uint64_t* slot = slots + n * 8 + column_in_tile();
    if (threadIdx.x % 32 < 8 && best > *slot) *slot = best;
  }
};

// The sums of the only chain, behind a norm, from registers: rows of a tile beside consumers that go on with the next.
template <class T, class Sums>
__device__ __forceinline__ void store_direct(const KernelArgs& args, const Sums& sums, int first_row, int first_column,
                                             int own_row, const float* inverse_rms,
                                             BestOfColumns<Sums::kColumnTiles>& best) {
  float top[Sums::kColumnTiles];
  int top_id[Sums::kColumnTiles];
  uint32_t unusable = 0;
#pragma unroll
  for (int n = 0; n < Sums::kColumnTiles; ++n) {
    top[n] = -INFINITY;
    top_id[n] = -1;
  }
  sums.visit(first_row, [&](int n, int row, int column, float low, float high) {
    column += first_column;
    const int to = own_row + row;
    if (row >= args.plan.own_rows || to >= args.out_features || column >= args.batch) return;
    const float scale = inverse_rms[column];
    low *= scale;
    high *= scale;
    const int64_t at = int64_t{column} * args.out_features + to;
    if (!args.out_is_float) {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + at) = Element<T>::pack(low, high);
    } else if (best.wanted >> n & 1) {
      *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = {low, high};
    }
    if (args.best == nullptr) return;
    if (to < args.vocab) {
      if (!(low < INFINITY)) unusable |= 1u << n;
      if (low > top[n]) top[n] = low, top_id[n] = to;
    }
    if (to + 1 < args.vocab) {
      if (!(high < INFINITY)) unusable |= 1u << n;
      if (high > top[n]) top[n] = high, top_id[n] = to + 1;
    }
  });
  if (args.best == nullptr) return;
#pragma unroll
  for (int n = 0; n < Sums::kColumnTiles; ++n) {
    best.offer(n, unusable >> n & 1 ? kUnusableScore : top_id[n] < 0 ? 0 : packed_score(top[n], top_id[n]));
  }
}

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
template <class Weights, class Activations>
__device__ __forceinline__ Ring open_block(const KernelArgs& args, unsigned char* shared, int empty_arrivals) {
  const Plan& plan = args.plan;
  const int weight_bytes = plan.stage_blocks * plan.rows * 2 * kBlock;
  const Ring ring{ptx::shared_address(shared), plan.stages, weight_bytes,
                  weight_bytes + plan.stage_blocks * plan.columns * 2 * kBlock};
  if (threadIdx.x == 0) {
    if (ring.shared % 1024 != 0) __trap();
    ring.init(Weights::kWarps * Weights::kLanes, Activations::kWarps * Activations::kLanes, empty_arrivals);
#if __CUDA_ARCH__ >= 900
    if (plan.cluster_bits > 0)
      ptx::expect_bytes(ring.exchange_barrier(), plan.cluster() * args.batch * plan.own_rows * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  if (!args.opens_step) ptx::let_next_kernel_start();
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (plan.cluster_bits > 0) ptx::arrive_at_cluster_barrier();
#endif
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
