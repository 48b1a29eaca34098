// What every part of the decode attention kernel knows: its shared memory, its arguments, and which thread it is.
#pragma once

#include <cuda.h>

#include "gpu/decode_attention_tiles.cuh"

namespace octavo::gpu {

// The kernel's dynamic shared memory. kSteps: as key_steps of DecodeGrid.
template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
struct DecodeShared {
  static constexpr int kQueryPitch = kDim % 64 == 0 ? kDim + 8 : 96;  // elements
  static constexpr int kKeyStages = Kv::kTensorCopies ? kSteps : 1;
  static constexpr int kStepBytes = kStepBlocks * Kv::kBytes;  // of keys, and of values
  static constexpr int kLandingBytes = (kKeyStages + 1) * kStepBytes;
  // A warp's own: first what it reads, then what it has found.
  union alignas(1024) {
    unsigned char landing[kWarps][kLandingBytes];
    struct {
      float out[kMaxGroup][kDim + 8];
      unsigned char rest[kLandingBytes - sizeof(float) * kMaxGroup * (kDim + 8)];
    } found[kWarps];
  };
  alignas(16) T query[kMaxGroup][kQueryPitch];
  alignas(16) T newest[2][kDim];  // the newest token's key and value
  alignas(16) float4 peer_out[kCluster > 1 ? kMaxGroup * kDim / 4 + kCluster : 1];
  float2 peer_stats[kCluster][kMaxGroup];
  float2 stats[kWarps][kMaxGroup];
  alignas(8) uint64_t landed[kWarps][kKeyStages + 1];  // barriers of a warp's keys, and of its values
  uint64_t peers_done;
  int ticket;
};

// Registers of a thread: blocks whose shared memory leaves room for a decode matmul of few rows beside them on a
// multiprocessor do so, too; single blocks of short heads leave room for three of their kind.
template <int kDim, int kSteps>
constexpr int kDecodeRegisters = kSteps == 1  ? 120
                                 : kDim <= 64 ? 128
                                              : 168;

template <class T, class Kv, int kDim, int kWarps, int kCluster, int kSteps>
class DecodeThread {
 public:
  using Shared = DecodeShared<T, Kv, kDim, kWarps, kCluster, kSteps>;

  __device__ __forceinline__ DecodeThread(const Decode& args, const CUtensorMap& tiles, Shared& shared)
      : args_(args),
        tiles_(tiles),
        shared_(shared),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster > 1) rank_ = ptx::cluster_rank();
#endif
  }

 protected:
  static constexpr int kThreads = kWarps * 32;

  const Decode& args_;
  const CUtensorMap& tiles_;
  Shared& shared_;
  const int thread_, lane_, warp_;
  int rank_ = 0;
};

}  // namespace octavo::gpu
