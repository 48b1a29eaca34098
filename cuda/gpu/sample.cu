// Sampling. Floor: each logit read once (twice to eight times, mostly from L2, where a row is filtered).
//
// A row without filters is split over several thread blocks; each finds its best (score, id), the row's best is an
// integer maximum, so order does not matter, and the last block to finish writes the token. A filtered row is one
// block's: the cut-off of top-k, then of top-p, is found digit by digit from histograms of the scores' bits, with no
// sort.
#include "octavo/sample.h"

#include <algorithm>
#include <cstring>

#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "octavo/random.h"

namespace octavo::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;
constexpr int kMinPart = 8 * kThreads;  // logits a thread block at least
constexpr unsigned kAll = ~0u;
constexpr uint64_t kUnusable = ~0ull;  // above every packed (score, id)

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

// The larger score wins, and of equal ones the lower id.
__device__ __forceinline__ uint64_t packed(float score, int id) {
  return static_cast<uint64_t>(ordered_key(score)) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ int id_of(uint64_t best) {
  if (best == kUnusable || best == 0) return -1;
  return static_cast<int>(~static_cast<uint32_t>(best));
}

template <class Value, class Combine>
__device__ __forceinline__ Value block_reduce(Value value, const Combine& combine) {
  __shared__ Value of_warp[kWarps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(kAll, value, lanes));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(kAll, value, lanes));
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
  __device__ uint64_t pack() const { return !usable ? kUnusable : id < 0 ? 0 : packed(score, id); }
};

// Calls f(logits[8], first id) over [begin, end) of a row, in all threads equally often: past the end with -inf.
// `begin` is a multiple of 8. Several loads of a thread are in flight at once.
template <class T, class F>
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

template <class T, class Keep>
__device__ uint64_t best_of(const T* logits, int begin, int end, const Sample& sample, const Row& row,
                            const Keep& keep) {
  Best best;
  float bound = lowest();
  for_each_eight(logits, begin, end, sample.aligned, [&](float (&x)[8], int id) {
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
  return block_reduce(best.pack(), [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

// 64-bit sums in shared memory out of native 32-bit atomics: the low word's old value tells of the carry.
struct Histogram {
  uint32_t low[kBins];
  uint32_t high[kBins];

  __device__ void clear() {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) low[bin] = high[bin] = 0;
    __syncthreads();
  }
  __device__ void add(int bin, uint64_t amount) {
    const auto part = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&low[bin], part);
    const uint32_t carry = static_cast<uint32_t>(amount >> 32) + (before + part < before ? 1u : 0u);
    if (carry != 0) atomicAdd(&high[bin], carry);
  }
  __device__ uint64_t at(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }
};

struct Crossing {
  int bin;
  uint64_t rest;  // what is still wanted once the bins above are counted
};

struct FilterShared {
  Histogram histogram;
  Crossing crossing;
};

// The bin at which the sum from the top reaches `target(sum of all)`.
template <class Target>
__device__ Crossing cross(FilterShared& shared, const Target& target) {
  __shared__ uint64_t of_warp[kWarps];
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int upper = kBins - 1 - 2 * threadIdx.x;  // this thread's bins, from the top: upper, then upper - 1
  const uint64_t first = shared.histogram.at(upper), second = shared.histogram.at(upper - 1);
  uint64_t through = first + second;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint64_t other = __shfl_up_sync(kAll, through, lanes);
    if (lane >= lanes) through += other;
  }
  if (lane == 31) of_warp[warp] = through;
  __syncthreads();
  uint64_t before = 0, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  const uint64_t wanted = target(total);
  uint64_t above = before + through - first - second;
  if (above < wanted && wanted <= above + first) shared.crossing = {upper, wanted - above};
  above += first;
  if (above < wanted && wanted <= above + second) shared.crossing = {upper - 1, wanted - above};
  __syncthreads();
  return shared.crossing;
}

// The score at which the sum of `weight(score)` over scores >= floor, from the highest down, reaches `target(sum)`.
// Three rounds over the row, each fixing 11, 11 and 10 bits of the score's ordered key.
template <class T, class Weight, class Target>
__device__ float reach(const T* logits, const Sample& sample, const Row& row, float floor, FilterShared& shared,
                       const Weight& weight, const Target& target) {
  constexpr int kDigits[3] = {11, 11, 10};
  const int vocab = sample.args.vocab;
  uint32_t known = 0;  // the key's leading bits
  uint64_t wanted = 0;
  int shift = 32;
#pragma unroll
  for (int round = 0; round < 3; ++round) {
    const int next = shift - kDigits[round];
    shared.histogram.clear();
    for_each_eight(logits, 0, vocab, sample.aligned, [&](float (&x)[8], int) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float score = row.score(x[k]);
        const uint32_t key = ordered_key(score);
        if (!(score >= floor) || (round > 0 && key >> (shift % 32) != known)) continue;
        const uint64_t amount = weight(score);
        if (amount != 0) shared.histogram.add(key >> next & ((1u << kDigits[round]) - 1), amount);
      }
    });
    const Crossing crossing = cross(shared, [&](uint64_t total) { return round == 0 ? target(total) : wanted; });
    wanted = crossing.rest;
    known = known << kDigits[round] | static_cast<uint32_t>(crossing.bin);
    shift = next;
  }
  return value_of_key(known);
}

template <class T>
__device__ uint64_t best_of_filtered(const T* logits, const Sample& sample, const Row& row) {
  __shared__ FilterShared shared;
  const int vocab = sample.args.vocab;
  float highest = lowest();
  for_each_eight(logits, 0, vocab, sample.aligned, [&](float (&x)[8], int) {
#pragma unroll
    for (int k = 0; k < 8; ++k) highest = fmaxf(highest, row.score(x[k]));
  });
  highest = block_reduce(highest, [](float a, float b) { return fmaxf(a, b); });
  float floor = lowest();
  if (row.top_k > 0) {
    floor = reach(
        logits, sample, row, floor, shared, [](float) { return uint64_t{1}; },
        [&](uint64_t) { return static_cast<uint64_t>(row.top_k); });
  }
  if (row.top_p < 1.0f) {
    floor = reach(
        logits, sample, row, floor, shared, [&](float score) { return fixed_weight(score - highest); },
        [&](uint64_t total) { return top_p_target(row.top_p, total); });
  }
  return best_of(logits, 0, vocab, sample, row, [&](float score) {
    return score >= floor && (row.min_p <= 0.0f || exact_exp(score - highest) >= row.min_p);
  });
}

__device__ void deliver(const SampleArgs& args, int row, uint64_t best) {
  const int token = id_of(best);
  args.tokens[row] = token;
  if (args.newest != nullptr) args.newest[args.targets[row]] = max(token, 0);
}

// blockIdx.x: a part of the row; blockIdx.y: the row.
template <class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Sample sample) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const SampleArgs& args = sample.args;
  const int index = blockIdx.y, part = blockIdx.x, parts = gridDim.x;
  const Row row(args, index);
  const T* logits = static_cast<const T*>(args.logits) + index * args.logits_stride;
  if (row.filtered()) {
    if (part > 0) return;
    const uint64_t best = best_of_filtered(logits, sample, row);
    if (threadIdx.x == 0) deliver(args, index, best);
    return;
  }
  const int length = (args.vocab + 8 * parts - 1) / (8 * parts) * 8;
  const int begin = min(part * length, args.vocab), end = min(begin + length, args.vocab);
  const uint64_t best = best_of(logits, begin, end, sample, row, [](float) { return true; });
  if (threadIdx.x > 0) return;
  if (parts == 1) return deliver(args, index, best);
  auto* shared_best = reinterpret_cast<unsigned long long*>(sample.best + index);
  atomicMax(shared_best, static_cast<unsigned long long>(best));
  if (ptx::take_ticket(sample.tickets + index) < parts - 1) return;
  sample.tickets[index] = 0;
  deliver(args, index, atomicExch(shared_best, 0ull));
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
  with_logits(args.dtype, [&]<class T>(T) {
    launch_kernel("sample", sample_kernel<T>, {.grid = dim3(parts, args.num_rows), .block = dim3(kThreads)},
                  args.launch, sample);
  });
}

}  // namespace octavo::gpu
