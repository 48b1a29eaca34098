// Decode attention: one query token a sequence, over the paged pool. Floor: context * 2 * kv_heads * head_dim elements.
//
// A dot product does not care in which order its terms are summed, so a lane loads 16 contiguous bytes of a key row and
// calls them its share of the k axis; the query is read in the same order. Keys are the A operand (16 tokens), the
// group's queries the B operand (8 columns); then values, transposed in registers, are A and the probabilities B. So
// all query heads of a group share each load.
//
// KV lands in shared memory, so that no registers are held by what is on its way. From sm_90 on bulk tensor copies
// bring it, a KV block of one head each: loads into registers, and cp.async, need L1 for what is on its way, and the
// decode matmuls before and after this kernel leave 28 KB of it, which costs a third of the bandwidth. Elsewhere, and
// for odd head_dims, it is cp.async. Either way a lane reads 16 bytes at a time without bank conflicts.
//
// A warp owns every n-th step of 32 tokens with its own running maximum, sum and output: no barrier in the loop. Warps
// merge in shared memory, the blocks of a cluster through distributed shared memory (sm_90), and splits of a long
// sequence through global memory, where the last to arrive sums all in a fixed order.
//
// The newest token's K and V take another way: through shared memory, into the fragments of the warp that owns them. So
// under programmatic dependent launch all KV of the first step is fetched before the previous kernel is waited for, and
// bias, QK-norm, RoPE and the write to the pool can be this kernel's prologue (decode_attention) rather than a kernel.
#pragma once

#include <cstring>

#include "gpu/decode_attention_merge.cuh"

namespace octavo::gpu {

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
class DecodeBlock : DecodeMerge<T, Kv, kDim, kWarps, kCluster, kSteps> {
 public:
  using Merge = DecodeMerge<T, Kv, kDim, kWarps, kCluster, kSteps>;
  using Merge::Merge;
  using typename Merge::Shared;

  __device__ __forceinline__ void run() {
    Split split = load_split(blockIdx.x / kCluster);
    if (split.seq < 0) {
      ptx::wait_for_previous_kernel();
      fetch_ahead();
    } else {
      open_cluster();
      open_landing();
      clear_unused_queries();
      attend(split, true);
      while (kCluster == 1) {
        const int empties = split.empties, next = split.next < -1 ? take_piece(-1 - split.next) : split.next;
        if (next < 0) break;
        split = load_split(next);
        split.empties = empties;
#if __CUDA_ARCH__ >= 900
        if constexpr (Kv::kTensorCopies) ptx::publish_shared_stores();
#endif
        __syncthreads();  // shared memory is still being read for the previous split
        attend(split, false);
      }
    }
    clear_empty_rows(split.empties);
  }

 private:
  using Merge::args_, Merge::tiles_, Merge::shared_, Merge::thread_, Merge::lane_, Merge::warp_, Merge::rank_;
  using Merge::clear_unused_queries, Merge::row_weights, Merge::load_raw, Merge::load_rows, Merge::open_cluster,
      Merge::finish;
  using Merge::kThreads;
  using typename Merge::Pair, typename Merge::RowWeights;
  static constexpr int kKeyWords = Kv::kKeyWords;
  static constexpr int kValueWords = Kv::kValueWords;
  static constexpr int kStepsPerTable = 32 / kStepBlocks;
  static constexpr int kKeyStages = Shared::kKeyStages;

  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int c() const { return lane_ % 4; }

  __device__ __forceinline__ Split load_split(int index) const {
    static_assert(sizeof(Split) == 2 * sizeof(int4));
    const int4* from = reinterpret_cast<const int4*>(args_.plan + index);
    const int4 halves[2] = {__ldg(from), __ldg(from + 1)};
    Split split;
    memcpy(&split, halves, sizeof(split));
    return split;
  }

  // The bus has little else to do: this kernel has idle blocks where contexts are few.
  __device__ __forceinline__ void fetch_ahead() const {
#if __CUDA_ARCH__ >= 900
    if (args_.ahead_bytes == 0 || thread_ != 0) return;
    const char* from = args_.ahead + int64_t{blockIdx.x} * kIdlePieces * args_.ahead_stride;
#pragma unroll 1
    for (int i = 0; i < kIdlePieces; ++i) ptx::fetch_into_l2(from + i * args_.ahead_stride, args_.ahead_bytes);
#endif
  }

  // The index in the plan of a piece that no other block has, or -1. Every block asks until there is none, and the last
  // of them leaves the count at zero.
  __device__ __forceinline__ int take_piece(int pieces) {
    const int blocks = gridDim.x;
    __syncthreads();  // the ticket may still be looked at
    if (thread_ == 0) {
      const int taken = atomicAdd(args_.taken, 1);
      if (taken == pieces + blocks - 1) *args_.taken = 0;
      shared_.ticket = taken;
    }
    __syncthreads();
    return shared_.ticket < pieces ? blocks + shared_.ticket : -1;
  }

  __device__ __forceinline__ void clear_empty_rows(int empties) const {
    const int pieces = args_.q_heads * kDim / 8;
    for (int i = blockIdx.x; i < empties; i += gridDim.x) {
      uint4* row = static_cast<uint4*>(args_.out) + static_cast<int64_t>(args_.empties[i]) * pieces;
      for (int piece = thread_; piece < pieces; piece += kThreads) row[piece] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void open_landing() {
#if __CUDA_ARCH__ >= 900
    if constexpr (Kv::kTensorCopies) {
      if (lane_ == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&tiles_) : "memory");
        for (int i = 0; i <= kKeyStages; ++i) ptx::init_barrier(landed(i), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");  // earlier steps wrote KV with ordinary stores
      }
      __syncwarp();
    }
#endif
  }

  __device__ __forceinline__ void attend(const Split& split, bool waits) {
    constexpr int kStride = kCluster * kWarps;
    const int first = split.begin + warp_ * kCluster + rank_;
    const int steps = first < split.end ? (split.end - first + kStride - 1) / kStride : 0;
    const int last_block = (split.length - 1) / kBlockTokens;
    const int last_step = last_block / kStepBlocks;
    const int* table = args_.block_tables + static_cast<int64_t>(split.seq) * args_.max_blocks;
    const T* keys = static_cast<const T*>(args_.pool) + static_cast<int64_t>(split.kv_head) * kBlockTokens * kDim;
    const T* values = keys + args_.value_offset;

    // Each lane holds one entry of the block table; the next 32 are fetched a round ahead.
    const auto entries = [&](int step) {
      return __ldg(table + min((first + (step + lane_ / kStepBlocks) * kStride) * kStepBlocks + lane_ % kStepBlocks,
                               last_block));
    };
    int ids = steps > 0 ? entries(0) : 0;
    int next_ids = steps > kStepsPerTable ? entries(kStepsPerTable) : 0;
    int table_at = 0;
    const auto block_of = [&](int step, int u) {
      return __shfl_sync(kAllLanes, step / kStepsPerTable == table_at ? ids : next_ids,
                         step % kStepsPerTable * kStepBlocks + u);
    };

    Kv tile[kStepBlocks];
    const uint32_t landing = ptx::shared_address(shared_.landing[warp_]);
    const auto use_keys_of = [&](int step) {
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        tile[u].keys = landing + (1 + key_stage(step)) * Shared::kStepBytes + u * Kv::kBytes;
      }
    };
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) {
      tile[u].values = landing + u * Kv::kBytes;
      tile[u].lane = lane_;
    }
    const auto copy_keys = [&](int step) {
      use_keys_of(step);
      if (step < steps) {
        int block[kStepBlocks];
#pragma unroll
        for (int u = 0; u < kStepBlocks; ++u) block[u] = block_of(step, u);
        if constexpr (Kv::kTensorCopies) {
          copy_tiles(tile[0].keys, block, split.kv_head, landed(1 + key_stage(step)));
        } else {
#pragma unroll
          for (int u = 0; u < kStepBlocks; ++u) tile[u].copy_keys(keys + block[u] * args_.block_stride);
        }
      }
      if constexpr (!Kv::kTensorCopies) ptx::commit_copies();
    };
    const auto copy_values = [&](int step) {
      if (step < steps) {
        int block[kStepBlocks];
#pragma unroll
        for (int u = 0; u < kStepBlocks; ++u) block[u] = block_of(step, u);
        if constexpr (Kv::kTensorCopies) {
          copy_tiles(tile[0].values, block, split.kv_head + args_.kv_heads, landed(0));
        } else {
#pragma unroll
          for (int u = 0; u < kStepBlocks; ++u) tile[u].copy_values(values + block[u] * args_.block_stride);
        }
      }
      if constexpr (!Kv::kTensorCopies) ptx::commit_copies();
    };
    const auto copy_first = [&] {
      copy_keys(0);
      copy_values(0);
      if constexpr (kKeyStages == 2) copy_keys(1);
    };
    const bool early = !waits || args_.reads_early;
    if (early) copy_first();
    // The newest token's place in the pool.
    const int newest = split.length - 1;
    T* newest_key =
        const_cast<T*>(keys) + __ldg(table + last_block) * args_.block_stride + newest % kBlockTokens * kDim;
    const RowWeights weights = row_weights(split, min(warp_, args_.group + 1));
    if (waits) ptx::wait_for_previous_kernel();
    // Ahead of KV, behind which they would queue.
    const Pair raw = load_raw(split, newest_key, warp_);
    if (!early) copy_first();
    load_rows(split, newest_key, weights, raw);
    __syncthreads();

    float out[kValueWords][4] = {};
    float max0 = -INFINITY, max1 = -INFINITY, sum0 = 0.0f, sum1 = 0.0f;  // of query heads 2c and 2c + 1
    for (int step = 0; step < steps; ++step) {
      const int at_step = first + step * kStride;
      const int newest_here = newest - at_step * kStepTokens;  // negative or small: in the last step only
      use_keys_of(step);
      wait_for_keys(step);
      if (at_step == last_step) place_newest_key(tile, newest_here);
      float score[kStepBlocks][4];
      scores(score, tile);
      copy_keys(step + kKeyStages);
      if (at_step == last_step) mask(score, newest_here);

      float top0 = max0, top1 = max1;
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        top0 = fmaxf(top0, fmaxf(score[u][0], score[u][2]));
        top1 = fmaxf(top1, fmaxf(score[u][1], score[u][3]));
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        top0 = fmaxf(top0, __shfl_xor_sync(kAllLanes, top0, lanes));
        top1 = fmaxf(top1, __shfl_xor_sync(kAllLanes, top1, lanes));
      }
      if (__any_sync(kAllLanes, top0 > max0 || top1 > max1)) {
        const float fade0 = ptx::exp2_fast(max0 - top0), fade1 = ptx::exp2_fast(max1 - top1);
        max0 = top0;
        max1 = top1;
        sum0 *= fade0;
        sum1 *= fade1;
#pragma unroll
        for (int w = 0; w < kValueWords; ++w) {
          out[w][0] *= fade0;
          out[w][1] *= fade1;
          out[w][2] *= fade0;
          out[w][3] *= fade1;
        }
      }
      wait_for_values(step);
      if (at_step == last_step) place_newest_value(tile, newest_here);
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        const float p0 = ptx::exp2_fast(score[u][0] - max0), p1 = ptx::exp2_fast(score[u][1] - max1);
        const float p2 = ptx::exp2_fast(score[u][2] - max0), p3 = ptx::exp2_fast(score[u][3] - max1);
        sum0 += p0 + p2;
        sum1 += p1 + p3;
        add_values(out, tile[u], Element<T>::pack(p0, p1), Element<T>::pack(p2, p3));
      }
      if ((step + 1) % kStepsPerTable == 0) {
        ++table_at;
        ids = next_ids;
        if (step + 1 + kStepsPerTable < steps) next_ids = entries(step + 1 + kStepsPerTable);
      }
      copy_values(step + 1);
    }
    steps_done_ += steps;
    stage(out, max0, max1, sum0, sum1);
    __syncthreads();
    finish(split);
  }

  // Starts bringing one head's keys or values of these blocks, once every lane has read what lay there.
  __device__ __forceinline__ void copy_tiles(uint32_t to, const int (&block)[kStepBlocks], int tile_in_block,
                                             uint32_t barrier) const {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    if (lane_ != 0) return;
    ptx::arrive_expecting(barrier, Shared::kStepBytes);
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) {
      ptx::copy_box(to + u * Kv::kBytes, &tiles_, 0, 0, 0, block[u] * args_.block_tiles + tile_in_block, barrier);
    }
#endif
  }

  __device__ __forceinline__ uint32_t landed(int which) const {
    return ptx::shared_address(&shared_.landed[warp_][which]);
  }
  __device__ __forceinline__ int key_stage(int step) const { return (steps_done_ + step) % kKeyStages; }

  __device__ __forceinline__ void wait_for_keys(int step) const {
    if constexpr (Kv::kTensorCopies) {
#if __CUDA_ARCH__ >= 900
      ptx::wait_for_phase(landed(1 + key_stage(step)), (steps_done_ + step) / kKeyStages % 2);
#endif
    } else {
      ptx::wait_for_copies<1>();
    }
  }

  __device__ __forceinline__ void wait_for_values(int step) const {
    if constexpr (Kv::kTensorCopies) {
#if __CUDA_ARCH__ >= 900
      ptx::wait_for_phase(landed(0), (steps_done_ + step) % 2);
#endif
    } else {
      ptx::wait_for_copies<1>();
    }
  }
  // A piece of a lane's share; the last one may be a rest of one or two words.
  template <int kPieces, int kRest>
  static __device__ __forceinline__ void load_piece(uint32_t (&w)[4], uint32_t from, int piece) {
    if (kRest == 0 || piece + 1 < kPieces) {
      ptx::load_shared<4>(w, from);
    } else if constexpr (kRest > 0) {
      ptx::load_shared<kRest>(w, from);
    }
  }

  // Scores of two KV blocks, in powers of two: rows are tokens g and g + 8, columns query heads 2c and 2c + 1.
  __device__ __forceinline__ void scores(float (&score)[kStepBlocks][4], const Kv (&tile)[kStepBlocks]) const {
    constexpr int kPieces = Kv::kKeyPieces, kRest = Kv::kKeyRest;
    float even[kStepBlocks][4] = {}, odd[kStepBlocks][4] = {};  // two chains of additions run side by side
    const uint32_t row = ptx::shared_address(&shared_.query[g()][0]);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t query[4];
      load_piece<kPieces, kRest>(query, row + 2 * Kv::key_element(c(), piece), piece);
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        uint32_t upper[4], lower[4];
        load_piece<kPieces, kRest>(upper, tile[u].key(0, piece), piece);
        load_piece<kPieces, kRest>(lower, tile[u].key(1, piece), piece);
        Element<T>::mma(even[u], upper[0], lower[0], upper[1], lower[1], query[0], query[1]);
        if (kRest == 0 || piece + 1 < kPieces) {
          Element<T>::mma(odd[u], upper[2], lower[2], upper[3], lower[3], query[2], query[3]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[u][i] = (even[u][i] + odd[u][i]) * args_.scale_log2;
    }
  }

  // Puts the newest token's key, a row in shared memory, in its place. `token` counts from the step's first. Each lane
  // writes what it reads itself.
  __device__ __forceinline__ void place_newest_key(const Kv (&tile)[kStepBlocks], int token) const {
    const uint32_t row = ptx::shared_address(shared_.newest[0]);
#pragma unroll
    for (int at = 0; at < 2 * kStepBlocks; ++at) {
      if (g() + 8 * at != token) continue;
#pragma unroll
      for (int piece = 0; piece < Kv::kKeyPieces; ++piece) {
        uint32_t w[4];
        load_piece<Kv::kKeyPieces, Kv::kKeyRest>(w, row + 2 * Kv::key_element(c(), piece), piece);
        store_piece<Kv::kKeyPieces, Kv::kKeyRest>(w, tile[at / 2].key(at % 2, piece), piece);
      }
    }
  }

  // The same for its value. Past the end of the context the pool holds anything, NaN too: there values become zeros,
  // and scores are replaced.
  __device__ __forceinline__ void place_newest_value(const Kv (&tile)[kStepBlocks], int token) const {
    const uint32_t row = ptx::shared_address(shared_.newest[1]);
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int here = tile[u].value_token(i) + u * kBlockTokens;
        if (here < token) continue;
#pragma unroll
        for (int piece = 0; piece < Kv::kValuePieces; ++piece) {
          uint32_t w[4] = {};
          if (here == token) {
            load_piece<Kv::kValuePieces, Kv::kValueRest>(w, row + 2 * Kv::value_element(g(), 4 * piece), piece);
          }
          store_piece<Kv::kValuePieces, Kv::kValueRest>(w, tile[u].value(i, piece), piece);
        }
      }
    }
  }

  template <int kPieces, int kRest>
  static __device__ __forceinline__ void store_piece(const uint32_t (&w)[4], uint32_t to, int piece) {
    if (kRest == 0 || piece + 1 < kPieces) {
      ptx::store_shared<4>(to, w);
    } else if constexpr (kRest > 0) {
      ptx::store_shared<kRest>(to, w);
    }
  }

  __device__ __forceinline__ void mask(float (&score)[kStepBlocks][4], int newest) const {
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) {
      const int last = newest - u * kBlockTokens;
      if (g() > last) score[u][0] = score[u][1] = -INFINITY;
      if (g() + 8 > last) score[u][2] = score[u][3] = -INFINITY;
    }
  }

  // out += V^T P. Each word of a value row holds elements 2j and 2j + 1 of the output: rows g and g + 8 of one mma.
  __device__ __forceinline__ void add_values(float (&out)[kValueWords][4], const Kv& tile, uint32_t upper,
                                             uint32_t lower) const {
    const uint32_t p0 = ptx::transpose_8x8(upper), p1 = ptx::transpose_8x8(lower);
#pragma unroll
    for (int piece = 0; piece < Kv::kValuePieces; ++piece) {
      uint32_t v[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_piece<Kv::kValuePieces, Kv::kValueRest>(v[i], tile.value(i, piece), piece);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (4 * piece + w >= kValueWords) break;
        Element<T>::mma(out[4 * piece + w], __byte_perm(v[0][w], v[1][w], 0x5410),
                        __byte_perm(v[0][w], v[1][w], 0x7632), __byte_perm(v[2][w], v[3][w], 0x5410),
                        __byte_perm(v[2][w], v[3][w], 0x7632), p0, p1);
      }
    }
  }

  __device__ __forceinline__ void stage(const float (&out)[kValueWords][4], float max0, float max1, float sum0,
                                        float sum1) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      sum0 += __shfl_xor_sync(kAllLanes, sum0, lanes);
      sum1 += __shfl_xor_sync(kAllLanes, sum1, lanes);
    }
    __syncwarp();  // other lanes' last keys and values lie here too
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int head = 2 * c() + b;
      if (head >= args_.group) continue;
#pragma unroll
      for (int w = 0; w < kValueWords; ++w) {
        *reinterpret_cast<float2*>(&shared_.found[warp_].out[head][Kv::value_element(g(), w)]) =
            make_float2(out[w][b], out[w][2 + b]);
      }
      if (g() == 0) shared_.stats[warp_][head] = b == 0 ? make_float2(max0, sum0) : make_float2(max1, sum1);
    }
  }

  int steps_done_ = 0;  // of this warp, in earlier splits
};

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
__global__ void __maxnreg__((kDecodeRegisters<kDim, kSteps>))
    decode_kernel(const __grid_constant__ Decode args, const __grid_constant__ CUtensorMap tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = DecodeShared<T, Kv, kDim, kWarps, kCluster, kSteps>;
  ptx::let_next_kernel_start();
  DecodeBlock<T, Kv, kDim, kWarps, kCluster, kSteps>(args, tiles, *reinterpret_cast<Shared*>(memory)).run();
}

}  // namespace octavo::gpu
