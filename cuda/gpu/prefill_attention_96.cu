#include "gpu/prefill_attention.cuh"

namespace octavo::gpu {

template struct PrefillKernels<96>;

}  // namespace octavo::gpu
