#include "gpu/prefill_linear_kernel.cuh"

namespace octavo::gpu {

template struct PrefillLinearKernels<__half>;

}  // namespace octavo::gpu
