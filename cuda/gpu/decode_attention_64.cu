#include "gpu/decode_attention_launch.cuh"

namespace octavo::gpu {

template struct DecodeKernels<64>;

}  // namespace octavo::gpu
