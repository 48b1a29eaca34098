// Warpgroup matrix instructions (sm_90a): d[64 x n] (+)= a[64 x 16] b[16 x n], d in fp32 registers, b in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace octavo::gpu::wgmma {

// Operands in shared memory are lines of 128 bytes (64 elements), swizzled as a tensor copy leaves them; eight lines
// are an atom of 1024 bytes. An offset that is added to the descriptor, not to the address, is one addition where the
// descriptors of a loop differ in it alone.
constexpr uint64_t kSwizzle128 = 1ull << 62;

// Lines run along k: rows of an operand, 64 of its k. The next atom holds the next eight rows. k moves on by 16
// elements, that is 32 bytes of address.
__device__ __forceinline__ uint64_t k_lines(uint32_t address, uint32_t offset = 0) {
  return kSwizzle128 | static_cast<uint64_t>(1024 >> 4) << 32 | ((1u << 16 | (address & 0x3ffff) >> 4) + (offset >> 4));
}

// Lines run along n: eight k, 64 of the operand's n. The next atom holds the next eight k; `n_stride` bytes on lie the
// next 64 of n. k moves on by 16 lines, that is 2048 bytes of address.
__device__ __forceinline__ uint64_t n_lines(uint32_t address, uint32_t n_stride, uint32_t offset = 0) {
  return kSwizzle128 | static_cast<uint64_t>(1024 >> 4) << 32 |
         (((n_stride >> 4) << 16 | (address & 0x3ffff) >> 4) + (offset >> 4));
}

// Before the first instruction of a group, where its registers were written by others.
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving what touches these registers across: an instruction that runs in the background is,
// to it, over at once.
template <class Register, int kCount>
__device__ __forceinline__ void pin(Register (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(Register) == sizeof(uint32_t)) {
      if constexpr (std::is_same_v<Register, float>) {
        asm volatile("" : "+f"(registers[i])::"memory");
      } else {
        asm volatile("" : "+r"(registers[i])::"memory");
      }
    } else {
      pin(registers[i]);
    }
  }
}
// The instructions: d[64 x columns] += a[64 x 16] b[16 x columns], d in `columns` / 2 registers a thread.
#define OCTAVO_NAMES_32                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", "                                                                   \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OCTAVO_NAMES_64                                                            \
  OCTAVO_NAMES_32                                                                  \
  ", "                                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", "                                                                             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OCTAVO_NAMES_96                                                            \
  OCTAVO_NAMES_64                                                                  \
  ", "                                                                             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", "                                                                             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define OCTAVO_NAMES_112 \
  OCTAVO_NAMES_96        \
  ", "                   \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define OCTAVO_NAMES_128                                                                       \
  OCTAVO_NAMES_96                                                                              \
  ", "                                                                                         \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", "                                                                                         \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OCTAVO_SUMS_8(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define OCTAVO_SUMS_16(i) OCTAVO_SUMS_8(i), OCTAVO_SUMS_8(i + 8)
#define OCTAVO_SUMS_32(i) OCTAVO_SUMS_16(i), OCTAVO_SUMS_16(i + 16)
#define OCTAVO_SUMS_64(i) OCTAVO_SUMS_32(i), OCTAVO_SUMS_32(i + 32)
#define OCTAVO_SUMS_96(i) OCTAVO_SUMS_64(i), OCTAVO_SUMS_32(i + 64)
#define OCTAVO_SUMS_112(i) OCTAVO_SUMS_96(i), OCTAVO_SUMS_16(i + 96)
#define OCTAVO_SUMS_128(i) OCTAVO_SUMS_64(i), OCTAVO_SUMS_64(i + 64)

// Operands' numbers follow the sums'. a and b with lines along k, both in shared memory.
#define OCTAVO_MMA_SHARED(type, columns, sums, a_name, b_name, accumulate_name)                                        \
  static __device__ __forceinline__ void mma(float (&d)[sums], uint64_t a, uint64_t b, bool accumulate) {              \
    asm volatile("{\n\t.reg .pred accumulate;\n\tsetp.ne.b32 accumulate, " accumulate_name                             \
                 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" OCTAVO_NAMES_##sums \
                 "}, " a_name ", " b_name ", accumulate, 1, 1, 0, 0;\n\t}"                                             \
                 : OCTAVO_SUMS_##sums(0)                                                                               \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                 \
  }
// a in registers, b with lines along n.
#define OCTAVO_MMA_REGISTERS(type, columns, sums, a_names, b_name, accumulate_name)                                    \
  static __device__ __forceinline__ void mma(float (&d)[sums], const uint32_t (&a)[4], uint64_t b, bool accumulate) {  \
    asm volatile("{\n\t.reg .pred accumulate;\n\tsetp.ne.b32 accumulate, " accumulate_name                             \
                 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" OCTAVO_NAMES_##sums \
                 "}, {" a_names "}, " b_name ", accumulate, 1, 1, 1;\n\t}"                                             \
                 : OCTAVO_SUMS_##sums(0)                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));             \
  }
#define OCTAVO_WARPGROUP(element, type)                                       \
  template <>                                                                 \
  struct Warpgroup<element, 64> {                                             \
    OCTAVO_MMA_SHARED(type, "64", 32, "%32", "%33", "%34")                    \
    OCTAVO_MMA_REGISTERS(type, "64", 32, "%32, %33, %34, %35", "%36", "%37")  \
  };                                                                          \
  template <>                                                                 \
  struct Warpgroup<element, 128> {                                            \
    OCTAVO_MMA_SHARED(type, "128", 64, "%64", "%65", "%66")                   \
    OCTAVO_MMA_REGISTERS(type, "128", 64, "%64, %65, %66, %67", "%68", "%69") \
  };                                                                          \
  template <>                                                                 \
  struct Warpgroup<element, 192> {                                            \
    OCTAVO_MMA_SHARED(type, "192", 96, "%96", "%97", "%98")                   \
  };                                                                          \
  template <>                                                                 \
  struct Warpgroup<element, 224> {                                            \
    OCTAVO_MMA_SHARED(type, "224", 112, "%112", "%113", "%114")               \
  };                                                                          \
  template <>                                                                 \
  struct Warpgroup<element, 256> {                                            \
    OCTAVO_MMA_SHARED(type, "256", 128, "%128", "%129", "%130")               \
  };

template <class T, int kColumns>
struct Warpgroup;
OCTAVO_WARPGROUP(__nv_bfloat16, "bf16")
OCTAVO_WARPGROUP(__half, "f16")

#undef OCTAVO_NAMES_32
#undef OCTAVO_NAMES_64
#undef OCTAVO_NAMES_96
#undef OCTAVO_NAMES_112
#undef OCTAVO_NAMES_128
#undef OCTAVO_SUMS_8
#undef OCTAVO_SUMS_16
#undef OCTAVO_SUMS_32
#undef OCTAVO_SUMS_64
#undef OCTAVO_SUMS_96
#undef OCTAVO_SUMS_112
#undef OCTAVO_SUMS_128
#undef OCTAVO_MMA_SHARED
#undef OCTAVO_MMA_REGISTERS
#undef OCTAVO_WARPGROUP

}  // namespace octavo::gpu::wgmma
