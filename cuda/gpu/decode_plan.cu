// Shares a decode step's attention out over a fixed grid, on the device, from the context lengths.
// Once a step: a few microseconds for all layers together.
#include "gpu/decode_plan.cuh"

#include <algorithm>
#include <array>
#include <cfloat>
#include <mutex>

#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "octavo/paged_attention.h"

namespace octavo::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCut = 64;  // parts of the longest sequence: two a warp
constexpr int kMaxSeqs = 4096;
constexpr size_t kTickets = 65536;
constexpr unsigned kAll = ~0u;

// Costs in steps of one multiprocessor that gets its fair share of the bus. Fitted on an H200; see cuda/bench/LOG.md.
constexpr float kAloneRate = 2.2f;    // how much faster a multiprocessor streams when it is nearly alone
constexpr float kImbalance = 0.1f;    // of the largest split
constexpr float kNextRound = 3.0f;    // refilling the pipeline for a block's next split
constexpr float kMergeSplits = 3.0f;  // the ticket and the reading back of partial results

struct PlanInputs {
  const int* context_lens;
  int num_seqs;
  int kv_heads;
  DecodeGrid grid;
  int multiprocessors;
  int cut;  // 0: chosen here
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int splits_of(int steps, int size) { return max(1, divide_up(steps, size)); }

// Steps of one split when the longest sequence is cut into `cut`: whole rounds of a cluster's warps.
__device__ __forceinline__ int split_size(int longest, int cut, const DecodeGrid& grid) {
  const int round = grid.cluster * grid.warps;
  return max(1, divide_up(divide_up(longest, cut), round)) * round;
}

__device__ float estimate(int size, int splits, int64_t total, const PlanInputs& in) {
  const float share = static_cast<float>(total) / static_cast<float>(in.multiprocessors);
  const float largest = static_cast<float>(size) / static_cast<float>(in.grid.cluster);
  const float rounds = static_cast<float>(divide_up(splits, in.grid.clusters) - 1);
  const float merging = splits > in.num_seqs * in.kv_heads ? kMergeSplits : 0.0f;
  return fmaxf(share + kImbalance * largest, largest / kAloneRate) + kNextRound * rounds + merging;
}

// One thread block. It never lets its successors start early, so whatever reads the plan finds it whole.
__global__ void __launch_bounds__(kThreads) plan_kernel(const PlanInputs in, Split* plan) {
  extern __shared__ int seq_arrays[];
  int* steps = seq_arrays;            // [num_seqs]
  int* splits = steps + in.num_seqs;  // [num_seqs]
  __shared__ int longest_of[kWarps];
  __shared__ int total_of[kWarps];
  __shared__ float cost_of[kMaxCut];
  __shared__ int size_of[kMaxCut];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  ptx::wait_for_previous_kernel();

  int longest = 0, total = 0;
  for (int s = thread; s < in.num_seqs; s += kThreads) {
    steps[s] = divide_up(max(in.context_lens[s], 0), kStepTokens);
    longest = max(longest, steps[s]);
    total += steps[s];
  }
  longest = __reduce_max_sync(kAll, longest);
  total = __reduce_add_sync(kAll, total);
  if (lane == 0) {
    longest_of[warp] = longest;
    total_of[warp] = total;
  }
  __syncthreads();
  longest = __reduce_max_sync(kAll, longest_of[lane]);
  total = __reduce_add_sync(kAll, total_of[lane]);

  // Each warp prices two ways of cutting.
  for (int cut = warp + 1; cut <= kMaxCut; cut += kWarps) {
    const int size = split_size(longest, in.cut > 0 ? in.cut : cut, in.grid);
    int count = 0;
    for (int s = lane; s < in.num_seqs; s += 32) count += splits_of(steps[s], size);
    count = __reduce_add_sync(kAll, count) * in.kv_heads;
    if (lane == 0) {
      size_of[cut - 1] = size;
      const int64_t all = static_cast<int64_t>(total) * in.kv_heads;
      cost_of[cut - 1] = count > in.grid.capacity ? FLT_MAX : estimate(size, count, all, in);
    }
  }
  __syncthreads();
  // The cheapest, and among equals the least cut. Positive floats order as their bits do.
  const unsigned lower = __float_as_uint(cost_of[lane]), upper = __float_as_uint(cost_of[lane + 32]);
  const unsigned least = __reduce_min_sync(kAll, min(lower, upper));
  const int best = __reduce_min_sync(kAll, lower == least ? lane : upper == least ? lane + 32 : kMaxCut);
  // Uncut always fits: the plan has room for every pair.
  const int size = least < __float_as_uint(FLT_MAX) ? size_of[best] : max(longest, 1);
  for (int s = thread; s < in.num_seqs; s += kThreads) splits[s] = splits_of(steps[s], size);
  __syncthreads();

  int used = 0;
  for (int s = thread; s < in.num_seqs; s += kThreads) used += splits[s];
  used = __reduce_add_sync(kAll, used);
  if (lane == 0) total_of[warp] = used;
  __syncthreads();
  used = __reduce_add_sync(kAll, total_of[lane]) * in.kv_heads;

  // Largest first where blocks take several in turn. A warp a sequence: its place, then its entries.
  const bool sorted = used > in.grid.clusters;
  for (int s = warp; s < in.num_seqs; s += kWarps) {
    const int mine = sorted ? divide_up(steps[s], splits[s]) : 0;
    int before = 0;
    for (int k = lane; k < in.num_seqs; k += 32) {
      const int other = sorted ? divide_up(steps[k], splits[k]) : 0;
      if (other > mine || (other == mine && k < s)) before += splits[k];
    }
    const int place = __reduce_add_sync(kAll, before) * in.kv_heads;
    const int count = splits[s];
    for (int i = lane; i < count * in.kv_heads; i += 32) {
      const int head = i / count, part = i % count;
      const int begin = static_cast<int>(static_cast<int64_t>(steps[s]) * part / count);
      const int end = static_cast<int>(static_cast<int64_t>(steps[s]) * (part + 1) / count);
      plan[place + i] = {s, head, begin, end, in.context_lens[s], place + head * count, count, 0};
    }
  }
  for (int i = used + thread; i < in.grid.capacity; i += kThreads) plan[i].seq = -1;
  __threadfence();
}

int resident_clusters(int head_dim, int warps, int cluster) {
  switch (head_dim) {
    case 64:
      return DecodeKernels<64>::resident_clusters(warps, cluster);
    case 80:
      return DecodeKernels<80>::resident_clusters(warps, cluster);
    case 96:
      return DecodeKernels<96>::resident_clusters(warps, cluster);
    case 128:
      return DecodeKernels<128>::resident_clusters(warps, cluster);
    default:
      throw OpError("paged_attention: head_dim must be 64, 80, 96 or 128");
  }
}

// Asking the driver takes longer than an op: remembered for each device and head_dim.
struct Resident {
  int blocks_of_4, blocks_of_8;  // single blocks of 4 and 8 warps
  std::array<int, 3> clusters;   // of 8, 4 and 2 blocks; 0 where the device has no clusters
};

constexpr std::array<int, 3> kClusterSizes = {8, 4, 2};

const Resident& resident(int head_dim) {
  static std::mutex mutex;
  static std::array<std::array<Resident, 17>, 64> known;
  const Device& device = current_device();
  const std::lock_guard lock(mutex);
  Resident& of = known[device.id][std::clamp(head_dim / 8, 0, 16)];
  if (of.blocks_of_8 == 0) {
    of.blocks_of_4 = resident_clusters(head_dim, 4, 1);
    // Consumer cards of capability 12.x take the portable path, like those below 9.0.
    const bool has_clusters = device.capability >= 90 && device.capability < 120;
    for (size_t i = 0; i < kClusterSizes.size(); ++i) {
      of.clusters[i] = has_clusters ? resident_clusters(head_dim, 8, kClusterSizes[i]) : 0;
    }
    of.blocks_of_8 = resident_clusters(head_dim, 8, 1);
  }
  return of;
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

DecodeGrid decode_grid(int num_seqs, int kv_heads, int head_dim) {
  const Resident& fits = resident(head_dim);
  const int pairs = num_seqs * kv_heads;
  for (size_t i = 0; i < kClusterSizes.size(); ++i) {
    if (pairs <= fits.clusters[i]) return {8, kClusterSizes[i], fits.clusters[i], fits.clusters[i]};
  }
  const int warps = pairs <= fits.blocks_of_8 ? 8 : 4;
  const int blocks = warps == 8 ? fits.blocks_of_8 : fits.blocks_of_4;
  return {warps, 1, blocks, pairs + 3 * blocks};
}

DecodeWorkspace::DecodeWorkspace(const DecodeGrid& grid, int group, int head_dim) {
  const size_t splits = static_cast<size_t>(grid.capacity);
  require(splits * grid.cluster <= kTickets, "paged_attention: too many sequences times KV heads");
  tickets = 0;
  plan = kTickets * sizeof(int);
  stats = plan + aligned(splits * sizeof(Split));
  outputs = stats + aligned(splits * grid.cluster * kMaxGroup * sizeof(float2));
  bytes = outputs + aligned(splits * group * head_dim * sizeof(float));
}

size_t paged_attention_workspace_bytes(int32_t max_seqs, int32_t q_heads, int32_t kv_heads, int32_t head_dim) {
  size_t bytes = 0;
  for (int seqs = 1; seqs <= max_seqs; ++seqs) {
    const DecodeGrid grid = decode_grid(seqs, kv_heads, head_dim);
    bytes = std::max(bytes, DecodeWorkspace(grid, q_heads / kv_heads, head_dim).bytes);
  }
  return bytes;
}

void plan_decode(const DecodeGrid& grid, const PlanAttentionArgs& args) {
  require(args.num_seqs <= kMaxSeqs, "plan_attention: more than 4096 sequences");
  require(args.cut >= 0 && args.cut <= kMaxCut, "plan_attention: cut must be from 0 to 64");
  const DecodeWorkspace layout(grid, args.q_heads / args.kv_heads, args.head_dim);
  require(args.workspace != nullptr && args.workspace_bytes >= layout.bytes, "plan_attention: workspace too small");
  const PlanInputs inputs{args.context_lens, args.num_seqs, args.kv_heads, grid, current_device().multiprocessors,
                          args.cut};
  const size_t shared_bytes = 2 * sizeof(int) * static_cast<size_t>(args.num_seqs);
  launch_kernel("plan_attention", plan_kernel, {.grid = dim3(1), .block = dim3(kThreads), .shared_bytes = shared_bytes},
                args.launch, inputs, reinterpret_cast<Split*>(static_cast<char*>(args.workspace) + layout.plan));
}

void plan_attention(const PlanAttentionArgs& args) {
  if (args.num_seqs == 0) return;
  plan_decode(decode_grid(args.num_seqs, args.kv_heads, args.head_dim), args);
}

}  // namespace octavo::gpu
