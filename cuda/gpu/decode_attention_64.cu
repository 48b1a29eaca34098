#include "gpu/decode_attention.cuh"

namespace octavo::gpu {

template struct DecodeKernels<64>;

}  // namespace octavo::gpu
