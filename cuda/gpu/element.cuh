// The two 16-bit element types: packing, unpacking and their matrix instruction. Arithmetic is fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "octavo/error.h"
#include "octavo/tensor.h"

namespace octavo::gpu {

template <class T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  static __device__ __forceinline__ float low(uint32_t w) { return __uint_as_float(w << 16); }
  static __device__ __forceinline__ float high(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
  }
  // c[16x8] += a[16x16] b[16x8]; c in fp32.
  static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

template <>
struct Element<__half> {
  static __device__ __forceinline__ float low(uint32_t w) { return __half2float(__ushort_as_half(w & 0xffffu)); }
  static __device__ __forceinline__ float high(uint32_t w) { return __half2float(__ushort_as_half(w >> 16)); }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
  }
  static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

// Eight elements, 16 bytes: the unit in which rows are read and written.
struct alignas(16) Eight {
  uint32_t w[4];
};

template <class T>
__device__ __forceinline__ void unpack(float (&x)[8], const Eight& packed) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = Element<T>::low(packed.w[i]);
    x[2 * i + 1] = Element<T>::high(packed.w[i]);
  }
}

template <class T>
__device__ __forceinline__ Eight pack(const float (&x)[8]) {
  Eight packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.w[i] = Element<T>::pack(x[2 * i], x[2 * i + 1]);
  return packed;
}

// Calls f(T{}) with the element type of `dtype`.
template <class F>
void with_element(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat16:
      return f(__half{});
    case DType::kFloat32:
      break;
  }
  throw OpError("the GPU ops take bfloat16 and float16, not float32");
}

}  // namespace octavo::gpu
