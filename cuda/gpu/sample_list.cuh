// The scores at the top of a row that its filters must look at closely, and what is known of the rest.
//
// A sample of the row tells about where its few thousand highest scores start. One reading of the row then lists all
// above that bound, and adds up the weights of the others approximately.
#pragma once

#include <cfloat>

#include "gpu/ptx.cuh"
#include "gpu/sample_cutoff.cuh"

namespace octavo::gpu::sampling {

constexpr float kLog2E = 1.4426950408889634f;

struct Listed {
  uint32_t word;  // of its logit, see logit_of; then its score
  int id;

  __device__ float score() const { return float_of(word); }
};

// In the block's shared memory, its dynamic part: in no particular order.
struct List {
  int capacity;

  __device__ Listed* entries() const {
    extern __shared__ uint64_t list_memory[];
    return reinterpret_cast<Listed*>(list_memory);
  }
  // More than capacity: not all are listed.
  __device__ int& count() const {
    __shared__ int of_block;
    return of_block;
  }
};

template <int kThreads>
struct ListedScores {
  List list;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    const int count = list.count();
    for (int i = threadIdx.x; i < count; i += kThreads) f(list.entries()[i].score());
  }
};

// From where scores are listed. A score's depth is its distance from there in powers of two, negative below; as a
// rounded value it never falls as the score rises, so that what is listed is decided by scores alone.
class ListBound {
 public:
  ListBound() = default;
  __device__ static ListBound at(float score) {
    const float bound = fminf(fmaxf((score - (fabsf(score) + 1.0f) * 1e-6f) * kLog2E, -FLT_MAX), FLT_MAX);
    return {kLog2E, bound != 0.0f ? bound : -1e-30f};  // so that 0 and -0 are as deep
  }
  // Every finite score.
  __device__ static ListBound everything() { return {0.5f, -FLT_MAX}; }

  // So much would be listed that it is no use.
  __device__ static ListBound nothing() { return {0.0f, 0.0f}; }

  __device__ bool is_nothing() const { return scale_ == 0.0f; }
  __device__ bool is_everything() const { return scale_ == 0.5f; }
  __device__ float depth(float score) const { return fmaf(score, scale_, -bound_); }
  __device__ bool lists(float depth) const { return bits_of(depth) >> 31 == 0; }
  __device__ double score() const { return static_cast<double>(bound_) / kLog2E; }

 private:
  __device__ ListBound(float scale, float bound) : scale_(scale), bound_(bound) {}
  float scale_, bound_;
};

// Of a score below the bound its weight against the bound's, of one above the reciprocal of that: so it adds little to
// a sum, and can be taken off again.
__device__ __forceinline__ float rough_weight(float depth) { return ptx::exp2_fast(-fabsf(depth)); }

// Some of a row's scores, as many in blocks of any size: evenly spaced pieces of 64 bytes, the least that memory reads.
template <int kThreads>
struct SampledScores {
  static constexpr int kSize = 8 * 1024;
  static constexpr int kOwn = kSize / kThreads;
  float scores[kOwn];

  template <class T>
  __device__ SampledScores(const Logits<T>& logits, const Row& row) {
    constexpr uint32_t kEights = 8 / sizeof(T), kPieces = kSize / 8 / kEights;
    const auto pieces = static_cast<uint32_t>(logits.vocab) / 8 / kEights;
#pragma unroll
    for (int i = 0; i < kOwn / 8; ++i) {
      const uint32_t eight = threadIdx.x + i * kThreads;
      const uint32_t place = eight / kEights * pieces / kPieces * kEights + eight % kEights;
      float x[8];
      logits.load(x, 8 * static_cast<int>(place), logits.vocab);
#pragma unroll
      for (int k = 0; k < 8; ++k) scores[8 * i + k] = row.score(x[k]);
    }
  }

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      if (scores[k] > lowest()) f(scores[k]);
    }
  }
};

// The kept scores of min-p are above this, if `highest` is at most the highest.
__device__ __forceinline__ float below_min_p(float highest, float min_p) {
  return highest + logf(min_p) - 0.01f - fabsf(highest) * 1e-6f;
}

// The same in every block that shares a row. A function of its own to save the kernel registers.
template <int kThreads, class T>
__device__ __noinline__ ListBound choose_bound(Logits<T> logits, Row row, int capacity) {
  if (logits.vocab <= capacity) return ListBound::everything();
  const SampledScores<kThreads> sample(logits, row);
  const Range range = range_of<kThreads>(sample, [](float) { return true; });
  const float sampled = static_cast<float>(sample.kSize) / static_cast<float>(logits.vocab);
  float rank = sampled * static_cast<float>(capacity) * 0.75f;
  if (row.top_k > 0) {
    const float expected = sampled * static_cast<float>(row.top_k);
    const float wanted = expected + 5.0f * sqrtf(expected) + 6.0f;  // five standard deviations
    if (wanted > rank) return ListBound::nothing();
    rank = wanted;
  }
  const Bins bins(range, false);
  fill<kThreads>(sample, range, bins, [](float) { return 1u; });
  const Crossing crossing = cross<kThreads>([&](uint64_t) { return Target(static_cast<uint64_t>(rank)); });
  if (crossing.bin < 0) return ListBound::everything();  // most are -inf
  float from = bins.below(crossing.bin);
  if (row.top_k == 0 && row.min_p > 0.0f) from = fmaxf(from, below_min_p(range.high, row.min_p));
  return ListBound::at(from);
}

// Lists the scores of [begin, end) that are above the bound; gives the sum of all rough weights there, NaN where a
// logit is, as one thread sees it.
template <int kThreads, class T>
class Lister {
 public:
  __device__ Lister(Logits<T> logits, Row row, ListBound bound, List list)
      : logits_(logits), row_(row), bound_(bound), list_(list) {}

  __device__ double list(int begin, int end) const {
    double sum = 0.0;
    float chunk_sum = 0.0f;
    uint32_t listed = 0;  // of the chunk's logits that this thread reads
    uint32_t place = 0;   // of the next one
    logits_.template for_each_eight_twice<kThreads, kLoads, kAhead>(
        begin, end,
        [&](float (&x)[8], int i) {
          uint32_t below = 0;
#pragma unroll
          for (int k = 7; k >= 0; --k) {
            const float depth = bound_.depth(row_.score(x[k]));
            x[k] = rough_weight(depth);
            below = __funnelshift_l(bits_of(depth), below, 1);
          }
          listed = (i == 0 ? 0 : listed) | (~below & 0xffu) << (8 * i);
          chunk_sum += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        },
        [&] {
          sum += static_cast<double>(chunk_sum);
          chunk_sum = 0.0f;
          place = reserve(listed);
        },
        [&](const Raw<T>& raw, int id, int i) {
          if (!__any_sync(kAll, (listed & 0xffu << (8 * i)) != 0)) return;
#pragma unroll
          for (int k = 0; k < 8; ++k) store_if(listed & 1u << (8 * i + k), place, raw.word(k), id + k);
        });
    return sum;
  }

 private:
  static constexpr int kLoads = 4, kAhead = sizeof(T) == 4 ? 0 : 1;

  // Where in shared memory this thread's next scores go. With no room for all of the warp's none is listed: the list is
  // of no use then.
  __device__ __forceinline__ uint32_t reserve(uint32_t& listed) const {
    if (!__any_sync(kAll, listed != 0)) return 0;
    const int lane = threadIdx.x % 32, own = __popc(listed);
    int place = own;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int other = __shfl_up_sync(kAll, place, lanes);
      if (lane >= lanes) place += other;
    }
    int start = 0;
    if (lane == 31) start = atomicAdd(&list_.count(), place);
    const int count = __shfl_sync(kAll, place, 31);
    start = __shfl_sync(kAll, start, 31);
    if (start + count > list_.capacity) listed = 0;
    return ptx::shared_address(list_.entries() + (start + place - own));
  }

  // And moves on. Of an if the compiler makes a branch.
  static __device__ __forceinline__ void store_if(uint32_t condition, uint32_t& place, uint32_t word, int id) {
    static_assert(sizeof(Listed) == 8);
    asm volatile(
        "{\n\t.reg .pred stored;\n\tsetp.ne.u32 stored,%1,0;\n\t"
        "@stored st.shared.v2.b32 [%0],{%2,%3};\n\t@stored add.u32 %0,%0,8;\n\t}"
        : "+r"(place)
        : "r"(condition), "r"(word), "r"(id)
        : "memory");
  }

  Logits<T> logits_;
  Row row_;
  ListBound bound_;
  List list_;
};

// Bounds of what the scores that are not listed weigh.
struct Rest {
  uint64_t least, most;
};

// `rough`: the sum of all rough weights, `listed`: of the listed scores' alone, in chains of `chain`. Errors, in 2^-24
// of the sum: of a depth, its product and its score's distance from the highest, which are rounded, as is the bound's;
// `chain`, and 22 for exp2_fast (4), exact_exp (4, twice) and the sums of a chunk (6), and some to spare. Depths are at
// most log2(vocab / sum) on average. Each exact weight is cut to an integer.
__device__ inline Rest rough_rest(double rough, double listed, int chain, const ListBound& bound, float highest,
                                  int vocab) {
  const double sum = fmax(rough - listed, 0.0);
  const float depths = __log2f(static_cast<float>(vocab) / fmaxf(static_cast<float>(sum), 1e-30f)) + 0.01f;
  const auto span = static_cast<float>(highest - bound.score());
  const double error = rough * (2.0f * (depths + span) + 22.0f + static_cast<float>(chain)) * 0x1p-24;
  const double unit = exact_exp(-span) * 0x1p40f;
  return {static_cast<uint64_t>(fmax((sum - error) * unit - vocab, 0.0)),
          static_cast<uint64_t>((sum + error) * unit) + 1};
}

}  // namespace octavo::gpu::sampling
