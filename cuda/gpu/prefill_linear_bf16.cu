#include "gpu/prefill_linear_kernel.cuh"

namespace octavo::gpu {

template struct PrefillLinearKernels<__nv_bfloat16>;

}  // namespace octavo::gpu
