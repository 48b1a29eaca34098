// Shares a decode step's attention out over a fixed grid, on the device, from the context lengths. Once a step.
//
// Clusters, and single blocks where that leaves few of them idle, get one part of one (sequence, KV head) pair each;
// how finely to cut is a question of cost. Else single blocks get equal stretches of all contexts laid end to end:
// nobody waits for a longer one, and a context that lies across a boundary is merged from its parts. Of long stretches
// a sixteenth is left in pieces, which blocks take as they get there: the bus does not serve all of them alike. Either
// way blocks next to each other read the same stretch for the KV heads in turn, so that what lies side by side in
// memory is read at the same time: 9 % at eight KV heads.
#include "gpu/decode_plan_device.cuh"

#include <algorithm>
#include <array>
#include <mutex>

#include "gpu/launch.cuh"
#include "gpu/prefill_plan.cuh"
#include "octavo/paged_attention.h"

namespace octavo::gpu {
namespace {

using decode_plan::kThreads;
using decode_plan::PlanInputs;

constexpr int kMaxSeqs = 4096;
constexpr size_t kTickets = 16384;
constexpr int kFixedParts = 16;

// It never lets its successors start early, so whatever reads the plan finds it whole.
__global__ void __launch_bounds__(kThreads) plan_kernel(const PlanInputs in) {
  extern __shared__ int seq_arrays[];
  ptx::wait_for_previous_kernel();
  decode_plan::make_plan(in, seq_arrays);
}

template <class F>
int of_kernels(int head_dim, const F& f) {
  switch (head_dim) {
    case 64:
      return f(DecodeKernels<64>{});
    case 80:
      return f(DecodeKernels<80>{});
    case 96:
      return f(DecodeKernels<96>{});
    case 128:
      return f(DecodeKernels<128>{});
    default:
      throw OpError("paged_attention: head_dim must be 64, 80, 96 or 128");
  }
}

bool has_kernel(int head_dim, int cluster) {
  return of_kernels(head_dim, [&](auto kernels) -> int {
           return (cluster % 3 != 0 || kernels.kOddClusters) && (cluster <= 8 || kernels.kLargeClusters);
         }) != 0;
}

int resident_clusters(int head_dim, int cluster) {
  return of_kernels(head_dim, [&](auto kernels) { return kernels.resident_clusters(cluster); });
}

constexpr std::array<int, 7> kClusterSizes = {16, 8, 6, 4, 3, 2, 1};
using ClusterCounts = std::array<int, kClusterSizes.size()>;

// Clusters of each size that run at once; 0 where the device has none. Asking the driver takes longer than an op, so
// it is remembered for each device and head_dim.
const ClusterCounts& resident(int head_dim) {
  static std::mutex mutex;
  static std::array<std::array<ClusterCounts, 17>, 64> known;
  const Device& device = current_device();
  const std::lock_guard lock(mutex);
  ClusterCounts& of = known[device.id][std::clamp(head_dim / 8, 0, 16)];
  if (of.back() == 0) {
    // Consumer cards of capability 12.x take the portable path, like those below 9.0.
    const bool has_clusters = device.capability >= 90 && device.capability < 120;
    for (size_t i = 0; i < of.size(); ++i) {
      const int size = kClusterSizes[i];
      const bool served = size == 1 || (has_clusters && has_kernel(head_dim, size));
      of[i] = served ? resident_clusters(head_dim, size) : 0;
    }
  }
  return of;
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

DecodeGrid decode_grid(int num_seqs, int kv_heads, int head_dim, bool fixed) {
  const ClusterCounts& fits = resident(head_dim);
  const int blocks = fits.back();
  const int pairs = num_seqs * kv_heads;
  const int warps = of_kernels(head_dim, [](auto kernels) { return kernels.single_warps(); });
  if (fixed) return {warps, 1, std::min(blocks, pairs * kFixedParts), kFixedParts};
  // The largest clusters that fit merge fastest. Smaller ones only where they use most of the device: single blocks use
  // all of it, at the price of a merge through memory.
  for (size_t i = 0; i + 1 < fits.size(); ++i) {
    const int cluster = kClusterSizes[i];
    if (pairs <= fits[i] && (cluster >= 8 || 10 * pairs * cluster >= 6 * blocks)) {
      return {8, cluster, fits[i], 0, key_steps_of(cluster, head_dim, num_seqs)};
    }
  }
  const int single = std::max(blocks / kv_heads, 1) * kv_heads;  // a multiple of the heads: see plan_stretches
  return {warps, 1, single};
}

DecodeWorkspace::DecodeWorkspace(const DecodeGrid& grid, int num_seqs, int kv_heads, int group, int head_dim) {
  const size_t pairs = static_cast<size_t>(num_seqs) * kv_heads;
  // Places for splits that may be parts of a pair.
  const size_t clusters = grid.fixed_parts > 0 ? pairs * grid.fixed_parts : static_cast<size_t>(grid.shares());
  require(clusters * grid.cluster <= kTickets, "paged_attention: more thread blocks than tickets");
  tickets = 0;
  taken = kTickets * sizeof(int);
  plan = aligned(taken + sizeof(int));
  empties = plan + aligned((clusters + pairs) * sizeof(Split));
  stats = empties + aligned(num_seqs * sizeof(int));
  outputs = stats + aligned(2 * clusters * grid.cluster * kMaxGroup * sizeof(float2));
  bytes = outputs + aligned(2 * clusters * group * head_dim * sizeof(float));
}

size_t paged_attention_workspace_bytes(int32_t max_seqs, int32_t q_heads, int32_t kv_heads, int32_t head_dim,
                                       bool fixed) {
  size_t bytes = 0;
  for (int seqs = 1; seqs <= max_seqs; ++seqs) {
    const DecodeGrid grid = decode_grid(seqs, kv_heads, head_dim, fixed);
    bytes = std::max(bytes, DecodeWorkspace(grid, seqs, kv_heads, q_heads / kv_heads, head_dim).bytes);
  }
  return aligned(bytes) + PrefillWorkspace(head_dim).bytes;
}

decode_plan::PlanInputs plan_inputs(const DecodeGrid& grid, const PlanAttentionArgs& args) {
  require(args.num_seqs <= kMaxSeqs, "plan_attention: more than 4096 sequences");
  const DecodeWorkspace layout(grid, args.num_seqs, args.kv_heads, args.q_heads / args.kv_heads, args.head_dim);
  require(args.workspace != nullptr && args.workspace_bytes >= layout.bytes, "plan_attention: workspace too small");
  const int least_steps = (std::max(args.least_tokens, 0) + kStepTokens - 1) / kStepTokens;
  char* workspace = static_cast<char*>(args.workspace);
  return {args.context_lens,
          args.num_seqs,
          args.kv_heads,
          grid,
          current_device().multiprocessors,
          least_steps,
          reinterpret_cast<Split*>(workspace + layout.plan),
          reinterpret_cast<int*>(workspace + layout.empties)};
}

void plan_decode(const DecodeGrid& grid, const PlanAttentionArgs& args) {
  const size_t shared_bytes = 2 * sizeof(int) * static_cast<size_t>(args.num_seqs);
  launch_kernel("plan_attention", plan_kernel, {.grid = dim3(1), .block = dim3(kThreads), .shared_bytes = shared_bytes},
                args.launch, plan_inputs(grid, args));
}

void plan_attention(const PlanAttentionArgs& args) {
  if (args.num_seqs == 0) return;
  plan_decode(decode_grid(args.num_seqs, args.kv_heads, args.head_dim, args.fixed), args);
}

}  // namespace octavo::gpu
