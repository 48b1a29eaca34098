// Which token of a row wins: the largest logit, or the largest score with its noise.
#pragma once

#include "gpu/ptx.cuh"
#include "gpu/sample_row.cuh"

namespace octavo::gpu::sampling {

// The largest logit of [begin, end), packed with its id; in all threads.
template <int kThreads, class T>
__device__ uint64_t largest_logit(const Logits<T>& logits, int begin, int end) {
  float largest = lowest();
  int id = -1;
  bool usable = true;
  logits.template for_each_eight<kThreads, Logits<T>::kManyLoads>(begin, end, [&](float (&x)[8], int first) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      usable &= x[k] < INFINITY;  // false for NaN too
      if (x[k] > largest) {
        largest = x[k];
        id = first + k;
      }
    }
  });
  return block_max<kThreads>(!usable ? kUnusableScore : id < 0 ? uint64_t{0} : packed_score(largest, id));
}

// The winner among the scores a thread is offered. Noise costs most of a draw, so what the whole block has found turns
// others down before theirs is worked out: noise is at most 22.9, and no more than -log(uniform).
class Draw {
 public:
  // In all of the block's threads, one draw at a time.
  __device__ explicit Draw(Row row) : row_(row) {
    if (threadIdx.x == 0) found() = 0;
    __syncthreads();
  }

  __device__ uint64_t best() const { return best_; }

  __device__ __forceinline__ void offer(float score, int id) {
    const Bound bound(found());
    if (!bound.within_reach(score)) return;
    const FourWords words = philox(row_.seed, row_.position, static_cast<uint32_t>(id) / 4);
    const uint32_t low = id % 2 == 0 ? words.word[0] : words.word[1];
    const uint32_t high = id % 2 == 0 ? words.word[2] : words.word[3];
    add_noise(bound, score, id, id % 4 < 2 ? low : high);
  }

  // Of four tokens from `id`, a multiple of 4; -inf for one that is not offered.
  __device__ __forceinline__ void offer_four(const float (&scores)[4], int id) {
    const Bound bound(found());
    const FourWords words = philox(row_.seed, row_.position, static_cast<uint32_t>(id) / 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) add_noise(bound, scores[k], id + k, words.word[k]);
  }

  // Of eight tokens from `id`, a multiple of 8, which fours may hold the winner: bit 0 and bit 1. `highest`: no score
  // of a four is higher.
  __device__ __forceinline__ uint32_t promising(const float (&highest)[2], int id) const {
    const Bound bound(found());
    if (!bound.within_reach(fmaxf(highest[0], highest[1]))) return 0;
    uint32_t fours = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const FourWords words = philox(row_.seed, row_.position, static_cast<uint32_t>(id) / 4 + i);
      const uint32_t smallest = min(min(words.word[0], words.word[1]), min(words.word[2], words.word[3]));
      fours |= bound.excludes(highest[i], smallest) ? 0u : 1u << i;
    }
    return fours;
  }

 private:
  // A noisy score that some thread has reached; NaN, of which every comparison is false, before there is one.
  struct Bound {
    float score, slack;  // of what is not exact here

    __device__ explicit Bound(const uint32_t& found)
        : score(value_of_key(*const_cast<const volatile uint32_t*>(&found))),
          slack(fmaf(fabsf(score), 0x1p-22f, 1e-3f)) {}
    __device__ bool within_reach(float other) const { return !(other + (23.0f + slack) < score); }
    __device__ bool excludes(float other, uint32_t word) const { return uniform(word) > __expf(other - score + slack); }
  };

  __device__ __forceinline__ void add_noise(const Bound& bound, float score, int id, uint32_t word) {
    if (score == lowest() || bound.excludes(score, word)) return;
    const uint64_t drawn = packed_score(__fadd_rn(score, gumbel(word)), id);
    if (drawn <= best_) return;
    best_ = drawn;
    atomicMax(&found(), static_cast<uint32_t>(drawn >> 32));
  }

  // The key of the best score with noise, 0 before the first.
  static __device__ uint32_t& found() {
    __shared__ uint32_t of_block;
    return of_block;
  }

  Row row_;
  uint64_t best_ = 0;
};

// The token drawn from what `keep` keeps of [begin, end), packed with its noisy score; in all threads.
template <int kThreads, int kLoads, class T, class Keep>
__device__ uint64_t draw_from_row(const Logits<T>& logits, int begin, int end, const Row& row, const Keep& keep) {
  Draw draw(row);
  const auto score_of = [&](int id) {
    const float score = id < end ? row.score(logits[id]) : lowest();
    return keep(score) ? score : lowest();
  };
  // One token a thread first, or all tokens of the first chunk would look promising.
  const int first_id = begin + 8 * static_cast<int>(threadIdx.x);
  draw.offer(score_of(first_id), first_id);
  __syncthreads();
  bool usable = true;
  uint32_t promising = 0;  // of the chunk's groups of four
  logits.template for_each_eight<kThreads, kLoads>(
      begin, end,
      [&](float (&x)[8], int id, int i) {
        float highest[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* four = x + 4 * half;
          const float largest = ptx::max_or_nan(ptx::max_or_nan(four[0], four[1]), ptx::max_or_nan(four[2], four[3]));
          usable &= largest < INFINITY;
          highest[half] = row.score(largest);
        }
        promising |= draw.promising(highest, id) << (2 * i);
      },
      [&](int first) {
        for (; promising != 0; promising &= promising - 1) {
          const int group = __ffs(static_cast<int>(promising)) - 1;
          const int id = first + 8 * (group / 2 * kThreads + static_cast<int>(threadIdx.x)) + group % 2 * 4;
          float scores[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) scores[k] = score_of(id + k);
          draw.offer_four(scores, id);
        }
      });
  return block_max<kThreads>(usable ? draw.best() : kUnusableScore);
}

}  // namespace octavo::gpu::sampling
