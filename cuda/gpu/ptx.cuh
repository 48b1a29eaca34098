// Names for the PTX instructions the kernels use. Those of sm_90 are compiled for sm_90 and newer only.
#pragma once

#include <cstdint>

namespace octavo::gpu::ptx {

// Programmatic dependent launch. Every thread block of every kernel calls both, so that "the previous kernel is done"
// also means that the ones before it are. What may be read before the wait is said at `Launch` in octavo/tensor.h.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Tries until `done` says true; traps rather than hangs once that has taken some three seconds. How long a try takes
// depends on what is asked, so from some number on each is followed by a sleep of a millisecond. That needs no register
// beside the loop's own, of which most waits have none to spare; the clock would need two.
template <class Done>
__device__ __forceinline__ void spin_until(const Done& done) {
  constexpr int kTries = 1 << 16, kMilliseconds = 3000;
#pragma unroll 1
  for (int attempt = 0; attempt < kTries + kMilliseconds; ++attempt) {
    if (done()) return;
    if (attempt >= kTries) __nanosleep(1'000'000);
  }
  __trap();
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Global loads of 4, 8 or 16 bytes that do not displace L1. Volatile: they are issued in program order.
template <int kWords>
__device__ __forceinline__ void load_streaming(uint32_t* w, const void* from) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(from));
  } else {
    asm volatile("ld.global.L1::no_allocate.u32 %0,[%1];" : "=r"(w[0]) : "l"(from));
  }
}

// The same from L2: sees what another kernel has written since an earlier load of the same place.
template <int kWords>
__device__ __forceinline__ void load_past_l1(uint32_t* w, const void* from) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(from)
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.cg.v2.u32 {%0,%1},[%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(from) : "memory");
  } else {
    asm volatile("ld.global.cg.u32 %0,[%1];" : "=r"(w[0]) : "l"(from) : "memory");
  }
}

__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}

// A global store of 16 bytes, aligned so. Of an array's words the compiler may make four.
__device__ __forceinline__ void store_global(void* to, const uint32_t (&w)[4]) {
  asm volatile("st.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

template <int kWords>
__device__ __forceinline__ void load_shared(uint32_t* w, uint32_t address) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(address));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address));
  } else {
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(w[0]) : "r"(address));
  }
}

template <int kWords>
__device__ __forceinline__ void store_shared(uint32_t address, const uint32_t* w) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(address), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
    asm volatile("st.shared.u32 [%0],%1;" ::"r"(address), "r"(w[0]) : "memory");
  }
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger; NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0,%1,%2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Transposes an 8x8 matrix of 16-bit elements spread over the warp as an mma fragment.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t fragment) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

// Four 8x8 matrices of 16-bit elements from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

// Copies 16 bytes from global to shared memory in the background; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The same for 4, 8 or 16 bytes that are all valid.
template <int kWords>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(to), "l"(from), "n"(4 * kWords) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The reverse of load_matrices, with the same addressing.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&m)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(address), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
#endif
}

__device__ __forceinline__ int load_acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0,[%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Adds 1 with acquire and release at device scope; returns the value before.
__device__ __forceinline__ int take_ticket(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

#if __CUDA_ARCH__ >= 900
// Brings memory into the L2 in the background: 16-byte aligned, a multiple of 16 bytes.
__device__ __forceinline__ void fetch_into_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
}

// Barriers in shared memory that count arrivals and bytes. A phase ends when all have come; waiting is for its parity.
__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t parity) {
  spin_until([&] {
    uint32_t done;
    asm volatile(
        "{\n\t.reg .pred complete;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 complete,[%1],%2;\n\t"
        "selp.u32 %0,1,0,complete;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
  });
}

// Whether it is over by now.
__device__ __forceinline__ bool phase_is_over(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n\t.reg .pred over;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 over,[%1],%2;\n\t"
      "selp.u32 %0,1,0,over;\n\t}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Orders ordinary stores to shared memory before its use by tensor copies and warpgroup matrix instructions.
__device__ __forceinline__ void publish_shared_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// True in one lane of the whole warp. Behind it the compiler knows that one lane runs: tensor copies need no loop over
// lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p,0xffffffff;\n\tselp.u32 %0,1,0,p;\n\t}" : "=r"(elected));
  return elected != 0;
}

// A box of a five-axis tensor map to shared memory; its bytes arrive at `barrier`.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int c0, int c1, int c2, int c3, int c4,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0],[%1,{%2,%3,%4,%5,%6}],[%7];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}

// A box of a two-axis map to shared memory: of this block, or of every block of the cluster whose bit `blocks` has, to
// the same place and the same barrier of each.
__device__ __forceinline__ void copy_tile(uint32_t to, const void* map, int c0, int c1, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];" ::"r"(
          to),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier)
      : "memory");
}
// Of a three-axis map.
__device__ __forceinline__ void copy_tile(uint32_t to, const void* map, int c0, int c1, int c2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3,%4}],[%5];" ::
          "r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_tile_to_blocks(uint32_t to, const void* map, int c0, int c1, uint32_t barrier,
                                                    uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0],[%1,{%2,%3}],[%4],%5;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier), "h"(blocks)
      : "memory");
}

// A box of a two-axis map from shared memory; what lies outside the tensor is left out. One group a commit.
__device__ __forceinline__ void store_tile(const void* map, uint32_t from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0,{%1,%2}],[%3];" ::"l"(map), "r"(c0),
               "r"(c1), "r"(from)
               : "memory");
}
// Of a three-axis map.
__device__ __forceinline__ void store_tile(const void* map, uint32_t from, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0,{%1,%2,%3}],[%4];" ::"l"(map), "r"(c0),
               "r"(c1), "r"(c2), "r"(from)
               : "memory");
}
__device__ __forceinline__ void commit_tile_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until their shared memory has been read and may be written again.
__device__ __forceinline__ void wait_for_tile_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The same of a four-axis map, for what is read once.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int c0, int c1, int c2, int c3,
                                         uint32_t barrier) {
  asm volatile(
      "{\n\t.reg .b64 policy;\n\t"
      "createpolicy.fractional.L2::evict_first.b64 policy,1.0;\n\t"
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0],[%1,{%2,%3,%4,%5}],[%6],policy;\n\t}" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// Thread-block clusters and their shared memory.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void arrive_at_cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Tells the others of no more than barriers set up before a fence for them. The arrival above waits for all memory,
// some 0.7 us.
__device__ __forceinline__ void arrive_relaxed_at_cluster_barrier() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_at_cluster_barrier() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same shared-memory address in another block of the cluster.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank) {
  uint32_t peer;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// Barriers that other blocks of the cluster arrive at. Arriving orders the tensor copies and matrix instructions behind
// and before it, whose ends are counted, not ordinary loads and stores: a release at cluster scope waits for the whole
// memory, a microsecond each.
__device__ __forceinline__ void publish_barriers_to_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive_at_peer(uint32_t barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _,[%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}

// A barrier that completes once `bytes` have been stored with it. One use per kernel: its phase is never reset.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0],1;\n\t"
      "fence.mbarrier_init.release.cluster;\n\t"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void store_to_peer(uint32_t address, uint32_t barrier, float4 v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0],{%1,%2,%3,%4},[%5];" ::"r"(address),
      "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
      "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_to_peer(uint32_t address, uint32_t barrier, float2 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0],{%1,%2},[%3];" ::"r"(address),
               "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(barrier)
               : "memory");
}

// Waits for the bytes.
__device__ __forceinline__ void wait_for_bytes(uint32_t barrier) {
  spin_until([&] {
    uint32_t done;
    asm volatile(
        "{\n\t.reg .pred complete;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete,[%1],0;\n\t"
        "selp.u32 %0,1,0,complete;\n\t}"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
    return done != 0;
  });
}
#endif

}  // namespace octavo::gpu::ptx
