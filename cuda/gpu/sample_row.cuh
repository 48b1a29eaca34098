// One row of logits, how its request samples it, and how a thread block goes over it.
#pragma once

#include <cstring>

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

// Eight logits as they lie in memory.
template <class T>
struct alignas(16) Raw {
  uint4 words[sizeof(T) / 2];
};

template <class T>
struct Logits {
  const T* at;
  int vocab;
  bool aligned;  // can be read 16 bytes at a time

  __device__ float operator[](int id) const { return static_cast<float>(at[id]); }

  // Eight from `id`, a multiple of 8; past the end -inf.
  __device__ __forceinline__ void load(float (&x)[8], int id, int end) const {
    if (whole(id, end)) {
      unpack_raw(x, *reinterpret_cast<const Raw<T>*>(at + id));
    } else {
      load_one_by_one(x, id, end);
    }
  }

  // Starts to bring up to kAhead bytes from id `begin` on to the L2.
  static constexpr int kAhead = 96 * 1024;
  template <int kThreads>
  __device__ __forceinline__ void prefetch(int begin, int end) const {
    constexpr int kLine = 128 / sizeof(T);
    const int last = min(end, begin + kAhead / static_cast<int>(sizeof(T)));
    for (int id = begin + kLine * threadIdx.x; id < last; id += kLine * kThreads) ptx::prefetch_to_l2(at + id);
  }

  // How many loads of eight a thread has in flight.
  static constexpr int kManyLoads = sizeof(T) == 4 ? 2 : 4;

  // By chunks of [begin, end), which are kLoads times eight logits a thread: f(x[8], id of x[0], 0 to kLoads - 1) for
  // each load, then after(first id of the chunk), in all threads equally often. `begin` is a multiple of 8. The next
  // chunk is on its way during after().
  template <int kThreads, int kLoads, class F, class After>
  __device__ __forceinline__ void for_each_eight(int begin, int end, const F& f, const After& after) const {
    constexpr int kStride = 8 * kThreads;
    Raw<T> raw[kLoads];
    const auto load_chunk = [&](int own) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (whole(own + i * kStride, end)) raw[i] = *reinterpret_cast<const Raw<T>*>(at + own + i * kStride);
      }
    };
    int own = begin + 8 * static_cast<int>(threadIdx.x);
    load_chunk(own);
#pragma unroll 1
    for (int first = begin; first < end; first += kLoads * kStride) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i * kStride >= end) break;
        const int id = own + i * kStride;
        float x[8];
        if (whole(id, end)) {
          unpack_raw(x, raw[i]);
        } else {
          load_one_by_one(x, id, end);
        }
        f(x, id, i);
      }
      own += kLoads * kStride;
      load_chunk(own);
      after(first);
    }
  }
  template <int kThreads, int kLoads, class F>
  __device__ __forceinline__ void for_each_eight(int begin, int end, const F& f) const {
    for_each_eight<kThreads, kLoads>(begin, end, [&](float (&x)[8], int id, int) { f(x, id); }, [](int) {});
  }

 private:
  __device__ bool whole(int id, int end) const { return aligned && id + 8 <= end; }

  static __device__ __forceinline__ void unpack_raw(float (&x)[8], const Raw<T>& raw) {
    if constexpr (sizeof(T) == 4) {
      memcpy(x, &raw, sizeof(x));
    } else {
      unpack<T>(x, reinterpret_cast<const Eight&>(raw));
    }
  }
  __device__ __forceinline__ void load_one_by_one(float (&x)[8], int id, int end) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = id + k < end ? (*this)[id + k] : lowest();
  }
};

}  // namespace octavo::gpu::sampling
