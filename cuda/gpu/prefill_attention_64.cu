#include "gpu/prefill_attention.cuh"

namespace octavo::gpu {

template struct PrefillKernels<64>;

}  // namespace octavo::gpu
