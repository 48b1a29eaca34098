#include "gpu/decode_attention.cuh"

namespace octavo::gpu {

template struct DecodeKernels<96>;

}  // namespace octavo::gpu
