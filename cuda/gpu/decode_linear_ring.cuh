// The pipeline of a decode matmul: a ring of shared-memory stages that producer warps fill with weights and activations
// and consumer warps empty. Two ways to fill it, with the same layout: bulk tensor copies (sm_90 and newer) and
// cp.async.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gpu/decode_linear_plan.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu::decode {

// ---- barriers

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state,[%0];\n\t}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool phase_is_over(uint32_t barrier, uint32_t parity) {
  uint32_t over;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred over;\n\tmbarrier.try_wait.parity.shared::cta.b64 over,[%1],%2;\n\t"
      "selp.u32 %0,1,0,over;\n\t}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n\t.reg .pred over;\n\tmbarrier.test_wait.parity.shared::cta.b64 over,[%1],%2;\n\t"
      "selp.u32 %0,1,0,over;\n\t}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return over != 0;
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  ptx::spin_until([&] { return phase_is_over(barrier, parity); });
}

// ---- the ring

// A place in the ring and the parity of its current round.
struct Position {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int steps, int stages) {
    slot += steps;
#pragma unroll 1
    while (slot >= stages) {
      slot -= stages;
      parity ^= 1;
    }
  }
};

// Header: 1 / rms of 64 rows, the barrier of the cluster's exchange, then three barriers a stage.
struct Ring {
  uint32_t shared;  // address of all of the block's shared memory, 1024-byte aligned
  int stages;
  int weight_bytes;  // of a stage; activations follow
  int stage_bytes;

  static constexpr int kInverseRmsBytes = 64 * 4;

  __device__ uint32_t exchange_barrier() const { return shared + kInverseRmsBytes; }
  __device__ uint32_t barrier(int kind, int slot) const {
    return shared + kInverseRmsBytes + 8 + (kind * kMaxStages + slot) * 8;
  }
  __device__ uint32_t weights_here(int slot) const { return barrier(0, slot); }
  __device__ uint32_t activations_here(int slot) const { return barrier(1, slot); }
  __device__ uint32_t emptied(int slot) const { return barrier(2, slot); }
  __device__ uint32_t weights(int slot) const { return shared + kHeaderBytes + slot * stage_bytes; }
  __device__ uint32_t activations(int slot) const { return weights(slot) + weight_bytes; }

  __device__ void init_weights_here(int arrivals) const { init(0, arrivals); }
  __device__ void init_activations_here(int arrivals) const { init(1, arrivals); }
  __device__ void init_emptied(int arrivals) const { init(2, arrivals); }

 private:
  __device__ void init(int kind, int arrivals) const {
#pragma unroll 1
    for (int slot = 0; slot < stages; ++slot) init_barrier(barrier(kind, slot), arrivals);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
};
static_assert(Ring::kInverseRmsBytes + 8 + 3 * kMaxStages * 8 <= kHeaderBytes);

// ---- what fills a stage. Lines of 128 bytes have their 16-byte pieces permuted by the line's index modulo 8, so that
// ldmatrix meets no bank conflict; bulk tensor copies do the same in hardware. K-blocks beyond the end become zeros.

// What a producer needs to know of a stage.
struct StageShape {
  int rows;     // of the weight tile
  int columns;  // of the activations
  int blocks;   // k-blocks
  bool gate_up;
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void expect_stage(uint32_t barrier, uint32_t bytes) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state,[%0],%1;\n\t}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// A box of (64-element line, row, k-block) coordinates.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int row, int k_block, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0],[%1,{%2,%3,%4}],[%5],%6;" ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(k_block), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of (line, 8 rows, gate or up, group of 8 rows, k-block): 8 gate rows, their 8 up rows, and so on.
__device__ __forceinline__ void copy_gate_up_box(uint32_t to, const CUtensorMap& map, int group, int k_block,
                                                 uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0],[%1,{%2,%2,%2,%3,%4}],[%5],%6;" ::"r"(to),
      "l"(&map), "r"(0), "r"(group), "r"(k_block), "r"(barrier), "l"(policy)
      : "memory");
}
#endif

// Copies 16-byte pieces of 128-byte lines, eight lanes a line, and arrives at the barrier once they are there.
struct LineCopier {
  uint32_t to;
  int piece;

  __device__ __forceinline__ void copy(int line, const char* from, bool valid) const {
    ptx::copy_async(to + line * 2 * kBlock + ((piece ^ (line % 8)) << 4), from, valid);
  }
  static __device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  }
};

struct TensorWeights {
  static constexpr bool kTensorCopies = true;
  static constexpr int kWarps = 1;
  static constexpr int kLanes = 1;  // of each warp

  struct Operand {
    CUtensorMap map;
  };

#if __CUDA_ARCH__ >= 900
  const Operand& weight;
  StageShape stage;
  uint64_t policy;

  __device__ __forceinline__ TensorWeights(const Operand& weight, const StageShape& stage)
      : weight(weight), stage(stage) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight.map) : "memory");
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  }
  // `row` is the tile's first row of the weight matrix.
  __device__ __forceinline__ void load(uint32_t to, uint32_t barrier, int row, int k_block) const {
    expect_stage(barrier, stage.blocks * stage.rows * 2 * kBlock);
    if (stage.gate_up) {
      copy_gate_up_box(to, weight.map, row / 16, k_block, barrier, policy);
    } else {
      copy_box(to, weight.map, row, k_block, barrier, policy);
    }
  }
#endif
};

struct AsyncWeights {
  static constexpr bool kTensorCopies = false;
  static constexpr int kWarps = 2;
  static constexpr int kLanes = 32;

  struct Operand {
    const char* data;  // [rows][k_blocks * 64], 2-byte elements
    int rows;
    int k_blocks;
  };

  const Operand& weight;
  StageShape stage;

  int64_t row_bytes;

  __device__ __forceinline__ AsyncWeights(const Operand& weight, const StageShape& stage)
      : weight(weight), stage(stage), row_bytes(int64_t{2} * kBlock * weight.k_blocks) {}

  // Rows go by eights, a line for every eight lanes. Gate and up: eight gate rows, then their up rows, which lie half a
  // matrix later. Eights beyond the matrix become zeros.
  __device__ __forceinline__ void load(uint32_t to, uint32_t barrier, int row, int k_block) const {
    static_assert(4 * kWarps == 8);
    const int lane = threadIdx.x % (32 * kWarps);
    const LineCopier copier{to, lane % 8};
    const int eights = stage.rows / 8, eights_left = (weight.rows - row) / 8;
    const int64_t half_bytes = weight.rows / 2 * row_bytes;
    const int64_t to_odd = stage.gate_up ? half_bytes : 8 * row_bytes;
    const int64_t to_even = stage.gate_up ? 8 * row_bytes - half_bytes : 8 * row_bytes;
    for (int block = 0; block < stage.blocks; ++block) {
      const int copied = k_block + block < weight.k_blocks ? min(eights, eights_left) : 0;
      const char* from = weight.data + ((stage.gate_up ? row / 2 : row) + lane / 8) * row_bytes +
                         (k_block + block) * 2 * kBlock + copier.piece * 16;
      int line = block * stage.rows + lane / 8;
#pragma unroll 4
      for (int eight = 0; eight < eights; ++eight) {
        copier.copy(line, eight < copied ? from : weight.data, eight < copied);
        from += eight % 2 == 0 ? to_odd : to_even;
        line += 8;
      }
    }
    LineCopier::arrive_when_copied(barrier);
  }
};

struct TensorActivations {
  static constexpr bool kTensorCopies = true;
  static constexpr int kWarps = 1;
  static constexpr int kLanes = 1;

  struct Operand {
    CUtensorMap map;
  };

#if __CUDA_ARCH__ >= 900
  const Operand& x;
  StageShape stage;
  uint64_t policy;

  __device__ __forceinline__ TensorActivations(const Operand& x, const StageShape& stage) : x(x), stage(stage) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x.map) : "memory");
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  }
  // Before the first load of what another kernel wrote with ordinary stores.
  static __device__ __forceinline__ void acquire() { asm volatile("fence.proxy.async;" ::: "memory"); }

  __device__ __forceinline__ void load(uint32_t to, uint32_t barrier, int k_block) const {
    expect_stage(barrier, stage.blocks * stage.columns * 2 * kBlock);
    copy_box(to, x.map, 0, k_block, barrier, policy);
  }
#endif
};

// For few columns also where there are tensor copies: these would queue behind the weights'. Columns beyond the batch
// keep what was in the stage; nothing reads their results.
struct AsyncActivations {
  static constexpr bool kTensorCopies = false;
  static constexpr int kWarps = 3;
  static constexpr int kLanes = 32;

  struct Operand {
    const char* data;  // [batch][k_blocks * 64], 2-byte elements
    int batch;
    int k_blocks;
  };

  const Operand& x;
  StageShape stage;
  uint32_t reciprocal;  // of the batch, in 2^16ths, rounded up: exact for the line counts here

  __device__ __forceinline__ AsyncActivations(const Operand& x, const StageShape& stage)
      : x(x), stage(stage), reciprocal(65536 / x.batch + 1) {}
  static __device__ __forceinline__ void acquire() {}

  __device__ __forceinline__ void load(uint32_t to, uint32_t barrier, int k_block) const {
    const int lane = threadIdx.x % (32 * kWarps);
    const LineCopier copier{to, lane % 8};
#pragma unroll 2
    for (int i = lane / 8; i < stage.blocks * x.batch; i += 4 * kWarps) {
      const int block = i * reciprocal >> 16;
      const int row = i - block * x.batch;
      const char* from = x.data + ((row * x.k_blocks + k_block + block) * 2 * kBlock + copier.piece * 16);
      copier.copy(block * stage.columns + row, from, k_block + block < x.k_blocks);
    }
    LineCopier::arrive_when_copied(barrier);
  }
};

}  // namespace octavo::gpu::decode
