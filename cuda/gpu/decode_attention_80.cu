#include "gpu/decode_attention.cuh"

namespace octavo::gpu {

template struct DecodeKernels<80>;

}  // namespace octavo::gpu
