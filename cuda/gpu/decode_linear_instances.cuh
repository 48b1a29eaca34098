// The instances of the decode matmul kernel for one element type.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "gpu/decode_linear_launch.cuh"
#include "gpu/decode_linear_warpgroup.cuh"

namespace octavo::gpu::decode {

// Early launched blocks would pile up on the first multiprocessors that have room, so one must not have room for two:
// by registers, if a few idle warps are enough for that, since what is left over then serves the attention kernel
// beside this one; else by shared memory.
struct Claim {
  int threads, shared_bytes;
};
constexpr int kMoreThanHalf = 116 * 1024;  // of sm_90's 227 KiB

template <auto kernel>
Claim claim_multiprocessor(int warps, int shared_bytes) {
  constexpr int kRegisters = 65536, kMostIdleWarps = 2;
  static const int registers_a_warp = [] {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel), "decode_linear");
    return 32 * ((attributes.numRegs + 7) / 8 * 8);
  }();
  const int needed = kRegisters / (2 * registers_a_warp) + 1;
  if (needed <= warps + kMostIdleWarps) return {32 * std::max(warps, needed), shared_bytes};
  return {32 * warps, std::max(shared_bytes, kMoreThanHalf)};
}

template <class T, class Sums, bool kDirect, class Weights, class Activations>
void launch_kind(const LinearCall<Weights, Activations>& call) {
  constexpr auto kernel = linear_kernel<T, Sums, Weights, Activations, kDirect>;
  const Plan& plan = call.args.plan;
  const int warps = plan.consumer_warps() + Weights::kWarps + Activations::kWarps;
  Claim claim{32 * warps, plan.shared_bytes};
  if constexpr (Weights::kTensorCopies) claim = claim_multiprocessor<kernel>(warps, plan.shared_bytes);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), claim.shared_bytes);
  launch_kernel("decode_linear", kernel,
                {dim3(plan.grid), dim3(claim.threads), static_cast<size_t>(claim.shared_bytes), plan.cluster()},
                call.launch, call.weight, call.x, call.args);
}

template <class T, class Sums, class Weights, class Activations>
void launch_instance(const LinearCall<Weights, Activations>& call) {
  call.args.plan.direct ? launch_kind<T, Sums, true>(call) : launch_kind<T, Sums, false>(call);
}

template <class T, int kColumnTiles, class Weights, class Activations>
void launch_columns(const LinearCall<Weights, Activations>& call) {
  if (call.args.plan.row_tiles == 1) {
    launch_instance<T, WarpSums<T, kColumnTiles, 1>>(call);
  } else {
    launch_instance<T, WarpSums<T, kColumnTiles, 2>>(call);
  }
}

template <class T, int kShape, class Call>
void launch_warpgroup(const Call& call) {
  constexpr WarpgroupShape kOf = kWarpgroupShapes[kShape];
  using Tile = WarpgroupTile<kOf.epilogue, kOf.rows, kOf.chains, kOf.row_tiles == 1, kOf.cluster, kOf.warpgroup_rows>;
  const auto kernel = warpgroup_kernel<T, Tile>;
  const Plan& plan = call.args.plan;
  const int shared_bytes = std::max(plan.shared_bytes, kMoreThanHalf);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  launch_kernel("decode_linear", kernel,
                {dim3(plan.grid), dim3(Tile::kThreads), static_cast<size_t>(shared_bytes), plan.cluster()}, call.launch,
                call.weight, call.x, call.args);
}

template <class T, class Call, int... kShapes>
void launch_warpgroups(const Call& call, std::integer_sequence<int, kShapes...>) {
  ((call.args.plan.warpgroup_shape == kShapes ? launch_warpgroup<T, kShapes>(call) : void()), ...);
}

template <class T, class Weights, class Activations>
void launch_linear(const LinearCall<Weights, Activations>& call) {
  const Plan& plan = call.args.plan;
  const int columns = plan.columns / plan.column_warps;
  if constexpr (!Activations::kTensorCopies) {
    if (columns == 8) return launch_columns<T, 1>(call);
    if (columns == 16) return launch_columns<T, 2>(call);
  } else if (plan.warpgroup_shape != kNoWarpgroup) {
    return launch_warpgroups<T>(call, std::make_integer_sequence<int, std::size(kWarpgroupShapes)>());
  } else if (plan.row_groups) {
    return launch_instance<T, RowGroupSums<T, 4>>(call);
  }
  if constexpr (Activations::kTensorCopies || !Weights::kTensorCopies) {
    if (columns == 32) return launch_columns<T, 4>(call);
  }
  throw OpError("decode_linear: no kernel for this plan");
}

}  // namespace octavo::gpu::decode
