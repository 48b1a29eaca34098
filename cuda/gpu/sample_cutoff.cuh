// The score at which a sum over many scores, from the highest down, reaches a target: exactly, without sorting them.
//
// A source of scores has `each(f)`, which calls f(score) for all of them, spread over the block's threads. Every level
// spreads the range in which the cut-off lies over kBins bins and goes on with the bin that holds it, until all its
// scores are equal.
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
    const float below = (high_ - score) * scale_;
    return below < static_cast<float>(kBins - 1) ? static_cast<int>(below) : kBins - 1;
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
struct Histogram {
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

struct Crossing {
  int bin;          // -1: the target is not reached
  uint64_t above;   // the sum over the bins above it
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

// The bin at which the sum from bin 0 on reaches `target(sum of all)`.
template <int kThreads, class Target>
__device__ Crossing cross(const Target& target) {
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
  if (threadIdx.x == 0) crossing.bin = -1;
  __syncthreads();
  const uint64_t warps = warp_scan(of_warp[lane % kWarps]);  // right up to lane kWarps - 1
  const uint64_t total = __shfl_sync(kAll, warps, kWarps - 1), before = __shfl_sync(kAll, warps, max(warp - 1, 0));
  const uint64_t wanted = target(total);
  uint64_t above = (warp > 0 ? before : 0) + through - own;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (above < wanted && wanted <= above + mine[i]) crossing = {first + i, above, mine[i]};
    above += mine[i];
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

struct Cutoff {
  bool found;
  float score;
  uint64_t through;  // the sum over all scores >= it
};

// Where the sum of weight(score) over the scores of a range reaches target(sum of all).
template <int kThreads, class Source, class Weight, class Target>
__device__ Cutoff find_cutoff(const Source& source, Range range, const Weight& weight, const Target& target) {
  uint64_t wanted = 0, above = 0;
  for (int level = 0;; ++level) {
    const Bins bins(range, level > 0);
    fill<kThreads>(source, range, bins, weight);
    const Crossing crossing = cross<kThreads>([&](uint64_t total) {
      if (level == 0) wanted = target(total);
      return wanted - above;
    });
    if (crossing.bin < 0) return {false, lowest(), 0};
    above += crossing.above;
    range =
        range_of<kThreads>(source, [&](float score) { return range.holds(score) && bins.of(score) == crossing.bin; });
    if (range.high == range.low) return {true, range.high, above + crossing.amount};
  }
}

}  // namespace octavo::gpu::sampling
