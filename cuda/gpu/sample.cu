// Sampling. Floor: each logit read once (twice to eight times, mostly from L2, where a row is filtered).
//
// A row without filters is split over several thread blocks; each finds its best (score, id), the row's best is an
// integer maximum, so order does not matter, and the last block to finish writes the token. A filtered row is one
// block's: a coarse histogram tells in which bin top-k, then top-p, cuts off, and that bin alone is sorted.
#include "octavo/sample.h"

#include <algorithm>
#include <cstring>

#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "octavo/random.h"

namespace octavo::gpu {
namespace {

constexpr int kMinPart = 8 * 1024;  // logits a thread block at least
constexpr unsigned kAll = ~0u;

struct Sample {
  SampleArgs args;
  uint64_t* best;  // [num_rows], zero between launches
  int* tickets;    // [num_rows], zero between launches
  bool aligned;    // rows can be read 16 bytes at a time
};

__device__ __forceinline__ float lowest() { return -INFINITY; }

// Eight logits as they lie in memory.
template <class T>
struct alignas(16) Raw {
  uint4 words[sizeof(T) / 2];
};

template <class T>
__device__ __forceinline__ void unpack_logits(float (&x)[8], const Raw<T>& raw) {
  if constexpr (sizeof(T) == 4) {
    memcpy(x, &raw, sizeof(x));
  } else {
    unpack<T>(x, reinterpret_cast<const Eight&>(raw));
  }
}

template <class T>
__device__ __forceinline__ void load_one_by_one(float (&x)[8], const T* row, int id, int end) {
#pragma unroll
  for (int k = 0; k < 8; ++k) x[k] = id + k < end ? static_cast<float>(row[id + k]) : lowest();
}

__device__ __forceinline__ int id_of(uint64_t best) {
  if (best == kUnusableScore || best == 0) return -1;
  return static_cast<int>(~static_cast<uint32_t>(best));
}

// In all of the block's threads, which are a power of two of warps.
template <int kThreads, class Value, class Combine>
__device__ __forceinline__ Value block_reduce(Value value, const Combine& combine) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Value of_warp[kWarps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(kAll, value, lanes));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % kWarps];
#pragma unroll
  for (int lanes = kWarps / 2; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(kAll, value, lanes));
  return value;
}

// What one row is sampled by.
struct Row {
  float inverse_temperature;  // 0: greedy
  int top_k;
  float top_p, min_p;
  uint64_t seed;
  uint32_t position;

  __device__ Row(const SampleArgs& args, int row) : inverse_temperature(0.0f), top_k(0), top_p(1.0f), min_p(0.0f) {
    const float temperature = args.temperature != nullptr ? args.temperature[row] : 0.0f;
    if (temperature <= kGreedyTemperature) return;
    inverse_temperature = __fdiv_rn(1.0f, temperature);
    top_k = args.top_k[row];
    if (top_k >= args.vocab) top_k = 0;
    top_p = args.top_p[row];
    min_p = args.min_p[row];
    seed = args.seeds[row];
    position = static_cast<uint32_t>(args.positions[row]);
  }
  __device__ bool greedy() const { return inverse_temperature == 0.0f; }
  __device__ bool filtered() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
  // Never fused with a following addition: the score is a value of its own.
  __device__ float score(float logit) const { return __fmul_rn(logit, inverse_temperature); }
};

// Best (score + noise, id) of a stretch of a row, as one thread sees it.
struct Best {
  float score = lowest();
  int id = -1;
  bool usable = true;

  __device__ void offer(float candidate, int candidate_id) {
    if (candidate > score) {
      score = candidate;
      id = candidate_id;
    }
  }
  __device__ uint64_t pack() const { return !usable ? kUnusableScore : id < 0 ? 0 : packed_score(score, id); }
};

// Calls f(logits[8], first id) over [begin, end) of a row, in all threads equally often: past the end with -inf.
// `begin` is a multiple of 8. Several loads of a thread are in flight at once.
template <int kThreads, class T, class F>
__device__ __forceinline__ void for_each_eight(const T* row, int begin, int end, bool aligned, const F& f) {
  constexpr int kAtOnce = sizeof(T) == 4 ? 2 : 4;
  constexpr int kStride = 8 * kThreads;
  for (int first = begin; first < end; first += kAtOnce * kStride) {
    Raw<T> raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kStride + 8 * threadIdx.x;
      if (aligned && id + 8 <= end) raw[i] = *reinterpret_cast<const Raw<T>*>(row + id);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kStride >= end) break;
      const int id = first + i * kStride + 8 * threadIdx.x;
      float x[8];
      if (aligned && id + 8 <= end) {
        unpack_logits(x, raw[i]);
      } else {
        load_one_by_one(x, row, id, end);
      }
      f(x, id);
    }
  }
}

// Adds the noise of four scores and offers them. Most are turned down before the noise is worked out exactly: it is at
// most 22.9, and no more than -log(uniform). `bound` is a score that some thread has reached.
template <class Keep>
__device__ __forceinline__ void offer_noisy(Best& best, float bound, const float* scores, int id, const Row& row,
                                            const Keep& keep) {
  const float highest = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
  if (!(highest + 23.0f > bound)) return;
  const FourWords words = philox(row.seed, row.position, static_cast<uint32_t>(id) / 4);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (scores[k] == lowest()) continue;
    // exp(score - bound), with a margin for what is not exact here. No bound yet: infinity.
    const float limit = bound == lowest() ? INFINITY : __expf(scores[k] - bound) * 1.001f;
    if (!(uniform(words.word[k]) <= limit)) continue;
    if (keep(scores[k])) best.offer(__fadd_rn(scores[k], gumbel(words.word[k])), id + k);
  }
}

template <int kThreads, class T, class Keep>
__device__ uint64_t best_of(const T* logits, int begin, int end, const Sample& sample, const Row& row,
                            const Keep& keep) {
  Best best;
  float bound = lowest();
  for_each_eight<kThreads>(logits, begin, end, sample.aligned, [&](float (&x)[8], int id) {
#pragma unroll
    for (int k = 0; k < 8; ++k) best.usable &= x[k] < INFINITY;  // false for NaN too
    if (row.greedy()) {
#pragma unroll
      for (int k = 0; k < 8; ++k) best.offer(x[k], id + k);
      return;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = row.score(x[k]);
    offer_noisy(best, bound, x, id, row, keep);
    offer_noisy(best, fmaxf(bound, best.score), x + 4, id + 4, row, keep);
    bound = value_of_key(__reduce_max_sync(kAll, ordered_key(best.score)));
  });
  return block_reduce<kThreads>(best.pack(), [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

// 64-bit sums in shared memory out of native 32-bit atomics: the low word's old value tells of the carry.
template <int kThreads, int kBins>
struct Histogram {
  uint32_t low[kBins];
  uint32_t high[kBins];

  __device__ void clear() {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) low[bin] = high[bin] = 0;
  }
  __device__ void add(int bin, uint64_t amount) {
    const auto part = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&low[bin], part);
    const uint32_t carry = static_cast<uint32_t>(amount >> 32) + (before + part < before ? 1u : 0u);
    if (carry != 0) atomicAdd(&high[bin], carry);
  }
  __device__ uint64_t at(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }
};

// A row's scores, coarsely: bins of an eighth, from the highest score down; the last takes all the rest. Most scores of
// a row lie close together, so the bins are counted in several copies, or atomics would queue up at a few of them.
constexpr int kCoarse = 256;
constexpr int kCopies = 8;
constexpr int kDigit = 2048;  // bins of one round of `reach`: 11 bits of a key
constexpr int kListed = 4096;

__device__ __forceinline__ int coarse_bin(float score, float highest) {
  const float below = (highest - score) * 8.0f;  // never decreases as the score falls
  return below < static_cast<float>(kCoarse - 1) ? static_cast<int>(below) : kCoarse - 1;
}

struct Crossing {
  int rank;       // -1: the target is not reached
  uint64_t rest;  // what is still wanted once everything above the rank is counted
};

template <int kThreads>
struct FilterShared {
  union {
    struct {
      Histogram<kThreads, kCopies * kCoarse> weights;
      uint32_t counts[kCopies * kCoarse];
    } survey;
    Histogram<kThreads, kDigit> digits;
  };
  uint32_t counts[kCoarse];
  uint64_t weights[kCoarse];
  float list[kListed];
  int listed;  // more than kListed: the list is not all of the bin
  Crossing crossing;
};

// The rank at which the sum of value(0), value(1), ... reaches `target(sum of all)`; ranks go up to kARound a thread.
template <int kARound, int kThreads, class Value, class Target>
__device__ Crossing cross(FilterShared<kThreads>& shared, const Value& value, const Target& target) {
  constexpr int kWarps = kThreads / 32;
  __shared__ uint64_t of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t mine[kARound];
  uint64_t through = 0;
#pragma unroll
  for (int i = 0; i < kARound; ++i) {
    mine[i] = value(kARound * threadIdx.x + i);
    through += mine[i];
  }
  uint64_t own = through;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint64_t other = __shfl_up_sync(kAll, through, lanes);
    if (lane >= lanes) through += other;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = through;
  if (threadIdx.x == 0) shared.crossing = {-1, 0};
  __syncthreads();
  uint64_t before = 0, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  const uint64_t wanted = target(total);
  uint64_t above = before + through - own;
#pragma unroll
  for (int i = 0; i < kARound; ++i) {
    if (above < wanted && wanted <= above + mine[i]) {
      shared.crossing = {static_cast<int>(kARound * threadIdx.x) + i, wanted - above};
    }
    above += mine[i];
  }
  __syncthreads();
  return shared.crossing;
}

// The score at which the sum of weight(score) over the scores that `each` gives, from the highest down, reaches
// `wanted`. Three rounds, each fixing 11, 11 and 10 bits of the score's ordered key.
template <int kThreads, class Each, class Weight>
__device__ float reach(FilterShared<kThreads>& shared, uint64_t wanted, const Each& each, const Weight& weight) {
  constexpr int kBits[3] = {11, 11, 10};
  uint32_t known = 0;  // the key's leading bits
  int shift = 32;
#pragma unroll
  for (int round = 0; round < 3; ++round) {
    const int next = shift - kBits[round];
    __syncthreads();
    shared.digits.clear();
    __syncthreads();
    each([&](float score) {
      const uint32_t key = ordered_key(score);
      if (round > 0 && key >> (shift % 32) != known) return;
      const uint64_t amount = weight(score);
      if (amount != 0) shared.digits.add(key >> next & ((1u << kBits[round]) - 1), amount);
    });
    __syncthreads();
    const Crossing crossing = cross<kDigit / kThreads>(
        shared, [&](int rank) { return shared.digits.at(kDigit - 1 - rank); }, [&](uint64_t) { return wanted; });
    wanted = crossing.rest;
    known = known << kBits[round] | static_cast<uint32_t>(kDigit - 1 - crossing.rank);
    shift = next;
  }
  return value_of_key(known);
}

// What top-k and top-p keep of a row, by one thread block.
template <int kThreads, class T>
class Filter {
 public:
  __device__ Filter(const T* logits, const Sample& sample, const Row& row, FilterShared<kThreads>& shared)
      : logits_(logits), sample_(sample), row_(row), shared_(shared) {
    float highest = lowest();
    each_score([&](float score) { highest = fmaxf(highest, score); });
    highest_ = block_reduce<kThreads>(highest, [](float a, float b) { return fmaxf(a, b); });
  }

  __device__ float highest() const { return highest_; }

  // The lowest score that stays.
  __device__ float floor() {
    survey();
    float floor = lowest();
    if (row_.top_k > 0) {
      const Crossing crossing = cross<1>(
          shared_, [&](int bin) { return bin < kCoarse ? uint64_t{shared_.counts[bin]} : 0; },
          [&](uint64_t) { return static_cast<uint64_t>(row_.top_k); });
      if (crossing.rank >= 0) {
        floor = within(crossing, floor, [](float) { return uint64_t{1}; });
        drop_weights_below(floor, crossing.rank);
      }
    }
    if (row_.top_p < 1.0f) {
      const Crossing crossing = cross<1>(
          shared_, [&](int bin) { return bin < kCoarse ? shared_.weights[bin] : 0; },
          [&](uint64_t total) { return top_p_target(row_.top_p, total); });
      if (crossing.rank >= 0) floor = within(crossing, floor, [&](float score) { return weight(score); });
    }
    return floor;
  }

 private:
  __device__ uint64_t weight(float score) const { return fixed_weight(score - highest_); }

  // All scores but those that nobody can draw.
  template <class F>
  __device__ void each_score(const F& f) const {
    for_each_eight<kThreads>(logits_, 0, sample_.args.vocab, sample_.aligned, [&](float (&x)[8], int) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float score = row_.score(x[k]);
        if (score > lowest()) f(score);
      }
    });
  }

  __device__ void survey() {
    auto& copies = shared_.survey;
    copies.weights.clear();
    for (int i = threadIdx.x; i < kCopies * kCoarse; i += kThreads) copies.counts[i] = 0;
    __syncthreads();
    const int copy = threadIdx.x / 32 % kCopies * kCoarse;
    const bool counted = row_.top_k > 0, weighed = row_.top_p < 1.0f;
    each_score([&](float score) {
      const int bin = copy + coarse_bin(score, highest_);
      if (counted) atomicAdd(&copies.counts[bin], 1u);
      const uint64_t amount = weighed ? weight(score) : 0;
      if (amount != 0) copies.weights.add(bin, amount);
    });
    __syncthreads();
    for (int bin = threadIdx.x; bin < kCoarse; bin += kThreads) {
      uint32_t count = 0;
      uint64_t sum = 0;
      for (int i = 0; i < kCopies; ++i) {
        count += copies.counts[i * kCoarse + bin];
        sum += copies.weights.at(i * kCoarse + bin);
      }
      shared_.counts[bin] = count;
      shared_.weights[bin] = sum;
    }
    __syncthreads();
  }

  // The exact score at which the crossing's rest is reached among the scores >= floor of its bin.
  template <class Weight>
  __device__ float within(const Crossing& crossing, float floor, const Weight& weight) {
    const auto belongs = [&](float score) { return coarse_bin(score, highest_) == crossing.rank && score >= floor; };
    if (threadIdx.x == 0) shared_.listed = 0;
    __syncthreads();
    each_score([&](float score) {
      if (!belongs(score)) return;
      const int place = atomicAdd(&shared_.listed, 1);
      if (place < kListed) shared_.list[place] = score;
    });
    __syncthreads();
    if (shared_.listed > kListed) {
      const auto each = [&](const auto& f) {
        each_score([&](float score) {
          if (belongs(score)) f(score);
        });
      };
      return reach(shared_, crossing.rest, each, weight);
    }
    sort_list();
    const Crossing in_list = cross<kListed / kThreads>(
        shared_, [&](int rank) { return rank < shared_.listed ? weight(shared_.list[rank]) : uint64_t{0}; },
        [&](uint64_t) { return crossing.rest; });
    return shared_.list[in_list.rank];
  }

  // Bitonic, highest first, up to the next power of two.
  __device__ void sort_list() {
    __syncthreads();
    int size = 2;
    while (size < shared_.listed) size *= 2;
    for (int i = shared_.listed + threadIdx.x; i < size; i += kThreads) shared_.list[i] = lowest();
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
      for (int apart = run / 2; apart > 0; apart /= 2) {
        for (int i = threadIdx.x; i < size / 2; i += kThreads) {
          const int low = i / apart * 2 * apart + i % apart, high = low + apart;
          const float a = shared_.list[low], b = shared_.list[high];
          const bool falling = (low & run) == 0;
          if (falling ? a < b : a > b) {
            shared_.list[low] = b;
            shared_.list[high] = a;
          }
        }
        __syncthreads();
      }
    }
  }

  // Top-p is of what top-k kept: `bin` is the one that holds its floor.
  __device__ void drop_weights_below(float floor, int bin) {
    uint64_t kept = 0;
    const auto count = [&](float score) {
      if (score >= floor && coarse_bin(score, highest_) == bin) kept += weight(score);
    };
    if (shared_.listed <= kListed) {
      for (int i = threadIdx.x; i < shared_.listed; i += kThreads) count(shared_.list[i]);
    } else {
      each_score(count);
    }
    kept = block_reduce<kThreads>(kept, [](uint64_t a, uint64_t b) { return a + b; });
    for (int i = bin + threadIdx.x; i < kCoarse; i += kThreads) shared_.weights[i] = i == bin ? kept : 0;
    __syncthreads();
  }

  const T* logits_;
  const Sample& sample_;
  const Row& row_;
  FilterShared<kThreads>& shared_;
  float highest_;
};

template <int kThreads, class T>
__device__ uint64_t best_of_filtered(const T* logits, const Sample& sample, const Row& row) {
  __shared__ FilterShared<kThreads> shared;
  Filter<kThreads, T> filter(logits, sample, row, shared);
  const float highest = filter.highest();
  const float floor = row.top_k > 0 || row.top_p < 1.0f ? filter.floor() : lowest();
  return best_of<kThreads>(logits, 0, sample.args.vocab, sample, row, [&](float score) {
    return score >= floor && (row.min_p <= 0.0f || exact_exp(score - highest) >= row.min_p);
  });
}

__device__ unsigned long long* best_of_row(const SampleArgs& args, int row) {
  return reinterpret_cast<unsigned long long*>(args.best + row);
}

__device__ void deliver(const SampleArgs& args, int row, uint64_t best) {
  const int token = id_of(best);
  args.tokens[row] = token;
  if (args.newest != nullptr) args.newest[args.targets[row]] = max(token, 0);
}

// blockIdx.x: a part of the row; blockIdx.y: the row.
template <int kThreads, class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Sample sample) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const SampleArgs& args = sample.args;
  const int index = blockIdx.y, part = blockIdx.x, parts = gridDim.x;
  const Row row(args, index);
  const T* logits = static_cast<const T*>(args.logits) + index * args.logits_stride;
  if (row.greedy() && args.best != nullptr) {
    if (part == 0 && threadIdx.x == 0) deliver(args, index, atomicExch(best_of_row(args, index), 0ull));
    return;
  }
  if (row.filtered()) {
    if (part > 0) return;
    const uint64_t best = best_of_filtered<kThreads>(logits, sample, row);
    if (threadIdx.x == 0) deliver(args, index, best);
    return;
  }
  const int length = (args.vocab + 8 * parts - 1) / (8 * parts) * 8;
  const int begin = min(part * length, args.vocab), end = min(begin + length, args.vocab);
  const uint64_t best = best_of<kThreads>(logits, begin, end, sample, row, [](float) { return true; });
  if (threadIdx.x > 0) return;
  if (parts == 1) return deliver(args, index, best);
  auto* shared_best = reinterpret_cast<unsigned long long*>(sample.best + index);
  atomicMax(shared_best, static_cast<unsigned long long>(best));
  if (ptx::take_ticket(sample.tickets + index) < parts - 1) return;
  sample.tickets[index] = 0;
  deliver(args, index, atomicExch(shared_best, 0ull));
}

template <int kThreads, class T>
void launch(const Sample& sample, dim3 grid) {
  launch_kernel("sample", sample_kernel<kThreads, T>, {.grid = grid, .block = dim3(kThreads)}, sample.args.launch,
                sample);
}

template <class F>
void with_logits(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) return f(float{});
  with_element(dtype, f);
}

}  // namespace

size_t sample_workspace_bytes(int32_t max_rows) {
  return static_cast<size_t>(max_rows) * (sizeof(uint64_t) + sizeof(int));
}

void sample(const SampleArgs& args) {
  if (args.num_rows == 0) return;
  require(args.vocab > 0 && args.logits_stride >= args.vocab, "sample: rows of logits overlap");
  require(args.num_rows <= 65535, "sample: more than 65535 rows");
  require(args.workspace != nullptr && args.workspace_bytes >= sample_workspace_bytes(args.num_rows),
          "sample: workspace too small");
  const int64_t row_bytes = args.logits_stride * (args.dtype == DType::kFloat32 ? 4 : 2);
  const bool aligned = row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
  // Tickets behind the results of as many rows as the workspace has room for: one layout for every batch size.
  const size_t rows = args.workspace_bytes / (sizeof(uint64_t) + sizeof(int));
  auto* best = static_cast<uint64_t*>(args.workspace);
  const Sample sample{args, best, reinterpret_cast<int*>(best + rows), aligned};
  const int wanted = std::max(1, 2 * current_device().multiprocessors / args.num_rows);
  const int parts = std::clamp(args.vocab / kMinPart, 1, wanted);
  const dim3 grid(parts, args.num_rows);
  // Up to a row a multiprocessor each gets a whole one's threads; beyond that two rows share one.
  const bool crowded = args.num_rows > current_device().multiprocessors;
  with_logits(args.dtype, [&]<class T>(T) { crowded ? launch<512, T>(sample, grid) : launch<1024, T>(sample, grid); });
}

}  // namespace octavo::gpu
