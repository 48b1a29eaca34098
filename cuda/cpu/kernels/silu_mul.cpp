#include "octavo/silu_mul.h"

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/simd.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

template <class T>
void silu_mul_rows(const SiluMulArgs& args, int64_t begin, int64_t end) {
  const Vec one = splat(1.0f);
  for (int64_t token = begin; token < end; ++token) {
    T* out = static_cast<T*>(args.out) + token * args.inter;
    const T* gate = static_cast<const T*>(args.gate_up) + 2 * token * args.inter;
    const T* up = gate + args.inter;
    for (int32_t i = 0; i < args.inter; i += kLanes) {
      const int lanes = args.inter - i;
      const Vec g = load_some(gate + i, lanes);
      store_some(out + i, g / (one + exp(splat(0.0f) - g)) * load_some(up + i, lanes), lanes);
    }
  }
}

}  // namespace

void silu_mul(const SiluMulArgs& args) {
  with_element(args.dtype, [&]<class T>(T) {
    parallel_ranges(args.num_tokens, 1, 16 * args.inter,
                    [&](int64_t begin, int64_t end) { silu_mul_rows<T>(args, begin, end); });
  });
}

}  // namespace octavo::cpu::OCTAVO_ISA
