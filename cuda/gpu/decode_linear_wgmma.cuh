// wgmma of sm_90a: a warpgroup multiplies 64 rows of one operand by 32 to 192 of another, both in shared memory, 16
// elements of K deep.
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

#define OCTAVO_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define OCTAVO_SUMS_8(i) OCTAVO_SUMS_4(i), OCTAVO_SUMS_4(i + 4)
#define OCTAVO_SUMS_16(i) OCTAVO_SUMS_8(i), OCTAVO_SUMS_8(i + 8)
#define OCTAVO_SUMS_24(i) OCTAVO_SUMS_16(i), OCTAVO_SUMS_8(i + 16)
#define OCTAVO_SUMS_32(i) OCTAVO_SUMS_16(i), OCTAVO_SUMS_16(i + 16)
#define OCTAVO_SUMS_40(i) OCTAVO_SUMS_32(i), OCTAVO_SUMS_8(i + 32)
#define OCTAVO_SUMS_48(i) OCTAVO_SUMS_32(i), OCTAVO_SUMS_16(i + 32)
#define OCTAVO_SUMS_96(i) OCTAVO_SUMS_48(i), OCTAVO_SUMS_48(i + 48)
#define OCTAVO_NAMES_4 "%0,%1,%2,%3"
#define OCTAVO_NAMES_8 OCTAVO_NAMES_4 ",%4,%5,%6,%7"
#define OCTAVO_NAMES_16 OCTAVO_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define OCTAVO_NAMES_32 OCTAVO_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OCTAVO_NAMES_40 OCTAVO_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define OCTAVO_NAMES_48 OCTAVO_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define OCTAVO_NAMES_96                                                                                          \
  OCTAVO_NAMES_48                                                                                                \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74" \
  ",%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"

// sums += a b^T, asynchronously: 64 rows of a. A lane's sums of each 8 rows of b are those of mma.m16n8k16.
#define OCTAVO_WGMMA(rows, count, a_name, b_name)                                          \
  template <class T>                                                                       \
  __device__ __forceinline__ void multiply(float (&sums)[count], uint64_t a, uint64_t b) { \
    if constexpr (std::is_same_v<T, __half>) {                                             \
      OCTAVO_WGMMA_OF(rows, count, a_name, b_name, "f16");                                 \
    } else {                                                                               \
      OCTAVO_WGMMA_OF(rows, count, a_name, b_name, "bf16");                                \
    }                                                                                      \
  }
#define OCTAVO_WGMMA_OF(rows, count, a_name, b_name, type)                                        \
  asm volatile(                                                                                   \
      "{.reg .pred add;\n\tsetp.eq.b32 add,0,0;\n\t"                                              \
      "wgmma.mma_async.sync.aligned.m64n" rows "k16.f32." type "." type " {" OCTAVO_NAMES_##count \
      "}," a_name "," b_name ",add,1,1,0,0;}"                                                     \
      : OCTAVO_SUMS_##count(0)                                                                    \
      : "l"(a), "l"(b))

OCTAVO_WGMMA("32", 16, "%16", "%17")
OCTAVO_WGMMA("64", 32, "%32", "%33")
OCTAVO_WGMMA("80", 40, "%40", "%41")
OCTAVO_WGMMA("96", 48, "%48", "%49")
OCTAVO_WGMMA("192", 96, "%96", "%97")

#undef OCTAVO_WGMMA
#undef OCTAVO_WGMMA_OF
#undef OCTAVO_SUMS_4
#undef OCTAVO_SUMS_8
#undef OCTAVO_SUMS_16
#undef OCTAVO_SUMS_32
#undef OCTAVO_SUMS_40
#undef OCTAVO_SUMS_48
#undef OCTAVO_SUMS_96
#undef OCTAVO_NAMES_4
#undef OCTAVO_NAMES_8
#undef OCTAVO_NAMES_16
#undef OCTAVO_NAMES_32
#undef OCTAVO_NAMES_40
#undef OCTAVO_NAMES_48
#undef OCTAVO_NAMES_96
#endif

}  // namespace octavo::gpu::decode::wgmma
