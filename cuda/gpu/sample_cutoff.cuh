// The score at which a sum over many scores, from the highest down, reaches a target: exactly, without sorting them.
//
// A source of scores has `each(f)`, which calls f(score) for all of them, spread over the block's threads. Every level
// spreads the range in which the cut-off lies over kBins bins and goes on with the bin that holds it, until its scores
// are few or all equal.
#pragma once

#include "gpu/sample_row.cuh"

namespace octavo::gpu::sampling {

constexpr int kBins = 1024;

// Of scores, both ends included.
struct Range {
  float high, low;
  __device__ bool holds(float score) const { return low <= score && score <= high; }
};

// Bins fall with the score. Over a first, wide range they are of equal width in score; further down of equal width in
// the ordered key, so that each level fixes at least nine of its bits, whatever the scores are.
class Bins {
 public:
  __device__ Bins(Range range, bool by_key)
      : high_(range.high),
        scale_(kBins / (range.high - range.low)),
        by_key_(by_key),
        high_key_(ordered_key(range.high)) {
    shift_ = max(0, 32 - __clz(high_key_ - ordered_key(range.low)) - 10);
  }
  __device__ int of(float score) const {
    if (by_key_) return static_cast<int>((high_key_ - ordered_key(score)) >> shift_);
    const float below = __fadd_rz((high_ - score) * scale_, 0x1p23f);  // faster than a conversion
    return min(static_cast<int>(bits_of(below) - bits_of(0x1p23f)), kBins - 1);
  }
  // A score below all those of a bin that is of equal width in score.
  __device__ float below(int bin) const { return high_ - static_cast<float>(bin + 1) / scale_; }

 private:
  float high_, scale_;
  bool by_key_;
  uint32_t high_key_;
  int shift_;
};
static_assert(kBins == 1 << 10);

// 64-bit sums in shared memory out of native 32-bit atomics: the low word's old value tells of the carry.
template <int kThreads>
struct alignas(8) Histogram {
  uint32_t low[kBins];
  uint32_t high[kBins];

  __device__ void clear() {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) low[bin] = high[bin] = 0;
  }
  __device__ void add(int bin, uint32_t amount) { atomicAdd(&low[bin], amount); }  // sums below 2^32
  __device__ void add(int bin, uint64_t amount) {
    const auto part = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&low[bin], part);
    const uint32_t carry = static_cast<uint32_t>(amount >> 32) + (before + part < before ? 1u : 0u);
    if (carry != 0) atomicAdd(&high[bin], carry);
  }
  __device__ uint64_t at(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }
};

// What a sum is to reach, as far as that is known.
struct Target {
  uint64_t least, most;

  __device__ Target(uint64_t least, uint64_t most) : least(least), most(most) {}
  __device__ explicit Target(uint64_t exact) : Target(exact, exact) {}
};

// Where a sum over bins reaches its target.
struct Crossing {
  int bin;          // of the least target; -1: it is not reached
  int last_bin;     // of the most, likewise
  uint64_t above;   // the sum over the bins above `bin`
  uint64_t amount;  // its own
};

template <int kThreads>
__device__ __forceinline__ Histogram<kThreads>& histogram() {
  __shared__ Histogram<kThreads> of_block;
  return of_block;
}

// Sums over the warp's lanes up to and with the own.
__device__ __forceinline__ uint64_t warp_scan(uint64_t value) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint64_t other = __shfl_up_sync(kAll, value, lanes);
    if (threadIdx.x % 32 >= lanes) value += other;
  }
  return value;
}

// Where the sum from bin 0 on reaches `target(sum of all)`.
template <int kThreads, class F>
__device__ Crossing cross(const F& target) {
  __shared__ uint64_t of_warp[kThreads / 32];
  __shared__ Crossing crossing;
  constexpr int kWarps = kThreads / 32, kEach = kBins / kThreads;
  static_assert(kBins % kThreads == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = kEach * threadIdx.x;
  uint64_t mine[kEach];
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    mine[i] = histogram<kThreads>().at(first + i);
    own += mine[i];
  }
  const uint64_t through = warp_scan(own);
  if (lane == 31) of_warp[warp] = through;
  if (threadIdx.x == 0) crossing.bin = crossing.last_bin = -1;
  __syncthreads();
  const uint64_t warps = warp_scan(of_warp[lane % kWarps]);  // right up to lane kWarps - 1
  const uint64_t total = __shfl_sync(kAll, warps, kWarps - 1), before = __shfl_sync(kAll, warps, max(warp - 1, 0));
  const Target wanted = target(total);
  uint64_t above = (warp > 0 ? before : 0) + through - own;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint64_t with = above + mine[i];
    if (above < wanted.least && wanted.least <= with) {
      crossing.bin = first + i;
      crossing.above = above;
      crossing.amount = mine[i];
    }
    if (above < wanted.most && wanted.most <= with) crossing.last_bin = first + i;
    above = with;
  }
  __syncthreads();
  return crossing;
}

// That of all of the block's threads.
template <int kThreads>
__device__ Range block_range(Range range) {
  constexpr int kWarps = kThreads / 32;
  __shared__ uint32_t highs[kWarps], lows[kWarps];
  const uint32_t high = __reduce_max_sync(kAll, ordered_key(range.high));
  const uint32_t low = __reduce_min_sync(kAll, ordered_key(range.low));
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    highs[threadIdx.x / 32] = high;
    lows[threadIdx.x / 32] = low;
  }
  __syncthreads();
  return {value_of_key(__reduce_max_sync(kAll, highs[threadIdx.x % kWarps])),
          value_of_key(__reduce_min_sync(kAll, lows[threadIdx.x % kWarps]))};
}

template <int kThreads, class Source, class Within>
__device__ Range range_of(const Source& source, const Within& within) {
  Range range{lowest(), INFINITY};
  source.each([&](float score) {
    if (!within(score)) return;
    range.high = fmaxf(range.high, score);
    range.low = fminf(range.low, score);
  });
  return block_range<kThreads>(range);
}

// The sum of weight(score) over the source's scores of a range, bin by bin.
template <int kThreads, class Source, class Weight>
__device__ void fill(const Source& source, Range range, const Bins& bins, const Weight& weight) {
  __syncthreads();
  histogram<kThreads>().clear();
  __syncthreads();
  source.each([&](float score) {
    if (!range.holds(score)) return;
    const auto amount = weight(score);  // 64 bits, or 32 if their sum fits in there
    if (amount != 0) histogram<kThreads>().add(bins.of(score), amount);
  });
  __syncthreads();
}

// The scores of a bin, in the memory of the histogram, which has served by then.
struct Few {
  static constexpr int kMost = 256;
  uint64_t weights[kMost];
  float scores[kMost];
  int count;  // more than kMost: not all are here
};

template <int kThreads>
__device__ __forceinline__ Few& few() {
  static_assert(sizeof(Few) <= sizeof(Histogram<kThreads>) && alignof(Few) <= alignof(Histogram<kThreads>));
  return reinterpret_cast<Few&>(histogram<kThreads>());
}

// Collects those for which within(score); gives their range.
template <int kThreads, class Source, class Within>
__device__ Range collect(const Source& source, const Within& within) {
  if (threadIdx.x == 0) few<kThreads>().count = 0;
  __syncthreads();
  return range_of<kThreads>(source, [&](float score) {
    const bool found = within(score);
    if (found) {
      const int place = atomicAdd(&few<kThreads>().count, 1);
      if (place < Few::kMost) few<kThreads>().scores[place] = score;
    }
    return found;
  });
}

// A score with the sum over all scores >= it.
struct Reached {
  float score;
  uint64_t through;
};

// Where the sum of weight(score) reaches `wanted`, given that it does so among the collected scores and that it is
// `above` over all higher ones. A warp takes one score after the other, and adds up what is above and what is equal.
template <int kThreads, class Weight>
__device__ Reached find_among_few(const Weight& weight, uint64_t above, uint64_t wanted) {
  __shared__ Reached reached;
  Few& all = few<kThreads>();
  const int lane = threadIdx.x % 32, count = all.count;
  for (int i = threadIdx.x; i < count; i += kThreads) all.weights[i] = weight(all.scores[i]);
  __syncthreads();
  for (int i = threadIdx.x / 32; i < count; i += kThreads / 32) {
    const float own = all.scores[i];
    uint64_t higher = 0, equal = 0;
    bool again = false;  // an earlier one is equal
    for (int k = lane; k < count; k += 32) {
      const float other = all.scores[k];
      const uint64_t amount = all.weights[k];
      higher += other > own ? amount : 0;
      equal += other == own ? amount : 0;
      again |= other == own && k < i;
    }
    if (__any_sync(kAll, again)) continue;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      higher += __shfl_xor_sync(kAll, higher, lanes);
      equal += __shfl_xor_sync(kAll, equal, lanes);
    }
    higher += above;
    if (lane == 0 && higher < wanted && wanted <= higher + equal) reached = {own, higher + equal};
  }
  __syncthreads();
  return reached;
}

struct Cutoff {
  enum { kNone, kUnsure, kFound } state;  // kUnsure: there is one by the least target, by the most there is none
  float score;                            // by the least target
  float low;                              // not above that by the most
};

// Where the sum of weight(score) over the scores of a range reaches target(sum of all).
template <int kThreads, class Source, class Weight, class F>
__device__ Cutoff find_cutoff(const Source& source, Range range, const Weight& weight, const F& target) {
  Target wanted(0);
  uint64_t above = 0;
  float low = 0.0f;
  for (int level = 0;; ++level) {
    const Bins bins(range, level > 0);
    fill<kThreads>(source, range, bins, weight);
    const Crossing crossing = cross<kThreads>([&](uint64_t total) {
      if (level > 0) return Target(wanted.least - above);
      return wanted = target(total);
    });
    if (level == 0) {
      if (crossing.bin < 0) return {Cutoff::kNone, lowest(), lowest()};
      if (crossing.last_bin < 0) return {Cutoff::kUnsure, lowest(), lowest()};
      low = bins.below(crossing.last_bin + 1);
    }
    above += crossing.above;
    range =
        collect<kThreads>(source, [&](float score) { return range.holds(score) && bins.of(score) == crossing.bin; });
    Reached reached{range.high, above + crossing.amount};
    if (range.high > range.low) {
      if (few<kThreads>().count > Few::kMost) continue;
      reached = find_among_few<kThreads>(weight, above, wanted.least);
    }
    return {Cutoff::kFound, reached.score, wanted.most <= reached.through ? reached.score : low};
  }
}

}  // namespace octavo::gpu::sampling
