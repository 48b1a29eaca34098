// From a planned decode matmul to its kernel.
#pragma once

#include "gpu/decode_linear_kernel.cuh"
#include "gpu/launch.cuh"
#include "octavo/decode_linear.h"

namespace octavo::gpu::decode {

template <class Weights, class Activations>
struct LinearCall {
  typename Weights::Operand weight;
  typename Activations::Operand x;
  KernelArgs args;
  Launch launch;
};

// Instantiated in decode_linear_bf16.cu and decode_linear_fp16.cu.
template <class T, class Weights, class Activations>
void launch_linear(const LinearCall<Weights, Activations>& call);

// Sets what a launch with more than 48 KiB of shared memory needs, once per kernel and device. Without the carve-out
// the driver sizes shared memory for one kernel alone, and two kernels never run side by side on a multiprocessor.
void allow_shared_memory(const void* kernel, int shared_bytes);

struct Matrices {
  const void* weight;
  const void* x;
};

Target target_of_device(bool portable);

// `args` complete but for shape and plan, which must fit `target`.
void launch_planned(const Shape& shape, const Plan& plan, const Target& target, const Matrices& matrices, DType dtype,
                    KernelArgs args, const Ahead& ahead, const Launch& launch);

}  // namespace octavo::gpu::decode
