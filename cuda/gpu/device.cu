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

}  // namespace

const Device& current_device() {
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> read;
  int id = 0;
  check(cudaGetDevice(&id), "cudaGetDevice");
  require(id < kMaxDevices, "more than 64 GPUs");
  std::call_once(read[id], [id] {
    devices[id] = {
        id, attribute(cudaDevAttrMultiProcessorCount, id),
        10 * attribute(cudaDevAttrComputeCapabilityMajor, id) + attribute(cudaDevAttrComputeCapabilityMinor, id)};
  });
  return devices[id];
}

}  // namespace octavo::gpu
