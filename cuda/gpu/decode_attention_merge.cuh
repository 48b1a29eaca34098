// From what a decode attention's warps have found to its output: merged over the warps of a block, the blocks of a
// cluster, and the parts of a long context.
#pragma once

#include "gpu/decode_attention_rows.cuh"

namespace octavo::gpu {

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

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
class DecodeMerge : protected DecodeRows<T, Kv, kDim, kWarps, kCluster, kSteps> {
 protected:
  using Rows = DecodeRows<T, Kv, kDim, kWarps, kCluster, kSteps>;
  using Rows::args_, Rows::shared_, Rows::thread_, Rows::rank_, Rows::kThreads;
  using Rows::Rows;
  using typename Rows::Shared;

  static constexpr int kRowFours = kDim / 4;  // float4s of one head's output

  __device__ __forceinline__ int fours() const { return args_.group * kRowFours; }
  // Of a cluster's outputs, each block finishes an equal stretch.
  __device__ __forceinline__ int fours_a_block() const { return (fours() + kCluster - 1) / kCluster; }

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
      ptx::arrive_relaxed_at_cluster_barrier();
    }
#endif
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
};

}  // namespace octavo::gpu
