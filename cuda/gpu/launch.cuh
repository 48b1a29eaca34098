// Kernel launches: stream, programmatic dependent launch, clusters; every error becomes an OpError.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "octavo/error.h"
#include "octavo/tensor.h"

namespace octavo::gpu {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw OpError(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void require(bool condition, const char* message) {
  if (!condition) throw OpError(message);
}

// What launches depend on. Read once per device; the current device is the tensors' device.
struct Device {
  int id;
  int multiprocessors;
  size_t shared_bytes;  // that a thread block may have
  int capability;  // 10 * major + minor that the kernels in use were compiled for: may be less than the device's own
  bool has_warpgroups;  // they were compiled for sm_90a: warpgroup matrix instructions
};

const Device& current_device();

struct Geometry {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  int cluster = 1;
};

template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), const Geometry& geometry, const Launch& launch,
                   Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = geometry.grid;
  config.blockDim = geometry.block;
  config.dynamicSmemBytes = geometry.shared_bytes;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  cudaLaunchAttribute attributes[2];
  if (launch.pdl && current_device().capability >= 90) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (geometry.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(geometry.cluster), 1, 1};
  }
  config.attrs = attributes;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
}

// Lets a kernel use more than 48 KiB of shared memory on the current device. `shares`: kernels that are to run side by
// side on a multiprocessor must all ask for the largest carve-out; else it is sized for the first alone.
template <auto kKernel>
void allow_shared_bytes(size_t bytes, bool shares = false) {
  static thread_local int allowed_on = -1;
  const int device = current_device().id;
  if (allowed_on == device) return;
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
  if (shares) {
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "cudaFuncSetAttribute");
  }
  allowed_on = device;
}

// Lets a kernel run in clusters of more than eight blocks on the current device.
template <auto kKernel>
void allow_large_clusters() {
  static thread_local int allowed_on = -1;
  const int device = current_device().id;
  if (allowed_on == device) return;
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  allowed_on = device;
}

}  // namespace octavo::gpu
