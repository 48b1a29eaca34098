#include "gpu/prefill_attention.cuh"

namespace octavo::gpu {

template struct PrefillKernels<80>;

}  // namespace octavo::gpu
