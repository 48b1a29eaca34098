// Shares a decode step's attention out over a fixed grid, on the device, from the context lengths. Once a step.
//
// Single blocks get equal stretches of all contexts laid end to end: nobody waits for a longer one, and a context that
// lies across a boundary is merged from its parts. Blocks next to each other read the same stretch for the KV heads in
// turn, so that what lies side by side in memory is read at the same time: 9 % at eight KV heads. Clusters get one part
// of one pair each, as there are at least as many of them as pairs; how finely to cut is a question of cost.
#include "gpu/decode_plan.cuh"

#include <algorithm>
#include <array>
#include <cfloat>
#include <mutex>

#include "gpu/launch.cuh"
#include "gpu/prefill_plan.cuh"
#include "gpu/ptx.cuh"
#include "octavo/paged_attention.h"

namespace octavo::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kCandidates = 64;  // ways of cutting that are priced: two a warp
constexpr int kMaxSeqs = 4096;
constexpr size_t kTickets = 16384;
constexpr unsigned kAll = ~0u;

// Costs in steps of a multiprocessor that gets its fair share of the bus. Fitted on an H200; see cuda/bench/LOG.md.
constexpr float kAloneRate = 1.7f;   // how much faster a multiprocessor streams when it is nearly alone
constexpr float kImbalance = 0.1f;   // of a block's share
constexpr float kMergeParts = 1.5f;  // tickets, and reading back partial results

struct PlanInputs {
  const int* context_lens;
  int num_seqs;
  int kv_heads;
  DecodeGrid grid;
  int multiprocessors;
  int least_steps;  // of a split; 0: chosen here
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int round_up(int a, int b) { return divide_up(a, b) * b; }

// Sums of the values before each thread's, over the thread block; `total` gets the sum of all.
__device__ int exclusive_sum(int value, int& total) {
  __shared__ int of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int through = value;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int lower = __shfl_up_sync(kAll, through, lanes);
    if (lane >= lanes) through += lower;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = through;
  __syncthreads();
  const int sum = of_warp[lane];
  total = __reduce_add_sync(kAll, sum);
  return __reduce_add_sync(kAll, lane < warp ? sum : 0) + through - value;
}

// before[s] = sum of value(0 .. s - 1) for all sequences; returns the sum of all.
template <class Value>
__device__ int sum_before(int* before, int num_seqs, const Value& value) {
  int sum = 0;
  for (int first = 0; first < num_seqs; first += kThreads) {
    const int s = first + threadIdx.x;
    int total;
    const int sum_in_round = exclusive_sum(s < num_seqs ? value(s) : 0, total);
    if (s < num_seqs) before[s] = sum + sum_in_round;
    sum += total;
  }
  __syncthreads();
  return sum;
}

struct Context {
  const PlanInputs& in;
  const int* steps;  // [num_seqs]
  int* before;       // [num_seqs]
  Split* plan;
  int empties;
};

// ---- single blocks: equal stretches

// Block i * kv_heads + h reads stretch i for head h. The first split of block b is entry b; the only other kind is part
// 0 of a pair behind another pair's end: entry blocks + pair.
__device__ void plan_stretches(const Context& c) {
  const PlanInputs& in = c.in;
  const int heads = in.kv_heads, blocks = in.grid.clusters;
  const int all = sum_before(c.before, in.num_seqs, [&](int s) { return c.steps[s]; });
  const int fair = round_up(divide_up(all, blocks / heads), in.grid.warps);
  const int stretch = max(max(fair, in.least_steps), in.grid.warps);
  const int used = divide_up(all, stretch) * heads;
  for (int block = used + threadIdx.x; block < blocks; block += kThreads) {
    c.plan[block].seq = -1;
    c.plan[block].empties = c.empties;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int s = warp; s < in.num_seqs; s += kWarps) {
    const int start = c.before[s], steps = c.steps[s];
    if (steps == 0) continue;
    int after = s + 1;  // the next sequence that has a context
    while (after < in.num_seqs && c.steps[after] == 0) ++after;
    const int first = start / stretch, parts = (start + steps - 1) / stretch - first + 1;
    for (int i = lane; i < parts * heads; i += 32) {
      const int part = i / heads, head = i % heads;
      const int begin = max(start, (first + part) * stretch), end = min(start + steps, (first + part + 1) * stretch);
      const int block = (first + part) * heads + head;
      const int entry = begin == (first + part) * stretch ? block : blocks + s * heads + head;
      const bool is_last = end == min((first + part + 1) * stretch, all);
      c.plan[entry] = {static_cast<int16_t>(s),
                       static_cast<int16_t>(head),
                       begin - start,
                       end - start,
                       in.context_lens[s],
                       first * heads + head,
                       static_cast<int16_t>(part),
                       static_cast<int16_t>(parts),
                       is_last ? -1 : blocks + after * heads + head,
                       c.empties};
    }
  }
}

// ---- clusters: one part of one pair each

__device__ __forceinline__ int parts_of(int steps, int size) { return divide_up(steps, size); }

__device__ float cost(int size, int parts, int pairs, int all, const PlanInputs& in) {
  const float share = static_cast<float>(all) / static_cast<float>(in.multiprocessors);
  const float of_block = static_cast<float>(size) / static_cast<float>(in.grid.cluster);
  return fmaxf(share + kImbalance * of_block, of_block / kAloneRate) + (parts > pairs ? kMergeParts : 0.0f);
}

// Steps of the largest part: the cheapest of cutting the longest context into 1 to 64 parts that all fit.
__device__ int choose_size(const Context& c) {
  __shared__ float costs[kCandidates];
  __shared__ int sizes[kCandidates];
  const PlanInputs& in = c.in;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int round = in.grid.cluster * in.grid.warps;  // all warps of a cluster take a step
  int longest = 0, all = 0, pairs = 0;
  for (int s = lane; s < in.num_seqs; s += 32) {
    longest = max(longest, c.steps[s]);
    all += c.steps[s];
    pairs += c.steps[s] > 0 ? 1 : 0;
  }
  longest = __reduce_max_sync(kAll, longest);
  all = __reduce_add_sync(kAll, all) * in.kv_heads;
  pairs = __reduce_add_sync(kAll, pairs) * in.kv_heads;
  for (int candidate = warp; candidate < kCandidates; candidate += kWarps) {
    const int size = max(round_up(max(divide_up(longest, candidate + 1), in.least_steps), round), round);
    int parts = 0;
    for (int s = lane; s < in.num_seqs; s += 32) parts += parts_of(c.steps[s], size);
    parts = __reduce_add_sync(kAll, parts) * in.kv_heads;
    if (lane == 0) {
      sizes[candidate] = size;
      costs[candidate] = parts > in.grid.clusters ? FLT_MAX : cost(size, parts, pairs, all, in);
    }
  }
  __syncthreads();
  // The least, and among equals the least cut. Positive floats order as their bits do. Uncut always fits.
  const unsigned lower = __float_as_uint(costs[lane]), upper = __float_as_uint(costs[lane + 32]);
  const unsigned least = __reduce_min_sync(kAll, min(lower, upper));
  return sizes[__reduce_min_sync(kAll, lower == least ? lane : upper == least ? lane + 32 : kCandidates)];
}

__device__ void plan_parts(const Context& c) {
  const PlanInputs& in = c.in;
  const int size = choose_size(c);
  const int used = sum_before(c.before, in.num_seqs, [&](int s) { return parts_of(c.steps[s], size); }) * in.kv_heads;
  for (int cluster = used + threadIdx.x; cluster < in.grid.clusters; cluster += kThreads) {
    c.plan[cluster].seq = -1;
    c.plan[cluster].empties = c.empties;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int s = warp; s < in.num_seqs; s += kWarps) {
    const int parts = parts_of(c.steps[s], size);
    for (int i = lane; i < parts * in.kv_heads; i += 32) {
      const int head = i / parts, part = i % parts;
      const int first = c.before[s] * in.kv_heads + head * parts;
      const auto cut = [&](int at) { return static_cast<int>(static_cast<int64_t>(c.steps[s]) * at / parts); };
      c.plan[first + part] = {
          static_cast<int16_t>(s),    static_cast<int16_t>(head),  cut(part), cut(part + 1), in.context_lens[s], first,
          static_cast<int16_t>(part), static_cast<int16_t>(parts), -1,        c.empties};
    }
  }
}

// One thread block. It never lets its successors start early, so whatever reads the plan finds it whole.
__global__ void __launch_bounds__(kThreads) plan_kernel(const PlanInputs in, Split* plan, int* empty_seqs) {
  extern __shared__ int seq_arrays[];
  __shared__ int empties;
  int* steps = seq_arrays;
  if (threadIdx.x == 0) empties = 0;
  ptx::wait_for_previous_kernel();
  __syncthreads();
  for (int s = threadIdx.x; s < in.num_seqs; s += kThreads) {
    steps[s] = divide_up(max(in.context_lens[s], 0), kStepTokens);
    if (steps[s] == 0) empty_seqs[atomicAdd(&empties, 1)] = s;
  }
  __syncthreads();
  const Context context{in, steps, steps + in.num_seqs, plan, empties};
  in.grid.cluster == 1 ? plan_stretches(context) : plan_parts(context);
  __threadfence();
}

int resident_clusters(int head_dim, int cluster) {
  switch (head_dim) {
    case 64:
      return DecodeKernels<64>::resident_clusters(cluster);
    case 80:
      return DecodeKernels<80>::resident_clusters(cluster);
    case 96:
      return DecodeKernels<96>::resident_clusters(cluster);
    case 128:
      return DecodeKernels<128>::resident_clusters(cluster);
    default:
      throw OpError("paged_attention: head_dim must be 64, 80, 96 or 128");
  }
}

constexpr std::array<int, 4> kClusterSizes = {8, 4, 2, 1};

// Clusters of each size that run at once; 0 where the device has none. Asking the driver takes longer than an op, so
// it is remembered for each device and head_dim.
const std::array<int, 4>& resident(int head_dim) {
  static std::mutex mutex;
  static std::array<std::array<std::array<int, 4>, 17>, 64> known;
  const Device& device = current_device();
  const std::lock_guard lock(mutex);
  std::array<int, 4>& of = known[device.id][std::clamp(head_dim / 8, 0, 16)];
  if (of[3] == 0) {
    // Consumer cards of capability 12.x take the portable path, like those below 9.0.
    const bool has_clusters = device.capability >= 90 && device.capability < 120;
    for (size_t i = 0; i < of.size(); ++i) {
      of[i] = kClusterSizes[i] == 1 || has_clusters ? resident_clusters(head_dim, kClusterSizes[i]) : 0;
    }
  }
  return of;
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

DecodeGrid decode_grid(int num_seqs, int kv_heads, int head_dim) {
  const std::array<int, 4>& fits = resident(head_dim);
  const int pairs = num_seqs * kv_heads;
  // The largest clusters that fit merge fastest. Smaller ones only where they use most of the device: single blocks use
  // all of it, at the price of a merge through memory.
  for (size_t i = 0; i < 3; ++i) {
    const int cluster = kClusterSizes[i];
    if (pairs <= fits[i] && (i == 0 || 10 * pairs * cluster >= 6 * fits[3])) return {8, cluster, fits[i]};
  }
  const int single = std::max(fits[3] / kv_heads, 1) * kv_heads;  // a multiple of the heads: see plan_stretches
  return {head_dim == 64 ? 4 : 8, 1, single};
}

DecodeWorkspace::DecodeWorkspace(const DecodeGrid& grid, int num_seqs, int kv_heads, int group, int head_dim) {
  const auto clusters = static_cast<size_t>(grid.clusters);
  require(clusters * grid.cluster <= kTickets, "paged_attention: more thread blocks than tickets");
  tickets = 0;
  plan = kTickets * sizeof(int);
  empties = plan + aligned((clusters + static_cast<size_t>(num_seqs) * kv_heads) * sizeof(Split));
  stats = empties + aligned(num_seqs * sizeof(int));
  outputs = stats + aligned(2 * clusters * grid.cluster * kMaxGroup * sizeof(float2));
  bytes = outputs + aligned(2 * clusters * group * head_dim * sizeof(float));
}

size_t paged_attention_workspace_bytes(int32_t max_seqs, int32_t q_heads, int32_t kv_heads, int32_t head_dim) {
  size_t bytes = 0;
  for (int seqs = 1; seqs <= max_seqs; ++seqs) {
    const DecodeGrid grid = decode_grid(seqs, kv_heads, head_dim);
    bytes = std::max(bytes, DecodeWorkspace(grid, seqs, kv_heads, q_heads / kv_heads, head_dim).bytes);
  }
  return aligned(bytes) + PrefillWorkspace(head_dim).bytes;
}

void plan_decode(const DecodeGrid& grid, const PlanAttentionArgs& args) {
  require(args.num_seqs <= kMaxSeqs, "plan_attention: more than 4096 sequences");
  const DecodeWorkspace layout(grid, args.num_seqs, args.kv_heads, args.q_heads / args.kv_heads, args.head_dim);
  require(args.workspace != nullptr && args.workspace_bytes >= layout.bytes, "plan_attention: workspace too small");
  const int least_steps = (std::max(args.least_tokens, 0) + kStepTokens - 1) / kStepTokens;
  const PlanInputs inputs{args.context_lens, args.num_seqs, args.kv_heads, grid, current_device().multiprocessors,
                          least_steps};
  const size_t shared_bytes = 2 * sizeof(int) * static_cast<size_t>(args.num_seqs);
  char* workspace = static_cast<char*>(args.workspace);
  launch_kernel("plan_attention", plan_kernel, {.grid = dim3(1), .block = dim3(kThreads), .shared_bytes = shared_bytes},
                args.launch, inputs, reinterpret_cast<Split*>(workspace + layout.plan),
                reinterpret_cast<int*>(workspace + layout.empties));
}

void plan_attention(const PlanAttentionArgs& args) {
  if (args.num_seqs == 0) return;
  plan_decode(decode_grid(args.num_seqs, args.kv_heads, args.head_dim), args);
}

}  // namespace octavo::gpu
