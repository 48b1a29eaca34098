#include "octavo/norm.h"

#include <cmath>

#include "cpu/element.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu {
namespace {

template <class T>
void norm_row(T* out, const T* x, T* residual, const T* weight, float eps, int32_t hidden) {
  if (residual != nullptr) {
    for (int32_t i = 0; i < hidden; ++i) store(residual[i], load(residual[i]) + load(x[i]));
    x = residual;
  }
  float sum = 0.0f;
  for (int32_t i = 0; i < hidden; ++i) sum += load(x[i]) * load(x[i]);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(hidden) + eps);
  for (int32_t i = 0; i < hidden; ++i) store(out[i], load(x[i]) * scale * load(weight[i]));
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  with_element(args.dtype, [&]<class T>(T) {
    auto* residual = static_cast<T*>(args.residual);
    parallel_for(args.num_tokens, [&](int64_t token) {
      const int64_t offset = token * args.hidden;
      norm_row(static_cast<T*>(args.out) + offset, static_cast<const T*>(args.x) + offset,
               residual == nullptr ? nullptr : residual + offset, static_cast<const T*>(args.weight), args.eps,
               args.hidden);
    });
  });
}

}  // namespace octavo::cpu
