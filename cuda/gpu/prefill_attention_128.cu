#include "gpu/prefill_attention.cuh"

namespace octavo::gpu {

template struct PrefillKernels<128>;

}  // namespace octavo::gpu
