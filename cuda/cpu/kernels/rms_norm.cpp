#include "octavo/norm.h"

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/normalise.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

template <class T>
void add_row(T* residual, const T* x, int32_t hidden) {
  for (int32_t i = 0; i < hidden; i += kLanes) {
    const int lanes = hidden - i < kLanes ? hidden - i : kLanes;
    store_some(residual + i, load_some(residual + i, lanes) + load_some(x + i, lanes), lanes);
  }
}

template <class T>
void norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t offset = token * args.hidden;
    const T* x = static_cast<const T*>(args.x) + offset;
    if (args.residual != nullptr) {
      T* residual = static_cast<T*>(args.residual) + offset;
      add_row(residual, x, args.hidden);
      x = residual;
    }
    normalise(static_cast<T*>(args.out) + offset, x, static_cast<const T*>(args.weight), args.eps, args.hidden);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  with_element(args.dtype, [&]<class T>(T) {
    parallel_ranges(args.num_tokens, 1, 4 * args.hidden,
                    [&](int64_t begin, int64_t end) { norm_rows<T>(args, begin, end); });
  });
}

}  // namespace octavo::cpu::OCTAVO_ISA
