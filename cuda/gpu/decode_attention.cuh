// Decode attention: one query token a sequence, over the paged pool. Floor: context * 2 * kv_heads * head_dim elements.
//
// KV goes from global memory straight into mma fragments, past shared memory. A dot product does not care in which
// order its terms are summed, so a lane loads 16 contiguous bytes of a key row and calls them its share of the k axis;
// the query is read in the same order. Keys are the A operand (16 tokens), the group's queries the B operand (8
// columns); then values, transposed in registers, are A and the probabilities B. So all query heads of a group share
// each load.
//
// A warp owns every n-th step of 32 tokens with its own running maximum, sum and output: no barrier in the loop. Warps
// merge in shared memory, the blocks of a cluster through distributed shared memory (sm_90), and splits of a long
// sequence through global memory, where the last to arrive sums all in a fixed order.
//
// The newest token's K and V take another way: through shared memory, into the fragments of the warp that owns them. So
// under programmatic dependent launch all KV of the first step is fetched before the previous kernel is waited for, and
// bias, QK-norm, RoPE and the write to the pool can be this kernel's prologue (decode_attention) rather than a kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gpu/decode_plan.cuh"
#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu {

constexpr unsigned kAllLanes = ~0u;

// How kLanes lanes share one row of kLanes * kWords * 2 elements: 16 bytes each, over again, then a narrower rest.
template <int kLanes, int kWords>
struct SharedRow {
  static constexpr int kWide = kWords / 4;
  static constexpr int kRest = kWords % 4;
  static_assert(kRest != 3);

  static __device__ __forceinline__ int element(int lane, int word) {
    if (word < 4 * kWide) return 8 * (kLanes * (word / 4) + lane) + 2 * (word % 4);
    return 8 * kLanes * kWide + 2 * (kRest * lane + word - 4 * kWide);
  }

  template <class T>
  static __device__ __forceinline__ void load(uint32_t (&w)[kWords], const T* row, int lane) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) ptx::load_streaming<4>(w + 4 * i, row + element(lane, 4 * i));
    if constexpr (kRest > 0) ptx::load_streaming<kRest>(w + 4 * kWide, row + element(lane, 4 * kWide));
  }

  // `row` is an address in shared memory.
  static __device__ __forceinline__ void load_shared(uint32_t (&w)[kWords], uint32_t row, int lane) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) ptx::load_shared<4>(w + 4 * i, row + 2 * element(lane, 4 * i));
    if constexpr (kRest > 0) ptx::load_shared<kRest>(w + 4 * kWide, row + 2 * element(lane, 4 * kWide));
  }
};

// One KV block of one head as fragments. g = lane / 4 and c = lane % 4, as in the mma layouts.
template <class T, int kDim>
struct Tile {
  static constexpr int kKeyWords = kDim / 8;
  static constexpr int kValueWords = kDim / 16;
  using KeyRow = SharedRow<4, kKeyWords>;
  using ValueRow = SharedRow<8, kValueWords>;

  uint32_t upper[kKeyWords];       // key row g
  uint32_t lower[kKeyWords];       // key row g + 8
  uint32_t value[4][kValueWords];  // value rows value_token(c, 0..3)

  static __device__ __forceinline__ int value_token(int c, int i) { return 2 * c + i % 2 + 8 * (i / 2); }

  __device__ __forceinline__ void load_keys(const T* keys, int g, int c) {
    KeyRow::load(upper, keys + g * kDim, c);
    KeyRow::load(lower, keys + (g + 8) * kDim, c);
  }
  __device__ __forceinline__ void load_values(const T* values, int g, int c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ValueRow::load(value[i], values + value_token(c, i) * kDim, g);
  }
  // Puts one token's key and value, rows in shared memory, in their places.
  __device__ __forceinline__ void place(uint32_t key_row, uint32_t value_row, int token, int g, int c) {
    if (g == token) KeyRow::load_shared(upper, key_row, c);
    if (g + 8 == token) KeyRow::load_shared(lower, key_row, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (value_token(c, i) == token) ValueRow::load_shared(value[i], value_row, g);
    }
  }
};

// A merge of partial softmax results: each part has a maximum, a sum of 2^(score - maximum) and a weighted output.
struct Merged {
  float max = -INFINITY;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void add(float weight, float part_sum, const float4& part_out) {
    sum += weight * part_sum;
    out.x += weight * part_out.x;
    out.y += weight * part_out.y;
    out.z += weight * part_out.z;
    out.w += weight * part_out.w;
  }
  // The exponent's base line: -inf - -inf would be NaN.
  __device__ __forceinline__ float base() const { return max == -INFINITY ? 0.0f : max; }
};

// `stats(i)` is (maximum, sum) of part i, `out(i)` its output.
template <int kParts, class Stats, class Out>
__device__ __forceinline__ Merged merge(const Stats& stats, const Out& out) {
  Merged merged;
  float2 part[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    part[i] = stats(i);
    merged.max = fmaxf(merged.max, part[i].x);
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) merged.add(ptx::exp2_fast(part[i].x - merged.base()), part[i].y, out(i));
  return merged;
}

template <class T, int kDim, int kWarps, int kCluster>
struct DecodeShared {
  static constexpr int kQueryPitch = (kDim <= 96 ? 48 : 80) * 2;  // elements; 16 banks on from row to row
  alignas(16) float out[kWarps][kMaxGroup][kDim + 8];
  alignas(16) T query[kMaxGroup][kQueryPitch];
  alignas(16) T newest[2][kDim];  // the newest token's key and value
  alignas(16) float4 peer_out[kCluster > 1 ? kMaxGroup * kDim / 4 + kCluster : 1];
  float2 peer_stats[kCluster][kMaxGroup];
  float2 stats[kWarps][kMaxGroup];
  alignas(8) uint64_t peers_done;
  int ticket;
};

// Thread blocks an SM must hold: what the registers of two tiles, an output and the bookkeeping allow.
template <int kDim, int kWarps>
constexpr int kBlocksPerMultiprocessor = (kDim <= 64 ? 16 : 8) / kWarps;

template <class T, int kDim, int kWarps, int kCluster>
class DecodeBlock {
 public:
  using Shared = DecodeShared<T, kDim, kWarps, kCluster>;

  __device__ __forceinline__ DecodeBlock(const Decode& args, Shared& shared)
      : args_(args), shared_(shared), thread_(threadIdx.x), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster > 1) rank_ = ptx::cluster_rank();
#endif
  }

  __device__ __forceinline__ void run() {
    Split split = load_split(blockIdx.x / kCluster);
    if (split.seq < 0) {
      ptx::wait_for_previous_kernel();
    } else {
      open_cluster();
      clear_unused_queries();
      attend(split, true);
      while (kCluster == 1 && split.next >= 0) {
        const int empties = split.empties;
        split = load_split(split.next);
        split.empties = empties;
        __syncthreads();  // shared memory is still being read for the previous split
        attend(split, false);
      }
    }
    clear_empty_rows(split.empties);
  }

 private:
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRowFours = kDim / 4;  // float4s of one head's output
  using Fragments = Tile<T, kDim>;
  static constexpr int kKeyWords = Fragments::kKeyWords;
  static constexpr int kValueWords = Fragments::kValueWords;
  static constexpr int kStepsPerTable = 32 / kStepBlocks;

  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int c() const { return lane_ % 4; }
  __device__ __forceinline__ int fours() const { return args_.group * kRowFours; }
  // Of a cluster's outputs, each block finishes an equal stretch.
  __device__ __forceinline__ int fours_a_block() const { return (fours() + kCluster - 1) / kCluster; }

  __device__ __forceinline__ Split load_split(int index) const {
    static_assert(sizeof(Split) == 2 * sizeof(int4));
    const int4* from = reinterpret_cast<const int4*>(args_.plan + index);
    const int4 halves[2] = {__ldg(from), __ldg(from + 1)};
    Split split;
    memcpy(&split, halves, sizeof(split));
    return split;
  }

  __device__ __forceinline__ void clear_empty_rows(int empties) const {
    const int pieces = args_.q_heads * kDim / 8;
    for (int i = blockIdx.x; i < empties; i += gridDim.x) {
      uint4* row = static_cast<uint4*>(args_.out) + static_cast<int64_t>(args_.empties[i]) * pieces;
      for (int piece = thread_; piece < pieces; piece += kThreads) row[piece] = make_uint4(0, 0, 0, 0);
    }
  }

  // Every block of the cluster must have started, and set its barrier, before another stores into it.
  __device__ __forceinline__ void open_cluster() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster > 1) {
      if (thread_ == 0) {
        const int mine = max(0, min(fours_a_block(), fours() - rank_ * fours_a_block()));
        const int bytes =
            kCluster * (mine * static_cast<int>(sizeof(float4)) + args_.group * static_cast<int>(sizeof(float2)));
        ptx::expect_bytes(ptx::shared_address(&shared_.peers_done), bytes);
      }
      __syncwarp();
      ptx::arrive_at_cluster_barrier();
    }
#endif
  }

  __device__ __forceinline__ void clear_unused_queries() {
    constexpr int kPieces = Shared::kQueryPitch / 8;
    for (int i = thread_; i < (kMaxGroup - args_.group) * kPieces; i += kThreads) {
      *reinterpret_cast<uint4*>(&shared_.query[args_.group + i / kPieces][8 * (i % kPieces)]) = make_uint4(0, 0, 0, 0);
    }
  }

  // The block whose warp reads the newest token.
  __device__ __forceinline__ bool owns_newest(const Split& split) const {
    const int last_step = (split.length - 1) / kStepTokens;
    return split.end == last_step + 1 && (last_step - split.begin) % kCluster == rank_;
  }

  // Elements 2 * lane, 2 * lane + 1 and the two half a head further on: what one lane rotates. Lanes past a quarter of
  // head_dim have none.
  struct Pair {
    uint32_t first = 0, second = 0;
  };

  __device__ __forceinline__ bool has_pair() const { return lane_ < kDim / 4; }

  __device__ __forceinline__ Pair load_pair(const T* row) const {
    Pair pair;
    if (has_pair()) {
      ptx::load_past_l1<1>(&pair.first, row + 2 * lane_);
      ptx::load_past_l1<1>(&pair.second, row + kDim / 2 + 2 * lane_);
    }
    return pair;
  }

  __device__ __forceinline__ void store_pair(T* row, const Pair& pair) const {
    if (!has_pair()) return;
    *reinterpret_cast<uint32_t*>(row + 2 * lane_) = pair.first;
    *reinterpret_cast<uint32_t*>(row + kDim / 2 + 2 * lane_) = pair.second;
  }

  // Bias, then RMSNorm over the head, then rotation, in fp32.
  __device__ __forceinline__ Pair turned(const Pair& raw, const Pair& bias, const T* norm_weight, float2 cosine,
                                         float2 sine) const {
    using E = Element<T>;
    float x0 = E::low(raw.first) + E::low(bias.first), x1 = E::high(raw.first) + E::high(bias.first);
    float y0 = E::low(raw.second) + E::low(bias.second), y1 = E::high(raw.second) + E::high(bias.second);
    if (norm_weight != nullptr) {
      float squares = x0 * x0 + x1 * x1 + y0 * y0 + y1 * y1;
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(kAllLanes, squares, lanes);
      const float scale = rsqrtf(squares * (1.0f / kDim) + args_.norm_eps);
      const Pair weight = load_pair(norm_weight);
      x0 *= scale * E::low(weight.first);
      x1 *= scale * E::high(weight.first);
      y0 *= scale * E::low(weight.second);
      y1 *= scale * E::high(weight.second);
    }
    return {E::pack(x0 * cosine.x - y0 * sine.x, x1 * cosine.y - y1 * sine.y),
            E::pack(y0 * cosine.x + x0 * sine.x, y1 * cosine.y + x1 * sine.y)};
  }

  // Queries, and in one block the newest key and value, into shared memory: a warp a row.
  __device__ __forceinline__ void load_rows(const Split& split, T* newest_key, float2 cosine, float2 sine) {
    const int rows = args_.group + (owns_newest(split) ? 2 : 0);
    for (int row = warp_; row < rows; row += kWarps) {
      const bool is_query = row < args_.group, is_key = row == args_.group;
      const int head =
          is_query ? split.kv_head * args_.group + row : args_.q_heads + split.kv_head + (is_key ? 0 : args_.kv_heads);
      T* to = is_query ? shared_.query[row] : shared_.newest[is_key ? 0 : 1];
      T* in_pool = newest_key + (is_key ? 0 : args_.value_offset);
      if (args_.writes) {
        const Pair raw = load_pair(static_cast<const T*>(args_.query) + split.seq * args_.query_stride + head * kDim);
        const T* bias_row = static_cast<const T*>(args_.bias) + head * kDim;
        const Pair bias = args_.bias != nullptr ? load_pair(bias_row) : Pair{};
        const auto* norm = static_cast<const T*>(is_query ? args_.q_norm_weight
                                                 : is_key ? args_.k_norm_weight
                                                          : nullptr);
        const bool rotates = is_query || is_key;
        const Pair pair = turned(raw, bias, norm, rotates ? cosine : float2{1.0f, 1.0f}, rotates ? sine : float2{});
        store_pair(to, pair);
        if (!is_query) store_pair(in_pool, pair);
      } else {
        const T* query = static_cast<const T*>(args_.query) + split.seq * args_.query_stride + head * kDim;
        store_pair(to, load_pair(is_query ? query : in_pool));
      }
    }
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
    int64_t at[kStepBlocks];
    const auto locate = [&](int step) {
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        at[u] = __shfl_sync(kAllLanes, ids, step % kStepsPerTable * kStepBlocks + u) * args_.block_stride;
      }
    };

    Fragments tile[kStepBlocks];
    locate(0);
    if (steps > 0) {
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) tile[u].load_keys(keys + at[u], g(), c());
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) tile[u].load_values(values + at[u], g(), c());
    }
    // The newest token's place in the pool, and its angles.
    const int newest = split.length - 1;
    T* newest_key =
        const_cast<T*>(keys) + __ldg(table + last_block) * args_.block_stride + newest % kBlockTokens * kDim;
    float2 cosine = {1.0f, 1.0f}, sine = {0.0f, 0.0f};
    if (args_.writes && has_pair()) {
      const float2* angles = reinterpret_cast<const float2*>(args_.cos_sin + static_cast<int64_t>(newest) * kDim);
      cosine = __ldg(angles + lane_);
      sine = __ldg(angles + kDim / 4 + lane_);
    }
    if (waits) ptx::wait_for_previous_kernel();
    load_rows(split, newest_key, cosine, sine);
    __syncthreads();

    float out[kValueWords][4] = {};
    float max0 = -INFINITY, max1 = -INFINITY, sum0 = 0.0f, sum1 = 0.0f;  // of query heads 2c and 2c + 1
    for (int step = 0; step < steps; ++step) {
      const int at_step = first + step * kStride;
      if (at_step == last_step) place_newest(tile, newest - at_step * kStepTokens);
      float score[kStepBlocks][4];
      scores(score, tile);
      const bool more = step + 1 < steps;
      if (more) {
        if ((step + 1) % kStepsPerTable == 0) {
          ids = next_ids;
          if (step + 1 + kStepsPerTable < steps) next_ids = entries(step + 1 + kStepsPerTable);
        }
        locate(step + 1);
#pragma unroll
        for (int u = 0; u < kStepBlocks; ++u) tile[u].load_keys(keys + at[u], g(), c());
      }
      if (at_step == last_step) mask(score, tile, split.length - at_step * kStepTokens);

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
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        const float p0 = ptx::exp2_fast(score[u][0] - max0), p1 = ptx::exp2_fast(score[u][1] - max1);
        const float p2 = ptx::exp2_fast(score[u][2] - max0), p3 = ptx::exp2_fast(score[u][3] - max1);
        sum0 += p0 + p2;
        sum1 += p1 + p3;
        add_values(out, tile[u], Element<T>::pack(p0, p1), Element<T>::pack(p2, p3));
      }
      if (more) {
#pragma unroll
        for (int u = 0; u < kStepBlocks; ++u) tile[u].load_values(values + at[u], g(), c());
      }
    }
    stage(out, max0, max1, sum0, sum1);
    __syncthreads();
    finish(split);
  }

  // Scores of two KV blocks, in powers of two: rows are tokens g and g + 8, columns query heads 2c and 2c + 1.
  __device__ __forceinline__ void scores(float (&score)[kStepBlocks][4], const Fragments (&tile)[kStepBlocks]) const {
    using Row = typename Fragments::KeyRow;
    float even[kStepBlocks][4] = {}, odd[kStepBlocks][4] = {};  // two chains of additions run side by side
    const uint32_t row = ptx::shared_address(&shared_.query[g()][0]);
#pragma unroll
    for (int w = 0; w < kKeyWords; w += 4) {
      uint32_t query[4];
      const uint32_t from = row + 2 * Row::element(c(), w);
      if (w + 4 <= kKeyWords) {
        ptx::load_shared<4>(query, from);
      } else {
        ptx::load_shared<2>(query, from);
      }
#pragma unroll
      for (int u = 0; u < kStepBlocks; ++u) {
        const uint32_t* upper = tile[u].upper + w;
        const uint32_t* lower = tile[u].lower + w;
        Element<T>::mma(even[u], upper[0], lower[0], upper[1], lower[1], query[0], query[1]);
        if (w + 4 <= kKeyWords) Element<T>::mma(odd[u], upper[2], lower[2], upper[3], lower[3], query[2], query[3]);
      }
    }
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[u][i] = (even[u][i] + odd[u][i]) * args_.scale_log2;
    }
  }

  // `token` counts from the step's first.
  __device__ __forceinline__ void place_newest(Fragments (&tile)[kStepBlocks], int token) const {
    const uint32_t key = ptx::shared_address(shared_.newest[0]), value = ptx::shared_address(shared_.newest[1]);
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) tile[u].place(key, value, token - u * kBlockTokens, g(), c());
  }

  // Past the end of the context the pool holds anything, NaN too: scores are replaced and values zeroed.
  __device__ __forceinline__ void mask(float (&score)[kStepBlocks][4], Fragments (&tile)[kStepBlocks],
                                       int valid) const {
#pragma unroll
    for (int u = 0; u < kStepBlocks; ++u) {
      const int left = valid - u * kBlockTokens;
      if (g() >= left) score[u][0] = score[u][1] = -INFINITY;
      if (g() + 8 >= left) score[u][2] = score[u][3] = -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool keep = Fragments::value_token(c(), i) < left;
#pragma unroll
        for (int w = 0; w < kValueWords; ++w) tile[u].value[i][w] = keep ? tile[u].value[i][w] : 0u;
      }
    }
  }

  // out += V^T P. Each word of a value row holds elements 2j and 2j + 1 of the output: rows g and g + 8 of one mma.
  __device__ __forceinline__ void add_values(float (&out)[kValueWords][4], const Fragments& tile, uint32_t upper,
                                             uint32_t lower) const {
    const uint32_t p0 = ptx::transpose_8x8(upper), p1 = ptx::transpose_8x8(lower);
#pragma unroll
    for (int w = 0; w < kValueWords; ++w) {
      const uint32_t v0 = tile.value[0][w], v1 = tile.value[1][w], v2 = tile.value[2][w], v3 = tile.value[3][w];
      Element<T>::mma(out[w], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                      __byte_perm(v2, v3, 0x7632), p0, p1);
    }
  }

  __device__ __forceinline__ void stage(const float (&out)[kValueWords][4], float max0, float max1, float sum0,
                                        float sum1) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      sum0 += __shfl_xor_sync(kAllLanes, sum0, lanes);
      sum1 += __shfl_xor_sync(kAllLanes, sum1, lanes);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int head = 2 * c() + b;
      if (head >= args_.group) continue;
#pragma unroll
      for (int w = 0; w < kValueWords; ++w) {
        *reinterpret_cast<float2*>(&shared_.out[warp_][head][Fragments::ValueRow::element(g(), w)]) =
            make_float2(out[w][b], out[w][2 + b]);
      }
      if (g() == 0) shared_.stats[warp_][head] = b == 0 ? make_float2(max0, sum0) : make_float2(max1, sum1);
    }
  }

  __device__ __forceinline__ Merged merge_warps(int four) const {
    const int head = four / kRowFours, element = four % kRowFours * 4;
    return merge<kWarps>([&](int w) { return shared_.stats[w][head]; },
                         [&](int w) { return *reinterpret_cast<const float4*>(&shared_.out[w][head][element]); });
  }

  __device__ __forceinline__ void finish(const Split& split) {
    if constexpr (kCluster == 1) {
      for (int four = thread_; four < fours(); four += kThreads) deliver(split, four, merge_warps(four));
    } else {
      exchange();
      const int four = rank_ * fours_a_block() + thread_;
      if (thread_ < fours_a_block() && four < fours()) deliver(split, four, merge_peers(four));
    }
    if (split.parts > 1) merge_parts(split);
  }

  // Sends each block of the cluster its stretch of this block's output, and waits for what the others send.
  __device__ __forceinline__ void exchange() {
#if __CUDA_ARCH__ >= 900
    const uint32_t done = ptx::shared_address(&shared_.peers_done);
    ptx::wait_at_cluster_barrier();
    for (int i = thread_; i < fours() + kCluster * args_.group; i += kThreads) {
      if (i < fours()) {
        const int owner = i / fours_a_block();
        const float4* place = &shared_.peer_out[rank_ * fours_a_block() + i - owner * fours_a_block()];
        ptx::store_to_peer(ptx::peer_address(ptx::shared_address(place), owner), ptx::peer_address(done, owner),
                           merge_warps(i).out);
      } else {
        const int owner = (i - fours()) / args_.group, head = (i - fours()) % args_.group;
        const Merged merged = merge<kWarps>([&](int w) { return shared_.stats[w][head]; },
                                            [&](int) { return float4{0.0f, 0.0f, 0.0f, 0.0f}; });
        const float2* place = &shared_.peer_stats[rank_][head];
        ptx::store_to_peer(ptx::peer_address(ptx::shared_address(place), owner), ptx::peer_address(done, owner),
                           make_float2(merged.max, merged.sum));
      }
    }
    ptx::wait_for_bytes(done);
#endif
  }

  __device__ __forceinline__ Merged merge_peers(int four) const {
    const int head = four / kRowFours;
    return merge<kCluster>([&](int r) { return shared_.peer_stats[r][head]; },
                           [&](int r) { return shared_.peer_out[r * fours_a_block() + thread_]; });
  }

  // The finished output, or this split's part of it.
  __device__ __forceinline__ void deliver(const Split& split, int four, const Merged& merged) {
    if (split.parts == 1) return write(split, four, merged);
    const int slot = partial_slot(split.first, split.part, apart());
    __stcg(output_row(slot) + four, merged.out);
    // One stats row a block of the cluster: each block's ticket covers only its own stores.
    const int head = four / kRowFours;
    if (four % kRowFours == 0 || (kCluster > 1 && thread_ == 0)) {
      __stcg(stats_row(slot) + head, make_float2(merged.max, merged.sum));
    }
  }

  // From the cluster that reads one part of a pair to that of the next.
  __device__ __forceinline__ int apart() const { return kCluster == 1 ? args_.kv_heads : 1; }

  __device__ __forceinline__ float4* output_row(int slot) const {
    return args_.outputs + static_cast<int64_t>(slot) * fours();
  }

  __device__ __forceinline__ float2* stats_row(int slot) const {
    return args_.stats + (slot * kCluster + rank_) * kMaxGroup;
  }

  __device__ __forceinline__ void write(const Split& split, int four, const Merged& merged) const {
    const float inverse = 1.0f / merged.sum;
    T* row = static_cast<T*>(args_.out) +
             (static_cast<int64_t>(split.seq) * args_.q_heads + split.kv_head * args_.group) * kDim;
    *reinterpret_cast<uint2*>(row + 4 * four) =
        make_uint2(Element<T>::pack(merged.out.x * inverse, merged.out.y * inverse),
                   Element<T>::pack(merged.out.z * inverse, merged.out.w * inverse));
  }

  // The last part of a pair to get here sums all of them, in their order, and leaves the ticket at zero.
  __device__ __forceinline__ void merge_parts(const Split& split) {
    __syncthreads();
    if (thread_ == 0) {
      int* counter = args_.tickets + split.first * kCluster + rank_;
      shared_.ticket = ptx::take_ticket(counter);
      if (shared_.ticket == split.parts - 1) *counter = 0;
    }
    __syncthreads();
    if (shared_.ticket != split.parts - 1) return;
    const int begin = rank_ * fours_a_block();
    for (int four = begin + thread_; four < min(begin + fours_a_block(), fours()); four += kThreads) {
      const int head = four / kRowFours;
      Merged merged;
#pragma unroll 8
      for (int part = 0; part < split.parts; ++part) {
        const int slot = partial_slot(split.first, part, apart());
        const float2 stats = __ldcg(stats_row(slot) + head);
        const float4 out = __ldcg(output_row(slot) + four);
        const float max = fmaxf(merged.max, stats.x);
        const float base = max == -INFINITY ? 0.0f : max;
        const float fade = ptx::exp2_fast(merged.max - base);
        merged.sum *= fade;
        merged.out = {merged.out.x * fade, merged.out.y * fade, merged.out.z * fade, merged.out.w * fade};
        merged.max = max;
        merged.add(ptx::exp2_fast(stats.x - base), stats.y, out);
      }
      write(split, four, merged);
    }
  }

  const Decode& args_;
  Shared& shared_;
  const int thread_, lane_, warp_;
  int rank_ = 0;
};

template <class T, int kDim, int kWarps, int kCluster>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerMultiprocessor<kDim, kWarps>)
    decode_kernel(const __grid_constant__ Decode args) {
  __shared__ DecodeShared<T, kDim, kWarps, kCluster> shared;
  ptx::let_next_kernel_start();
  DecodeBlock<T, kDim, kWarps, kCluster>(args, shared).run();
}

// Single blocks: four warps at head_dim 64, where an SM holds four of them, else eight. Clusters: eight.
template <class T, int kDim>
auto decode_kernel_of(int cluster) -> void (*)(Decode) {
  switch (cluster) {
    case 2:
      return decode_kernel<T, kDim, 8, 2>;
    case 4:
      return decode_kernel<T, kDim, 8, 4>;
    case 8:
      return decode_kernel<T, kDim, 8, 8>;
    default:
      return decode_kernel<T, kDim, DecodeKernels<kDim>::kSingleWarps, 1>;
  }
}

template <int kDim>
void DecodeKernels<kDim>::launch(DType dtype, const DecodeGrid& grid, const Decode& args, const Launch& launch) {
  with_element(dtype, [&]<class T>(T) {
    launch_kernel("paged_attention", decode_kernel_of<T, kDim>(grid.cluster),
                  {.grid = dim3(grid.clusters * grid.cluster), .block = dim3(grid.warps * 32), .cluster = grid.cluster},
                  launch, args);
  });
}

template <int kDim>
int DecodeKernels<kDim>::resident_clusters(int cluster) {
  const auto kernel = decode_kernel_of<__nv_bfloat16, kDim>(cluster);
  const int warps = cluster == 1 ? kSingleWarps : kClusterWarps;
  int count = 0;
  if (cluster == 1) {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, warps * 32, 0), "occupancy");
    return count * current_device().multiprocessors;
  }
  cudaLaunchAttribute size;
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster * current_device().multiprocessors);
  config.blockDim = dim3(warps * 32);
  config.attrs = &size;
  config.numAttrs = 1;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "cluster occupancy");
  return count;
}

}  // namespace octavo::gpu
