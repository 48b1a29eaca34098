// The rows that decode attention turns itself: queries, and the newest token's key and value. They need their bias,
// norm and rotation, and go to shared memory, the newest to the pool as well.
#pragma once

#include "gpu/decode_attention_shared.cuh"
#include "gpu/element.cuh"

namespace octavo::gpu {

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
class DecodeRows : protected DecodeThread<T, Kv, kDim, kWarps, kCluster, kSteps> {
 protected:
  using Thread = DecodeThread<T, Kv, kDim, kWarps, kCluster, kSteps>;
  using Thread::args_, Thread::shared_, Thread::thread_, Thread::lane_, Thread::warp_, Thread::rank_, Thread::kThreads;
  using Thread::Thread;
  using typename Thread::Shared;

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
};

}  // namespace octavo::gpu
