// What a warpgroup of prefill attention by stretches does with 64 query rows: scores, softmax, P V, and merging with
// other blocks.
#pragma once

#include <cmath>

#include "gpu/element.cuh"
#include "gpu/prefill_shared.cuh"
#include "gpu/ptx.cuh"
#include "gpu/wgmma.cuh"

namespace octavo::gpu {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <class T, int kDim>
class PrefillConsumer {
 public:
  using Shared = StretchShared<kDim>;

  __device__ __forceinline__ PrefillConsumer(const Prefill& args, Shared& shared)
      : args_(args), shared_(shared), group_(threadIdx.x / 128 - 1), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    int buffer = 0, parity = 0;
    if (group_ == 1) give_turn();
    while (true) {
      ptx::wait_for_phase(ptx::shared_address(&shared_.query_full[buffer]), parity);
      const PrefillItem& item = shared_.item[buffer];
      if (!item.exists) return;
      all_see_ = item.limit(args_.group, group_ * kRowsAGroup);
      limit_[0] = item.limit(args_.group, row());
      limit_[1] = item.limit(args_.group, row() + 8);
      multiply(item, buffer);
      if (buffer == 1) parity ^= 1;
      buffer ^= 1;
    }
  }

 private:
  static constexpr int kKeys = Shared::kKeys;
  static constexpr int kStages = Shared::kStages;
  static constexpr int kLines = Shared::kLines;
  static constexpr int kRowsAGroup = 64;
  static constexpr int kScores = kKeys / 2;  // floats a thread: groups of eight columns, four floats each
  static constexpr int kOutputs = kDim / 2;
  static constexpr unsigned kAll = ~0u;
  using Products = wgmma::Warpgroup<T, kKeys>;  // Q K^T
  using Sums = wgmma::Warpgroup<T, kDim>;       // P V

  __device__ __forceinline__ int in_group() const { return threadIdx.x % 128; }
  // The tile's row of this thread's first half: its second half is eight further on.
  __device__ __forceinline__ int row() const { return group_ * kRowsAGroup + in_group() / 32 * 16 + lane_ / 4; }

  // The warpgroups put their products to the tensor cores in turn, so that one's softmax runs beside the other's.
  __device__ __forceinline__ void take_turn() const { asm volatile("bar.sync %0,256;" ::"r"(4 + group_) : "memory"); }
  __device__ __forceinline__ void give_turn() const { asm volatile("bar.arrive %0,256;" ::"r"(5 - group_) : "memory"); }
  __device__ __forceinline__ void sync_group() const { asm volatile("bar.sync %0,128;" ::"r"(1 + group_) : "memory"); }

  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  __device__ __forceinline__ void release(uint64_t* barrier) const {
    if (lane_ == 0) ptx::arrive(ptx::shared_address(barrier));
  }

  __device__ __forceinline__ void multiply(const PrefillItem& item, int buffer) {
    const int first = item.place.key, end = item.end;
    float score[kScores], out[kOutputs];
    uint32_t p[kKeys / 16][4];
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, fade[2];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    if (first < end) {
      ptx::wait_for_phase(ptx::shared_address(&shared_.key_full[stage_]), parity_);
      take_turn();
      start_scores(score, buffer, stage_);
      give_turn();
      wgmma::wait<0>();
      wgmma::pin(score);
      release(&shared_.key_empty[stage_]);
      softmax(score, first, top, sum, fade);
      pack_probabilities(p, score);
      for (int tile = first + 1; tile < end; ++tile) {
        const int value_stage = stage_, value_parity = parity_;
        advance();
        ptx::wait_for_phase(ptx::shared_address(&shared_.key_full[stage_]), parity_);
        take_turn();
        start_scores(score, buffer, stage_);
        ptx::wait_for_phase(ptx::shared_address(&shared_.value_full[value_stage]), value_parity);
        start_sums(out, p, value_stage);
        give_turn();
        wgmma::wait<1>();
        wgmma::pin(score);
        release(&shared_.key_empty[stage_]);
        const bool fades = softmax(score, tile, top, sum, fade);
        wgmma::wait<0>();
        wgmma::pin(out);
        wgmma::pin(p);
        release(&shared_.value_empty[value_stage]);
        pack_probabilities(p, score);
        if (fades) scale(out, fade);
      }
      ptx::wait_for_phase(ptx::shared_address(&shared_.value_full[stage_]), parity_);
      clear_rows_past_context(shared_.value[stage_], item.context_len - (end - 1) * kKeys);
      start_sums(out, p, stage_);
      wgmma::wait<0>();
      wgmma::pin(out);
      release(&shared_.value_empty[stage_]);
      advance();
    }
    const bool stores = item.whole || merge(item.place, out, top, sum);
    if (stores) write(out, sum, buffer);
    if (in_group() == 0) shared_.stores[buffer][group_] = stores;
    ptx::arrive(ptx::shared_address(&shared_.out_full[buffer]));
  }

  __device__ __forceinline__ void start_scores(float (&score)[kScores], int buffer, int stage) const {
    const uint32_t query = ptx::shared_address(shared_.query[buffer][0][group_ * kRowsAGroup]);
    const uint32_t key = ptx::shared_address(shared_.key[stage]);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint32_t line = k / 4 * Shared::kRows * 128, in_line = k % 4 * 32;
      Products::mma(score, wgmma::k_lines(query + line + in_line), wgmma::k_lines(key + line + in_line), k > 0);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void start_sums(float (&out)[kOutputs], uint32_t (&p)[kKeys / 16][4], int stage) const {
    const uint32_t value = ptx::shared_address(shared_.value[stage]);
    wgmma::pin(out);
    wgmma::pin(p);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Sums::mma(out, p[k], wgmma::n_lines(value + k * 2048, kKeys * 128), true);
    }
    wgmma::commit();
  }

  // Probabilities against a maximum that follows the running one only where that is far ahead (by 2^8: sums are fp32,
  // and 16-bit probabilities are as precise at 256 as at 1). True: what was summed so far fades.
  __device__ __forceinline__ bool softmax(float (&score)[kScores], int tile, float (&top)[2], float (&sum)[2],
                                          float (&fade)[2]) const {
    constexpr float kAhead = 8.0f;
    if ((tile + 1) * kKeys > all_see_ + 1) mask(score, tile);
    bool fades = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = score[2 * half];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        highest = fmaxf(highest, fmaxf(score[i + 2 * half], score[i + 2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, 2));
      const bool ahead = (highest - top[half]) * args_.scale_log2 > kAhead;  // NaN, of two infinities, is not
      const float next = ahead ? highest : top[half];
      const float base = next == -INFINITY ? 0.0f : next * args_.scale_log2;
      fade[half] = ahead ? ptx::exp2_fast(top[half] * args_.scale_log2 - base) : 1.0f;
      top[half] = next;
      fades |= ahead;
      sum[half] *= fade[half];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int k = 2 * half; k < 2 * half + 2; ++k) {
          score[i + k] = ptx::exp2_fast(score[i + k] * args_.scale_log2 - base);
          sum[half] += score[i + k];
        }
      }
    }
    return __any_sync(kAll, fades);
  }

  __device__ __forceinline__ void mask(float (&score)[kScores], int tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = limit_[half] - tile * kKeys - 2 * (lane_ % 4);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        if (2 * i > last) score[i + 2 * half] = -INFINITY;
        if (2 * i + 1 > last) score[i + 2 * half + 1] = -INFINITY;
      }
    }
  }

  static __device__ __forceinline__ void scale(float (&out)[kOutputs], const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= by[i / 2 % 2];
  }

  // Two neighbouring groups of eight columns are one A fragment.
  static __device__ __forceinline__ void pack_probabilities(uint32_t (&p)[kKeys / 16][4],
                                                            const float (&score)[kScores]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[k][i] = Element<T>::pack(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
    }
  }

  // The pool and stale shared memory hold anything there, NaN too, which times a probability of zero is not zero. Both
  // warpgroups clear, and wait for each other.
  __device__ __forceinline__ void clear_rows_past_context(typename Shared::Keys& values, int valid) const {
    if (valid >= kKeys) return;
    const int consumer = threadIdx.x - 128;
    for (int i = consumer; i < (kKeys - valid) * 8 * kLines; i += 256) {
      const int row = valid + i / (8 * kLines), piece = i % (8 * kLines);
      *reinterpret_cast<uint4*>(values[piece / 8][row] + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
    ptx::publish_shared_stores();
    asm volatile("bar.sync 3,256;" ::: "memory");
  }

  // Leaves this block's part of the tile, and if it is the last to come takes all of them, in the order of their keys.
  __device__ __forceinline__ bool merge(const PrefillCut& place, float (&out)[kOutputs], float (&top)[2],
                                        float (&sum)[2]) const {
    const PrefillParts parts(args_.cuts, place);
    const auto stats = [&](int block) { return args_.stats + (parts.slot(block) * 2 + group_) * 128 + in_group(); };
    const auto outputs = [&](int block, int i) {
      return args_.outputs + ((parts.slot(block) * 2 + group_) * (kOutputs / 4) + i) * 128 + in_group();
    };
    const int block = blockIdx.x;
    *stats(block) = make_float4(top[0], top[1], sum[0], sum[1]);
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      *outputs(block, i) = make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    }
    __threadfence();
    sync_group();
    int* ticket = args_.tickets + 2 * parts.first + group_;
    if (in_group() == 0) {
      const bool last = ptx::take_ticket(ticket) == parts.last - parts.first;
      if (last) *ticket = 0;
      shared_.last[group_] = last;
    }
    sync_group();
    if (!shared_.last[group_]) return false;
    __threadfence();
    top[0] = top[1] = -INFINITY;
    for (int from = parts.first; from <= parts.last; ++from) {
      const float4 theirs = __ldcg(stats(from));
      top[0] = fmaxf(top[0], theirs.x);
      top[1] = fmaxf(top[1], theirs.y);
    }
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    for (int from = parts.first; from <= parts.last; ++from) {
      const float4 theirs = __ldcg(stats(from));
      const float weight[2] = {part_weight(theirs.x, top[0]), part_weight(theirs.y, top[1])};
      sum[0] += theirs.z * weight[0];
      sum[1] += theirs.w * weight[1];
#pragma unroll
      for (int i = 0; i < kOutputs / 4; ++i) {
        const float4 four = __ldcg(outputs(from, i));
        out[4 * i] += four.x * weight[0];
        out[4 * i + 1] += four.y * weight[0];
        out[4 * i + 2] += four.z * weight[1];
        out[4 * i + 3] += four.w * weight[1];
      }
    }
    return true;
  }

  // A part whose keys a row does not see has a maximum of minus infinity.
  __device__ __forceinline__ float part_weight(float theirs, float top) const {
    return theirs == -INFINITY ? 0.0f : ptx::exp2_fast((theirs - top) * args_.scale_log2);
  }

  // Into the query rows' place, from where other warps take them to global memory.
  __device__ __forceinline__ void write(const float (&out)[kOutputs], const float (&sum)[2], int buffer) const {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(kAll, total, 1);
      total += __shfl_xor_sync(kAll, total, 2);
      inverse[half] = total > 0.0f ? 1.0f / total : 0.0f;  // an empty context gives zeros
    }
    const int row = group_ * kRowsAGroup + in_group() / 32 * 16 + lane_ % 16;
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = inverse[i % 2];
        packed[i] = Element<T>::pack(out[8 * pair + 2 * i] * by, out[8 * pair + 2 * i + 1] * by);
      }
      ptx::store_matrices(ptx::shared_address(piece_of<kDim>(shared_.query[buffer], row, 2 * pair + lane_ / 16)),
                          packed);
    }
  }

  const Prefill& args_;
  Shared& shared_;
  const int group_, lane_;
  int all_see_;   // the last key that every row of the warpgroup sees
  int limit_[2];  // that this thread's rows see
  int stage_ = 0, parity_ = 0;
};
#endif

}  // namespace octavo::gpu
