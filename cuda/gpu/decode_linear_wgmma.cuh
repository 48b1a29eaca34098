// wgmma of sm_90a: a warpgroup multiplies 64 rows by 32 or 64 columns, both in shared memory, 16 elements of K deep.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace octavo::gpu::decode::wgmma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Describes an operand of 128-byte lines, permuted as bulk tensor copies do, in groups of 8 lines one after another.
// `address`: of a line at the start of a group.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  constexpr uint64_t kGroupBytes = 1024, kSwizzleOf128Bytes = 1;
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | kGroupBytes >> 4 << 32 | kSwizzleOf128Bytes << 62;
}

#define OCTAVO_SUMS(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define OCTAVO_SUMS_OF_32 OCTAVO_SUMS(0), OCTAVO_SUMS(1), OCTAVO_SUMS(2), OCTAVO_SUMS(3)
#define OCTAVO_SUMS_OF_64 OCTAVO_SUMS_OF_32, OCTAVO_SUMS(4), OCTAVO_SUMS(5), OCTAVO_SUMS(6), OCTAVO_SUMS(7)

// sums += a b, asynchronously. A lane's four sums of a tile of 8 columns are those of mma.m16n8k16.
#define OCTAVO_WGMMA_32(type)                                                          \
  asm volatile(                                                                        \
      "{.reg .pred add;\n\tsetp.eq.b32 add,0,0;\n\t"                                   \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                      \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},%16,%17,add,1,1,0,0;}" \
      : OCTAVO_SUMS_OF_32                                                              \
      : "l"(a), "l"(b))
#define OCTAVO_WGMMA_64(type)                                                            \
  asm volatile(                                                                          \
      "{.reg .pred add;\n\tsetp.eq.b32 add,0,0;\n\t"                                     \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                        \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},%32,%33,add,1,1,0,0;}"                   \
      : OCTAVO_SUMS_OF_64                                                                \
      : "l"(a), "l"(b))

template <class T>
__device__ __forceinline__ void multiply(float (&sums)[4][4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    OCTAVO_WGMMA_32("f16");
  } else {
    OCTAVO_WGMMA_32("bf16");
  }
}

template <class T>
__device__ __forceinline__ void multiply(float (&sums)[8][4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    OCTAVO_WGMMA_64("f16");
  } else {
    OCTAVO_WGMMA_64("bf16");
  }
}

#undef OCTAVO_SUMS
#undef OCTAVO_SUMS_OF_32
#undef OCTAVO_SUMS_OF_64
#undef OCTAVO_WGMMA_32
#undef OCTAVO_WGMMA_64
#endif

}  // namespace octavo::gpu::decode::wgmma
