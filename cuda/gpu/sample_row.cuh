// One row of logits, how its request samples it, and how a thread block goes over it.
#pragma once

#include <type_traits>

#include "gpu/element.cuh"
#include "gpu/ptx.cuh"
#include "octavo/random.h"
#include "octavo/sample.h"

namespace octavo::gpu::sampling {

constexpr unsigned kAll = ~0u;

__device__ __forceinline__ float lowest() { return -INFINITY; }

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

template <int kThreads, class Value>
__device__ __forceinline__ Value block_max(Value value) {
  return block_reduce<kThreads>(value, [](Value a, Value b) { return a > b ? a : b; });
}

template <int kThreads, class Value>
__device__ __forceinline__ Value block_sum(Value value) {
  return block_reduce<kThreads>(value, [](Value a, Value b) { return a + b; });
}

// What one row is sampled by.
struct Row {
  float inverse_temperature;  // 0: greedy
  int top_k;
  float top_p, min_p;
  uint64_t seed;
  uint32_t position;

  __device__ Row(const SampleArgs& args, int row) : inverse_temperature(0.0f), top_k(0), top_p(1.0f), min_p(0.0f) {
    if (args.temperature == nullptr) return;
    const float temperature = args.temperature[row];  // and all the rest at once: one trip to memory
    top_k = args.top_k[row];
    top_p = args.top_p[row];
    min_p = args.min_p[row];
    seed = args.seeds[row];
    position = static_cast<uint32_t>(args.positions[row]);
    if (top_k >= args.vocab) top_k = 0;
    if (temperature > kGreedyTemperature) inverse_temperature = __fdiv_rn(1.0f, temperature);
  }
  __device__ bool greedy() const { return inverse_temperature == 0.0f; }
  __device__ bool nucleus_of_all() const { return top_k == 0 && top_p < 1.0f; }
  __device__ bool filtered() const { return !greedy() && (top_k > 0 || top_p < 1.0f || min_p > 0.0f); }
  // Never fused with a following addition: the score is a value of its own.
  __device__ float score(float logit) const { return __fmul_rn(logit, inverse_temperature); }
};

// Eight logits as they lie in memory.
template <class T>
struct Raw {
  Eight part[sizeof(T) / 2];

  // That holds logit k, perhaps with another.
  __device__ __forceinline__ uint32_t word(int k) const {
    return sizeof(T) == 4 ? part[k / 4].w[k % 4] : part[0].w[k / 2];
  }
};

// Of the logit with this id from its word: an eight starts at a multiple of eight.
template <class T>
__device__ __forceinline__ float logit_of(uint32_t word, int id) {
  if constexpr (sizeof(T) == 4) {
    return float_of(word);
  } else {
    return id % 2 == 0 ? Element<T>::low(word) : Element<T>::high(word);
  }
}

template <class T>
struct Logits {
  const T* at;
  int vocab;
  bool aligned;  // can be read 16 bytes at a time

  __device__ float operator[](int id) const { return static_cast<float>(at[id]); }

  // Eight from `id`, a multiple of 8; past the end -inf.
  __device__ __forceinline__ void load(float (&x)[8], int id, int end) const { unpack_raw(x, load_raw(id, end)); }

  // How many loads of eight a thread has in flight.
  static constexpr int kManyLoads = sizeof(T) == 4 ? 2 : 4;

  // By chunks of [begin, end), which are kLoads times eight logits a thread: f(x[8], id of x[0], 0 to kLoads - 1) for
  // each load, then after(first id of the chunk), in all threads equally often. `begin` is a multiple of 8. The next
  // chunk is on its way during after().
  template <int kThreads, int kLoads, class F, class After>
  __device__ __forceinline__ void for_each_eight(int begin, int end, const F& f, const After& after) const {
    constexpr int kStride = 8 * kThreads;
    Raw<T> raw[kLoads];
    int own = begin + 8 * static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = load_raw(own + i * kStride, end);
#pragma unroll 1
    for (int first = begin; first < end; first += kLoads * kStride) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i * kStride >= end) break;
        float x[8];
        unpack_raw(x, raw[i]);
        f(x, own + i * kStride, i);
      }
      own += kLoads * kStride;
      if (first + kLoads * kStride < end) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) raw[i] = load_raw(own + i * kStride, end);
      }
      after(first);
    }
  }
  template <int kThreads, int kLoads, class F>
  __device__ __forceinline__ void for_each_eight(int begin, int end, const F& f) const {
    for_each_eight<kThreads, kLoads>(begin, end, [&](float (&x)[8], int id, int) { f(x, id); }, [](int) {});
  }

  // Each chunk twice: f(x[8], i) for each of its loads, between(), then g(the same as Raw, id of the first, i), whose
  // registers are loaded again at once. Meanwhile kAhead more chunks are on their way.
  template <int kThreads, int kLoads, int kAhead, class F, class Between, class G>
  __device__ __forceinline__ void for_each_eight_twice(int begin, int end, const F& f, const Between& between,
                                                       const G& g) const {
    constexpr int kStride = 8 * kThreads, kChunk = kLoads * kStride, kChunks = 1 + kAhead;
    Raw<T> raw[kChunks][kLoads];
    int own = begin + 8 * static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kChunks * kLoads; ++i) raw[i / kLoads][i % kLoads] = load_raw(own + i * kStride, end);
#pragma unroll 1
    for (int first = begin; first < end; first += kChunks * kChunk) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int left = end - first - chunk * kChunk;
        if (left <= 0) break;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (i * kStride >= left) break;
          float x[8];
          unpack_raw(x, raw[chunk][i]);
          f(x, i);
        }
        between();
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (i * kStride >= left) break;
          g(raw[chunk][i], own + i * kStride, i);
          raw[chunk][i] = load_raw(own + i * kStride + kChunks * kChunk, end);
        }
        own += kChunk;
      }
    }
  }

 private:
  // A word of logits that are -inf.
  static constexpr uint32_t kLowest = std::is_same_v<T, float>           ? 0xff800000u
                                      : std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u
                                                                         : 0xfc00fc00u;

  // Word by word: of a memcpy from memory the compiler makes loads of single bytes.
  __device__ __forceinline__ Raw<T> load_raw(int id, int end) const {
    Raw<T> raw;
    if (aligned && id + 8 <= end) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
        const uint4 words = reinterpret_cast<const uint4*>(at + id)[i];
        raw.part[i] = {{words.x, words.y, words.z, words.w}};
      }
    } else if (id >= end) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) raw.part[i] = {{kLowest, kLowest, kLowest, kLowest}};
    } else {
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = id + k < end ? (*this)[id + k] : lowest();
      pack_raw(raw, x);
    }
    return raw;
  }
  static __device__ __forceinline__ void unpack_raw(float (&x)[8], const Raw<T>& raw) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = float_of(raw.part[k / 4].w[k % 4]);
    } else {
      unpack<T>(x, raw.part[0]);
    }
  }
  static __device__ __forceinline__ void pack_raw(Raw<T>& raw, const float (&x)[8]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int k = 0; k < 8; ++k) raw.part[k / 4].w[k % 4] = bits_of(x[k]);
    } else {
      raw.part[0] = pack<T>(x);
    }
  }
};

}  // namespace octavo::gpu::sampling
