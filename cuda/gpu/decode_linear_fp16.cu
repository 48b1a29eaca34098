#include "gpu/decode_linear_instances.cuh"

namespace octavo::gpu::decode {

template void launch_linear<__half>(const LinearCall<TensorWeights, TensorActivations>& call);
template void launch_linear<__half>(const LinearCall<TensorWeights, AsyncActivations>& call);
template void launch_linear<__half>(const LinearCall<AsyncWeights, AsyncActivations>& call);

}  // namespace octavo::gpu::decode
