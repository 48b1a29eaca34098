#include "gpu/decode_attention.cuh"

namespace octavo::gpu {

template struct DecodeKernels<128>;

}  // namespace octavo::gpu
