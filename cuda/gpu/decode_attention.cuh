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

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gpu/decode_plan.cuh"
#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "gpu/tensor_map.cuh"

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

  // Where the warp's lane finds its share in shared memory, 128 * kWords bytes for all lanes: the wide pieces of all
  // lanes, one after another, then what is left.
  static __device__ __forceinline__ uint32_t place(uint32_t landing, int warp_lane, int piece) {
    return landing + 512 * piece + (piece < kWide ? 16 : 4 * kRest) * warp_lane;
  }

  // Copies lane's share of `row` to `landing`, in the background.
  template <class T>
  static __device__ __forceinline__ void copy(uint32_t landing, int warp_lane, const T* row, int lane) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) ptx::copy_async<4>(place(landing, warp_lane, i), row + element(lane, 4 * i));
    if constexpr (kRest > 0) ptx::copy_async<kRest>(place(landing, warp_lane, kWide), row + element(lane, 4 * kWide));
  }
};

// Where a lane finds its share of one KV block of one head in shared memory. g = lane / 4 and c = lane % 4, as in the
// mma layouts: keys are rows g and g + 8, values rows value_token(0..3), in pieces of 16 bytes and perhaps a rest.
template <int kDim>
struct TileShape {
  static constexpr int kKeyWords = kDim / 8;
  static constexpr int kValueWords = kDim / 16;
  static constexpr int kKeyPieces = (kKeyWords + 3) / 4;
  static constexpr int kValuePieces = (kValueWords + 3) / 4;
  static constexpr int kKeyRest = kKeyWords % 4;  // words of the last piece, if it is not a whole one
  static constexpr int kValueRest = kValueWords % 4;
  static constexpr int kBytes = kBlockTokens * kDim * 2;  // of the keys, and of the values

  uint32_t keys, values;  // where they land
  int lane;

  __device__ __forceinline__ int g() const { return lane / 4; }
  __device__ __forceinline__ int c() const { return lane % 4; }
  __device__ __forceinline__ int value_token(int i) const { return 2 * c() + i % 2 + 8 * (i / 2); }
};

// As the lanes copy it: a lane's own, piece after piece.
template <int kDim>
struct LaneTile : TileShape<kDim> {
  using Shape = TileShape<kDim>;
  using KeyRow = SharedRow<4, Shape::kKeyWords>;
  using ValueRow = SharedRow<8, Shape::kValueWords>;
  static constexpr bool kTensorCopies = false;

  static __device__ __forceinline__ int key_element(int c, int piece) { return KeyRow::element(c, 4 * piece); }
  static __device__ __forceinline__ int value_element(int g, int word) { return ValueRow::element(g, word); }
  __device__ __forceinline__ uint32_t key(int half, int piece) const {
    return KeyRow::place(this->keys + half * 128 * Shape::kKeyWords, this->lane, piece);
  }
  __device__ __forceinline__ uint32_t value(int i, int piece) const {
    return ValueRow::place(this->values + i * 128 * Shape::kValueWords, this->lane, piece);
  }

  template <class T>
  __device__ __forceinline__ void copy_keys(const T* from) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      KeyRow::copy(this->keys + half * 128 * Shape::kKeyWords, this->lane, from + (this->g() + 8 * half) * kDim,
                   this->c());
    }
  }
  template <class T>
  __device__ __forceinline__ void copy_values(const T* from) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ValueRow::copy(this->values + i * 128 * Shape::kValueWords, this->lane, from + this->value_token(i) * kDim,
                     this->g());
    }
  }
};

// As tensor copies bring it: lines of 64 elements, all tokens' first lines, then their second ones. The 16-byte pieces
// of a line are permuted by the token modulo 8.
template <int kDim>
struct LineTile : TileShape<kDim> {
  using Shape = TileShape<kDim>;
  static constexpr bool kTensorCopies = true;
  static constexpr int kLines = kDim / 64;

  static __device__ __forceinline__ int key_element(int c, int piece) {
    return 64 * (piece / 2) + 16 * c + 8 * (piece % 2);
  }
  static __device__ __forceinline__ int value_element(int g, int word) {
    return 64 * (word / 4) + 8 * g + 2 * (word % 4);
  }
  __device__ __forceinline__ uint32_t key(int half, int piece) const {
    return place(this->keys, this->g() + 8 * half, piece / 2, 2 * this->c() + piece % 2);
  }
  __device__ __forceinline__ uint32_t value(int i, int piece) const {
    return place(this->values, this->value_token(i), piece, this->g());
  }

 private:
  static __device__ __forceinline__ uint32_t place(uint32_t at, int token, int line, int piece) {
    return at + (line * kBlockTokens + token) * 128 + (piece ^ token % 8) * 16;
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

// The kernel's dynamic shared memory. kSteps: as key_steps of DecodeGrid.
template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
struct DecodeShared {
  static constexpr int kQueryPitch = kDim % 64 == 0 ? kDim + 8 : 96;  // elements
  static constexpr int kKeyStages = Kv::kTensorCopies ? kSteps : 1;
  static constexpr int kStepBytes = kStepBlocks * Kv::kBytes;  // of keys, and of values
  static constexpr int kLandingBytes = (kKeyStages + 1) * kStepBytes;
  // A warp's own: first what it reads, then what it has found.
  union alignas(1024) {
    unsigned char landing[kWarps][kLandingBytes];
    struct {
      float out[kMaxGroup][kDim + 8];
      unsigned char rest[kLandingBytes - sizeof(float) * kMaxGroup * (kDim + 8)];
    } found[kWarps];
  };
  alignas(16) T query[kMaxGroup][kQueryPitch];
  alignas(16) T newest[2][kDim];  // the newest token's key and value
  alignas(16) float4 peer_out[kCluster > 1 ? kMaxGroup * kDim / 4 + kCluster : 1];
  float2 peer_stats[kCluster][kMaxGroup];
  float2 stats[kWarps][kMaxGroup];
  alignas(8) uint64_t landed[kWarps][kKeyStages + 1];  // barriers of a warp's keys, and of its values
  uint64_t peers_done;
  int ticket;
};

// Registers of a thread: blocks whose shared memory leaves room for a decode matmul of few rows beside them on a
// multiprocessor do so, too; single blocks of short heads leave room for three of their kind.
template <int kDim, int kSteps>
constexpr int kDecodeRegisters = kSteps == 1  ? 120
                                 : kDim <= 64 ? 128
                                              : 168;

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
class DecodeBlock {
 public:
  using Shared = DecodeShared<T, Kv, kDim, kWarps, kCluster, kSteps>;

  __device__ __forceinline__ DecodeBlock(const Decode& args, const CUtensorMap& tiles, Shared& shared)
      : args_(args),
        tiles_(tiles),
        shared_(shared),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {
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
      open_landing();
      clear_unused_queries();
      attend(split, true);
      while (kCluster == 1 && split.next >= 0) {
        const int empties = split.empties;
        split = load_split(split.next);
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
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRowFours = kDim / 4;  // float4s of one head's output
  static constexpr int kKeyWords = Kv::kKeyWords;
  static constexpr int kValueWords = Kv::kValueWords;
  static constexpr int kStepsPerTable = 32 / kStepBlocks;
  static constexpr int kKeyStages = Shared::kKeyStages;

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

  // What this warp's first row needs beside the projection: weights, which need not be waited for.
  struct RowWeights {
    Pair bias, norm;
    float2 cosine = {1.0f, 1.0f}, sine = {0.0f, 0.0f};
  };

  // Rows of a split: its query heads, then the newest key and the newest value.
  __device__ __forceinline__ int head_of_row(const Split& split, int row) const {
    return row < args_.group ? split.kv_head * args_.group + row
                             : args_.q_heads + split.kv_head + (row == args_.group ? 0 : args_.kv_heads);
  }

  __device__ __forceinline__ RowWeights row_weights(const Split& split, int row) const {
    RowWeights weights;
    if (!args_.writes) return weights;
    if (args_.bias != nullptr) {
      weights.bias = load_pair(static_cast<const T*>(args_.bias) + head_of_row(split, row) * kDim);
    }
    if (row > args_.group) return weights;  // values are neither normed nor turned
    const auto* norm = static_cast<const T*>(row < args_.group ? args_.q_norm_weight : args_.k_norm_weight);
    if (norm != nullptr) weights.norm = load_pair(norm);
    if (has_pair()) {
      const float2* angles =
          reinterpret_cast<const float2*>(args_.cos_sin + static_cast<int64_t>(split.length - 1) * kDim);
      weights.cosine = __ldg(angles + lane_);
      weights.sine = __ldg(angles + kDim / 4 + lane_);
    }
    return weights;
  }

  // Bias, then RMSNorm over the head, then rotation, in fp32.
  __device__ __forceinline__ Pair turned(const Pair& raw, const RowWeights& weights, bool norms) const {
    using E = Element<T>;
    const float2 cosine = weights.cosine, sine = weights.sine;
    float x0 = E::low(raw.first) + E::low(weights.bias.first), x1 = E::high(raw.first) + E::high(weights.bias.first);
    float y0 = E::low(raw.second) + E::low(weights.bias.second);
    float y1 = E::high(raw.second) + E::high(weights.bias.second);
    if (norms) {
      float squares = x0 * x0 + x1 * x1 + y0 * y0 + y1 * y1;
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(kAllLanes, squares, lanes);
      const float scale = rsqrtf(squares * (1.0f / kDim) + args_.norm_eps);
      x0 *= scale * E::low(weights.norm.first);
      x1 *= scale * E::high(weights.norm.first);
      y0 *= scale * E::low(weights.norm.second);
      y1 *= scale * E::high(weights.norm.second);
    }
    return {E::pack(x0 * cosine.x - y0 * sine.x, x1 * cosine.y - y1 * sine.y),
            E::pack(y0 * cosine.x + x0 * sine.x, y1 * cosine.y + x1 * sine.y)};
  }

  __device__ __forceinline__ int rows_of(const Split& split) const {
    return args_.group + (owns_newest(split) ? 2 : 0);
  }

  __device__ __forceinline__ Pair load_raw(const Split& split, const T* newest_key, int row) const {
    if (row >= rows_of(split)) return {};
    if (!args_.writes && row >= args_.group) {
      return load_pair(newest_key + (row == args_.group ? 0 : args_.value_offset));
    }
    return load_pair(static_cast<const T*>(args_.query) + split.seq * args_.query_stride +
                     head_of_row(split, row) * kDim);
  }

  // Queries, and in one block the newest key and value, into shared memory: a warp a row. `weights` and `raw` are of
  // the warp's first.
  __device__ __forceinline__ void load_rows(const Split& split, T* newest_key, RowWeights weights, Pair raw) {
    for (int row = warp_; row < rows_of(split); row += kWarps) {
      const bool is_query = row < args_.group, is_key = row == args_.group;
      if (row != warp_) {
        raw = load_raw(split, newest_key, row);
        weights = row_weights(split, row);
      }
      if (args_.writes) {
        const bool norms = (is_query ? args_.q_norm_weight : is_key ? args_.k_norm_weight : nullptr) != nullptr;
        raw = turned(raw, weights, norms);
        if (!is_query) store_pair(newest_key + (is_key ? 0 : args_.value_offset), raw);
      }
      store_pair(is_query ? shared_.query[row] : shared_.newest[is_key ? 0 : 1], raw);
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

  __device__ __forceinline__ Merged merge_warps(int four) const {
    const int head = four / kRowFours, element = four % kRowFours * 4;
    return merge<kWarps>([&](int w) { return shared_.stats[w][head]; },
                         [&](int w) { return *reinterpret_cast<const float4*>(&shared_.found[w].out[head][element]); });
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
  const CUtensorMap& tiles_;
  Shared& shared_;
  const int thread_, lane_, warp_;
  int rank_ = 0;
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

// One kernel and the shared memory it asks for.
struct DecodeKernel {
  void (*function)(Decode, CUtensorMap);
  size_t shared_bytes;
};

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
DecodeKernel prepared_decode_kernel() {
  constexpr auto kFunction = decode_kernel<T, Kv, kDim, kWarps, kCluster, kSteps>;
  constexpr size_t kBytes = sizeof(DecodeShared<T, Kv, kDim, kWarps, kCluster, kSteps>);
  allow_shared_bytes<kFunction>(kBytes, Kv::kTensorCopies);
  return {kFunction, kBytes};
}

template <int kDim>
bool has_tensor_copies() {
  if constexpr (kDim % 64 == 0) {
    const Device& device = current_device();
    return device.capability >= 90 &&
           sizeof(DecodeShared<__nv_bfloat16, LineTile<kDim>, kDim, 8, 1, 2>) <= device.shared_bytes;
  }
  return false;
}

// Clusters have eight warps a thread block; single blocks eight, or four where more does not fit.
template <class T, int kDim>
DecodeKernel decode_kernel_of(int cluster, int warps, int key_steps) {
  if constexpr (kDim % 64 == 0) {
    if (has_tensor_copies<kDim>()) {
      using Kv = LineTile<kDim>;
      if (cluster == 1 && warps == 4) return prepared_decode_kernel<T, Kv, kDim, 4, 1, 2>();
      if constexpr (DecodeKernels<kDim>::kOddClusters) {
        if (cluster == 6) return prepared_decode_kernel<T, Kv, kDim, 8, 6, 1>();
        if (cluster == 2 && key_steps == 2) return prepared_decode_kernel<T, Kv, kDim, 8, 2, 2>();
        if (cluster == 3) return prepared_decode_kernel<T, Kv, kDim, 8, 3, 2>();
      }
      return cluster == 8   ? prepared_decode_kernel<T, Kv, kDim, 8, 8, 1>()
             : cluster == 4 ? prepared_decode_kernel<T, Kv, kDim, 8, 4, 1>()
             : cluster == 2 ? prepared_decode_kernel<T, Kv, kDim, 8, 2, 1>()
                            : prepared_decode_kernel<T, Kv, kDim, 8, 1, 2>();
    }
  } else if (cluster > 1) {
    using Kv = LaneTile<kDim>;
    return cluster == 8   ? prepared_decode_kernel<T, Kv, kDim, 8, 8, 1>()
           : cluster == 4 ? prepared_decode_kernel<T, Kv, kDim, 8, 4, 1>()
                          : prepared_decode_kernel<T, Kv, kDim, 8, 2, 2>();
  }
  using Kv = LaneTile<kDim>;
  return warps == 8 ? prepared_decode_kernel<T, Kv, kDim, 8, 1, 2>() : prepared_decode_kernel<T, Kv, kDim, 4, 1, 2>();
}

// Boxes of one KV block of one head.
template <int kDim>
CUtensorMap tile_map(const KvPool& pool, const Decode& args) {
  if constexpr (kDim % 64 == 0) {
    constexpr cuuint64_t kTileBytes = TileShape<kDim>::kBytes;
    const auto tiles = static_cast<cuuint64_t>((pool.num_blocks - 1) * args.block_tiles + 2 * pool.kv_heads);
    return swizzled_map<4>(args.pool, pool.dtype, {64, kBlockTokens, kDim / 64, tiles}, {2 * kDim, 128, kTileBytes},
                           {64, kBlockTokens, kDim / 64, 1});
  }
  return {};
}

template <int kDim>
int DecodeKernels<kDim>::single_warps() {
  constexpr size_t kWanted = sizeof(DecodeShared<__nv_bfloat16, LaneTile<kDim>, kDim, 8, 1, 2>);
  return kDim > 64 && (has_tensor_copies<kDim>() || kWanted <= current_device().shared_bytes) ? 8 : 4;
}

template <int kDim>
void DecodeKernels<kDim>::launch(const KvPool& pool, const DecodeGrid& grid, const Decode& args, const Launch& launch) {
  with_element(pool.dtype, [&]<class T>(T) {
    const DecodeKernel kernel = decode_kernel_of<T, kDim>(grid.cluster, grid.warps, grid.key_steps);
    launch_kernel("paged_attention", kernel.function,
                  {.grid = dim3(grid.clusters * grid.cluster),
                   .block = dim3(grid.warps * 32),
                   .shared_bytes = kernel.shared_bytes,
                   .cluster = grid.cluster},
                  launch, args, has_tensor_copies<kDim>() ? tile_map<kDim>(pool, args) : CUtensorMap{});
  });
}

template <int kDim>
int DecodeKernels<kDim>::resident_clusters(int cluster) {
  const int warps = cluster == 1 ? single_warps() : kClusterWarps;
  const DecodeKernel kernel = decode_kernel_of<__nv_bfloat16, kDim>(cluster, warps, key_steps_of(cluster, kDim, 1));
  int count = 0;
  if (cluster == 1) {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel.function, warps * 32, kernel.shared_bytes),
          "occupancy");
    return count * current_device().multiprocessors;
  }
  cudaLaunchAttribute size;
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster * current_device().multiprocessors);
  config.blockDim = dim3(warps * 32);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.attrs = &size;
  config.numAttrs = 1;
  check(cudaOccupancyMaxActiveClusters(&count, kernel.function, &config), "cluster occupancy");
  return count;
}

}  // namespace octavo::gpu
