#include "octavo/silu_mul.h"

#include <cmath>

#include "cpu/element.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu {

void silu_mul(const SiluMulArgs& args) {
  with_element(args.dtype, [&]<class T>(T) {
    parallel_for(args.num_tokens, [&](int64_t token) {
      T* out = static_cast<T*>(args.out) + token * args.inter;
      const T* gate = static_cast<const T*>(args.gate_up) + 2 * token * args.inter;
      const T* up = gate + args.inter;
      for (int32_t i = 0; i < args.inter; ++i) {
        const float g = load(gate[i]);
        store(out[i], g / (1.0f + std::exp(-g)) * load(up[i]));
      }
    });
  });
}

}  // namespace octavo::cpu
