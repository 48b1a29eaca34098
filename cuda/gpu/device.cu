#include <algorithm>
#include <array>
#include <mutex>

#include "gpu/launch.cuh"

namespace octavo::gpu {
namespace {

constexpr int kMaxDevices = 64;

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ const int compiled_with_warpgroups = 1;
#else
__device__ const int compiled_with_warpgroups = 0;
#endif

__global__ void probe_kernel() {}

// All kernels are compiled for the same architectures, so one tells which of them the driver has picked. Code for an
// older one lacks what only newer ones have, whatever the device.
int compiled_capability() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, probe_kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion;
}

bool has_warpgroups() {
  int with = 0;
  check(cudaMemcpyFromSymbol(&with, compiled_with_warpgroups, sizeof(with)), "cudaMemcpyFromSymbol");
  return with != 0;
}

}  // namespace

const Device& current_device() {
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> read;
  int id = 0;
  check(cudaGetDevice(&id), "cudaGetDevice");
  require(id < kMaxDevices, "more than 64 GPUs");
  std::call_once(read[id], [id] {
    const int capability =
        10 * attribute(cudaDevAttrComputeCapabilityMajor, id) + attribute(cudaDevAttrComputeCapabilityMinor, id);
    devices[id] = {id, attribute(cudaDevAttrMultiProcessorCount, id),
                   static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, id)),
                   std::min(capability, compiled_capability()), has_warpgroups()};
  });
  return devices[id];
}

}  // namespace octavo::gpu
