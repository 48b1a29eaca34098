#include "gpu/decode_attention_launch.cuh"

namespace octavo::gpu {

template struct DecodeKernels<128>;

}  // namespace octavo::gpu
