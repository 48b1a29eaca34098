// The instances of the decode matmul kernel for one element type.
#pragma once

#include <algorithm>

#include "gpu/decode_linear_launch.cuh"

namespace octavo::gpu::decode {

template <class T, class Sums, class Weights, class Activations>
void launch_instance(const LinearCall<Weights, Activations>& call) {
  const auto kernel = linear_kernel<T, Sums, Weights, Activations>;
  const Plan& plan = call.args.plan;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), plan.shared_bytes);
  const int warps = plan.consumer_warps() + Weights::kWarps + Activations::kWarps;
  launch_kernel("decode_linear", kernel,
                {dim3(plan.grid), dim3(32 * warps), static_cast<size_t>(plan.shared_bytes), plan.cluster()},
                call.launch, call.weight, call.x, call.args);
}

template <class T, int kColumnTiles, class Weights, class Activations>
void launch_columns(const LinearCall<Weights, Activations>& call) {
  if (call.args.plan.row_tiles == 1) {
    launch_instance<T, WarpSums<T, kColumnTiles, 1>>(call);
  } else {
    launch_instance<T, WarpSums<T, kColumnTiles, 2>>(call);
  }
}

template <class T, class Weights, class Activations>
void launch_linear(const LinearCall<Weights, Activations>& call) {
  const Plan& plan = call.args.plan;
  const int columns = plan.columns / plan.column_warps;
  if constexpr (!Activations::kTensorCopies) {
    if (columns == 8) return launch_columns<T, 1>(call);
    if (columns == 16) return launch_columns<T, 2>(call);
  } else if (plan.warpgroups) {
    return columns == 32 ? launch_instance<T, WarpgroupSums<T, 4>>(call)
                         : launch_instance<T, WarpgroupSums<T, 8>>(call);
  }
  if constexpr (Activations::kTensorCopies || !Weights::kTensorCopies) {
    if (columns == 32) return launch_columns<T, 4>(call);
  }
  throw OpError("decode_linear: no kernel for this plan");
}

}  // namespace octavo::gpu::decode
