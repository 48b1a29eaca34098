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
      : args_(args),
        shared_(shared),
        group_(threadIdx.x / 128 - 1),
        lane_(threadIdx.x % 32),
        token_{row() / args.group, (row() + 8) / args.group},
        all_token_(group_ * kRowsAGroup / args.group) {}

  __device__ __forceinline__ void run() {
    if (!next_item()) return;
    if (group_ == 1) give_turn();
    Stage keys = next_stage();
    wait_for(keys);
    take_turn();
    start_scores(keys);
    give_turn();
    wgmma::wait<0>();
    wgmma::pin(score_);
    release(keys);
    find_base();
    exponentiate<0, kScores>();
    pack_probabilities();
    // The scores of the next tile, be it the next item's first one, beside P V of this one.
    keys = next_stage();
    Stage values = next_stage();
    for (bool begins = true;;) {
      const int buffer = buffer_, valid = context_len_ - tile_ * kKeys;
      const bool ends = ++tile_ == end_;
      const float sum[2] = {sum_[0], sum_[1]}, top[2] = {top_[0], top_[1]};
      if (ends && !next_item()) {
        wait_for(keys);  // no more come: they are the values
        clear_rows_past_context(keys, valid);
        start_sums(keys, !begins);
        wgmma::wait<0>();
        wgmma::pin(out_);
        return finish(buffer, top, sum);
      }
      wait_for(keys);
      wait_for(values);
      if (ends) clear_rows_past_context(values, valid);
      take_turn();
      start_scores(keys);
      start_sums(values, !begins);
      give_turn();
      wgmma::wait<1>();
      wgmma::pin(score_);
      release(keys);
      const bool fades = find_base();
      keys = next_stage();
      exponentiate<0, kEarly>();
      wgmma::pin(score_);
      if (sum_[0] + sum_[1] < 0.0f) __trap();  // never; without a branch here the wait is moved before the softmax
      wgmma::wait<0>();
      wgmma::pin(out_);
      wgmma::pin(p_);
      release(values);
      values = next_stage();
      exponentiate<kEarly, kScores>();
      pack_probabilities();
      if (ends) {
        finish(buffer, top, sum);
      } else if (fades) {
        scale();
      }
      begins = ends;
    }
  }

 private:
  static constexpr int kKeys = Shared::kKeys;
  static constexpr int kLines = Shared::kLines;
  static constexpr int kRowsAGroup = 64;
  static constexpr int kScores = kKeys / 2;  // floats a thread: groups of eight columns, four floats each
  static constexpr int kOutputs = kDim / 2;
  static constexpr int kEarly = 16;  // scores whose exponentials do not wait for P V
  static constexpr unsigned kAll = ~0u;
  using Products = wgmma::Warpgroup<T, kKeys>;  // Q K^T
  using Sums = wgmma::Warpgroup<T, kDim>;       // P V

  __device__ __forceinline__ int in_group() const { return threadIdx.x % 128; }
  // The tile's row of this thread's first half: its second half is eight further on.
  __device__ __forceinline__ int row() const { return group_ * kRowsAGroup + in_group() / 32 * 16 + lane_ / 4; }

  __device__ __forceinline__ void sync_group() const { asm volatile("bar.sync %0,128;" ::"r"(1 + group_) : "memory"); }

  // The warpgroups put their products to the tensor cores in turn, so that one's softmax runs beside the other's.
  __device__ __forceinline__ void take_turn() const { asm volatile("bar.sync %0,256;" ::"r"(4 + group_) : "memory"); }
  __device__ __forceinline__ void give_turn() const { asm volatile("bar.arrive %0,256;" ::"r"(5 - group_) : "memory"); }

  // A tile of keys or values in shared memory, and whether it was there when it was asked for.
  struct Stage {
    int index, parity;
    bool there;
  };

  // The next one. Asked for early, it costs no time. The index comes from one lane, for addresses in uniform registers.
  __device__ __forceinline__ Stage next_stage() {
    const int index = __shfl_sync(kAll, stage_, 0);
    const Stage stage{index, parity_, ptx::phase_is_over(ptx::shared_address(&shared_.full[index]), parity_)};
    if (++stage_ == Shared::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
    return stage;
  }

  __device__ __forceinline__ void wait_for(const Stage& stage) const {
    if (!stage.there) ptx::wait_for_phase(ptx::shared_address(&shared_.full[stage.index]), stage.parity);
  }

  __device__ __forceinline__ void release(const Stage& stage) const {
    if (lane_ == 0) ptx::arrive(ptx::shared_address(&shared_.empty[stage.index]));
  }

  // The next tile of query rows; false: there is none.
  __device__ __forceinline__ bool next_item() {
    buffer_ ^= 1;
    if (buffer_ == 0) query_parity_ ^= 1;
    ptx::wait_for_phase(ptx::shared_address(&shared_.query_full[buffer_]), query_parity_);
    const PrefillItem& item = shared_.item[buffer_];
    if (!item.exists) return false;
    tile_ = item.place.key;
    end_ = item.end;
    context_len_ = item.context_len;
    all_see_ = item.first_limit + all_token_;
    limit_[0] = item.first_limit + token_[0];
    limit_[1] = item.first_limit + token_[1];
    ahead_[0] = token_[0] < item.tokens ? 8.0f : INFINITY;
    ahead_[1] = token_[1] < item.tokens ? 8.0f : INFINITY;
    top_[0] = top_[1] = -INFINITY;
    base_[0] = base_[1] = sum_[0] = sum_[1] = 0.0f;
    return true;
  }

  __device__ __forceinline__ void start_scores(const Stage& stage) {
    const int buffer = __shfl_sync(kAll, buffer_, 0), group = __shfl_sync(kAll, group_, 0);
    const uint32_t query = ptx::shared_address(shared_.query[buffer][0][group * kRowsAGroup]);
    const uint32_t key = ptx::shared_address(shared_.tiles[stage.index]);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint32_t offset = k / 4 * Shared::kKeys * 128 + k % 4 * 32;  // as many rows as keys
      Products::mma(score_, wgmma::k_lines(query, offset), wgmma::k_lines(key, offset), k > 0);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void start_sums(const Stage& stage, bool accumulate) {
    const uint32_t value = ptx::shared_address(shared_.tiles[stage.index]);
    wgmma::pin(out_);
    wgmma::pin(p_);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Sums::mma(out_, p_[k], wgmma::n_lines(value, kKeys * 128, k * 2048), k > 0 || accumulate);
    }
    wgmma::commit();
  }

  // Outputs of an item: most go through shared memory and a tensor copy. Tiles that end with their sequence, and those
  // that are cut, once they are merged, go straight to global memory.
  __device__ __forceinline__ void finish(int buffer, const float (&top)[2], const float (&sum)[2]) {
    const PrefillItem& item = shared_.item[buffer];
    float total[2] = {sum[0], sum[1]};
    const bool stages = item.whole && item.tokens == kPrefillTileRows / args_.group;
    if (item.whole || merge(item.place, top, total)) {
      normalise(total);
      if (stages) {
        stage_rows(buffer);
      } else {
        store_rows(item);
      }
    }
    if (threadIdx.x == 128) shared_.stores[buffer] = stages;
    ptx::publish_shared_stores();
    ptx::arrive(ptx::shared_address(&shared_.out_full[buffer]));  // every lane: racecheck follows no others
  }

  // Probabilities are against a base that follows the running maximum only where that is far ahead (by 2^8: sums are
  // fp32, and 16-bit probabilities are as precise at 256 as at 1), for a whole warp at once: mostly lanes need not hear
  // of each other's maxima. True: what was summed so far fades.
  __device__ __forceinline__ bool find_base() {
    if ((tile_ + 1) * kKeys > all_see_ + 1) mask();
    float highest[2][2] = {{score_[0], score_[1]}, {score_[2], score_[3]}};
#pragma unroll
    for (int i = 4; i < kScores; ++i) highest[i / 2 % 2][i % 2] = fmaxf(highest[i / 2 % 2][i % 2], score_[i]);
    float next[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) next[half] = fmaxf(highest[half][0], highest[half][1]);
    const bool ahead =
        (next[0] - top_[0]) * args_.scale_log2 > ahead_[0] || (next[1] - top_[1]) * args_.scale_log2 > ahead_[1];
    if (!__any_sync(kAll, ahead)) return false;  // NaN, of two infinities, is not
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next[half] = fmaxf(next[half], top_[half]);
      next[half] = fmaxf(next[half], __shfl_xor_sync(kAll, next[half], 1));
      next[half] = fmaxf(next[half], __shfl_xor_sync(kAll, next[half], 2));
      base_[half] = next[half] == -INFINITY ? 0.0f : next[half] * args_.scale_log2;
      fade_[half] = ptx::exp2_fast(top_[half] * args_.scale_log2 - base_[half]);
      top_[half] = next[half];
      sum_[half] *= fade_[half];
    }
    return true;
  }

  template <int kFrom, int kTo>
  __device__ __forceinline__ void exponentiate() {
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) {
      const int half = i / 2 % 2;
      score_[i] = ptx::exp2_fast(score_[i] * args_.scale_log2 - base_[half]);
      sum_[half] += score_[i];
    }
  }

  __device__ __forceinline__ void mask() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = limit_[half] - tile_ * kKeys - 2 * (lane_ % 4);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        if (2 * i > last) score_[i + 2 * half] = -INFINITY;
        if (2 * i + 1 > last) score_[i + 2 * half + 1] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void scale() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out_[i] *= fade_[i / 2 % 2];
  }

  // Two neighbouring groups of eight columns are one A fragment.
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p_[k][i] = Element<T>::pack(score_[8 * k + 2 * i], score_[8 * k + 2 * i + 1]);
    }
  }

  // The pool and stale shared memory hold anything there, NaN too, which times a probability of zero is not zero. Each
  // warpgroup clears all of them for itself.
  __device__ __forceinline__ void clear_rows_past_context(const Stage& stage, int valid) const {
    if (valid >= kKeys) return;
    typename Shared::Keys& values = shared_.tiles[stage.index];
    for (int i = in_group(); i < (kKeys - valid) * 8 * kLines; i += 128) {
      const int row = valid + i / (8 * kLines), piece = i % (8 * kLines);
      *reinterpret_cast<uint4*>(values[piece / 8][row] + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
    ptx::publish_shared_stores();
    sync_group();
  }

  // Leaves this block's part of the tile, or, if it is the last to come, adds up all of them in the order of their
  // keys. The block of the first part has it at the end of its stretch, when the others are mostly there: then that
  // part stays in registers.
  __device__ __forceinline__ bool merge(const PrefillCut& place, const float (&top)[2], float (&sum)[2]) {
    const PrefillParts parts(args_.cuts, place);
    const auto stats = [&](int block) { return args_.stats + (parts.slot(block) * 2 + group_) * 128 + in_group(); };
    const auto outputs = [&](int block, int i) {
      return args_.outputs + ((parts.slot(block) * 2 + group_) * (kOutputs / 4) + i) * 128 + in_group();
    };
    int* ticket = args_.tickets + 2 * parts.first + group_;
    const int block = blockIdx.x, others = parts.last - parts.first;
    float4 first = make_float4(top[0], top[1], sum[0], sum[1]);
    const bool holds_first = block == parts.first;
    if (in_group() == 0) shared_.last[group_] = holds_first && ptx::load_acquire(ticket) == others;
    sync_group();
    if (!shared_.last[group_]) {
      *stats(block) = first;
#pragma unroll
      for (int i = 0; i < kOutputs / 4; ++i) {
        *outputs(block, i) = make_float4(out_[4 * i], out_[4 * i + 1], out_[4 * i + 2], out_[4 * i + 3]);
      }
      sync_group();  // the ticket releases what others than its taker have stored, too
      if (in_group() == 0) shared_.last[group_] = ptx::take_ticket(ticket) == others;
      sync_group();
      if (!shared_.last[group_]) return false;
      if (!holds_first) {
        first = __ldcg(stats(parts.first));
#pragma unroll
        for (int i = 0; i < kOutputs / 4; ++i) {
          const float4 four = __ldcg(outputs(parts.first, i));
          out_[4 * i] = four.x;
          out_[4 * i + 1] = four.y;
          out_[4 * i + 2] = four.z;
          out_[4 * i + 3] = four.w;
        }
      }
    }
    if (in_group() == 0) *ticket = 0;
    float highest[2] = {first.x, first.y};
    for (int from = parts.first + 1; from <= parts.last; ++from) {
      const float4 theirs = __ldcg(stats(from));
      highest[0] = fmaxf(highest[0], theirs.x);
      highest[1] = fmaxf(highest[1], theirs.y);
    }
    const float own[2] = {part_weight(first.x, highest[0]), part_weight(first.y, highest[1])};
    sum[0] = first.z * own[0];
    sum[1] = first.w * own[1];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out_[i] *= own[i / 2 % 2];
    for (int from = parts.first + 1; from <= parts.last; ++from) {
      const float4 theirs = __ldcg(stats(from));
      const float weight[2] = {part_weight(theirs.x, highest[0]), part_weight(theirs.y, highest[1])};
      sum[0] += theirs.z * weight[0];
      sum[1] += theirs.w * weight[1];
#pragma unroll
      for (int i = 0; i < kOutputs / 4; ++i) {
        const float4 four = __ldcg(outputs(from, i));
        out_[4 * i] += four.x * weight[0];
        out_[4 * i + 1] += four.y * weight[0];
        out_[4 * i + 2] += four.z * weight[1];
        out_[4 * i + 3] += four.w * weight[1];
      }
    }
    return true;
  }

  // A part whose keys a row does not see has a maximum of minus infinity.
  __device__ __forceinline__ float part_weight(float theirs, float top) const {
    return theirs == -INFINITY ? 0.0f : ptx::exp2_fast((theirs - top) * args_.scale_log2);
  }

  __device__ __forceinline__ void normalise(const float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(kAll, total, 1);
      total += __shfl_xor_sync(kAll, total, 2);
      const float inverse = total > 0.0f ? 1.0f / total : 0.0f;  // an empty context gives zeros
#pragma unroll
      for (int i = 2 * half; i < kOutputs; i += 4) {
        out_[i] *= inverse;
        out_[i + 1] *= inverse;
      }
    }
  }

  // Into the query rows' place, from where a tensor copy takes them to global memory.
  __device__ __forceinline__ void stage_rows(int buffer) const {
    const int row = group_ * kRowsAGroup + in_group() / 32 * 16 + lane_ % 16;
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = Element<T>::pack(out_[8 * pair + 2 * i], out_[8 * pair + 2 * i + 1]);
      ptx::store_matrices(ptx::shared_address(piece_of<kDim>(shared_.query[buffer], row, 2 * pair + lane_ / 16)),
                          packed);
    }
  }

  __device__ __forceinline__ void store_rows(const PrefillItem& item) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (token_[half] >= item.tokens) continue;
      const int head = item.place.head * args_.group + row() + 8 * half - token_[half] * args_.group;
      T* to = static_cast<T*>(args_.out) +
              (static_cast<int64_t>(item.first_token + token_[half]) * args_.q_heads + head) * kDim + 2 * (lane_ % 4);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        *reinterpret_cast<uint32_t*>(to + 8 * i) = Element<T>::pack(out_[4 * i + 2 * half], out_[4 * i + 2 * half + 1]);
      }
    }
  }

  const Prefill& args_;
  Shared& shared_;
  const int group_, lane_;
  const int token_[2], all_token_;  // of the tile's tokens, those of this thread's rows and of the warpgroup's first

  // Of the item whose scores are computed.
  int buffer_ = 1, query_parity_ = 1;
  int tile_, end_, context_len_;
  int all_see_;     // the last key that every row of the warpgroup sees
  int limit_[2];    // that this thread's rows see
  float ahead_[2];  // of rows past the tile's end, which hold anything: infinity
  float top_[2], base_[2], sum_[2], fade_[2];

  int stage_ = 0, parity_ = 0;
  float score_[kScores], out_[kOutputs];
  uint32_t p_[kKeys / 16][4];
};
#endif

}  // namespace octavo::gpu
