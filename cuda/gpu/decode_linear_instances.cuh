// The instances of the decode matmul kernel for one element type.
#pragma once

#include "gpu/decode_linear_launch.cuh"

namespace octavo::gpu::decode {

template <class T, int kColumnTiles, int kRowTiles, class Weights, class Activations>
void launch_instance(const LinearCall<Weights, Activations>& call) {
  const auto kernel = linear_kernel<T, kColumnTiles, kRowTiles, Weights, Activations>;
  const Plan& plan = call.args.plan;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), plan.shared_bytes);
  const int warps = plan.consumer_warps() + Weights::kWarps + Activations::kWarps;
  launch_kernel("decode_linear", kernel,
                {dim3(plan.grid), dim3(32 * warps), static_cast<size_t>(plan.shared_bytes), plan.cluster}, call.launch,
                call.weight, call.x, call.args);
}

template <class T, int kColumnTiles, class Weights, class Activations>
void launch_columns(const LinearCall<Weights, Activations>& call) {
  if (call.args.plan.row_tiles == 1) {
    launch_instance<T, kColumnTiles, 1>(call);
  } else {
    launch_instance<T, kColumnTiles, 2>(call);
  }
}

template <class T, class Weights, class Activations>
void launch_linear(const LinearCall<Weights, Activations>& call) {
  constexpr bool kFew = !Activations::kTensorCopies;
  constexpr bool kMany = Activations::kTensorCopies || !Weights::kTensorCopies;
  const int columns = call.args.plan.columns;
  if constexpr (kFew) {
    if (columns == 8) return launch_columns<T, 1>(call);
    if (columns == 16) return launch_columns<T, 2>(call);
  }
  if constexpr (kMany) {
    if (columns == 32) return launch_columns<T, 4>(call);
    if (columns == 64) return launch_columns<T, 8>(call);
  }
  throw OpError("decode_linear: no kernel for this plan");
}

}  // namespace octavo::gpu::decode
