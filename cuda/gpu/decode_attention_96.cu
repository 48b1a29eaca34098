#include "gpu/decode_attention_launch.cuh"

namespace octavo::gpu {

template struct DecodeKernels<96>;

}  // namespace octavo::gpu
