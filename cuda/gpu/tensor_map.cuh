// Tensor maps for bulk tensor copies, encoded by the driver. No link to libcuda: a build runs where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <string>

#include "gpu/launch.cuh"

namespace octavo::gpu {

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    require(found == cudaDriverEntryPointSuccess, "the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return encoder;
}

// Boxes of 16-bit elements whose lines of 128 bytes are swizzled in shared memory. Innermost axis first; strides in
// bytes, of all axes but the innermost.
template <int kRank>
CUtensorMap swizzled_map(const void* data, DType dtype, const std::array<cuuint64_t, kRank>& sizes,
                         const std::array<cuuint64_t, kRank - 1>& strides, const std::array<cuuint32_t, kRank>& box) {
  std::array<cuuint32_t, kRank> every_element;
  every_element.fill(1);
  CUtensorMap map;
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      tensor_map_encoder()(&map, type, kRank, const_cast<void*>(data), sizes.data(), strides.data(), box.data(),
                           every_element.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw OpError("cuTensorMapEncodeTiled failed with " + std::to_string(result));
  return map;
}

}  // namespace octavo::gpu
