// The device side of the plan of a decode step's attention: one thread block. See decode_plan.cu.
#pragma once

#include <cfloat>

#include "gpu/decode_plan.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu::decode_plan {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kCandidates = 64;  // ways of cutting that are priced: two a warp
constexpr unsigned kAll = ~0u;

// Costs in steps of a multiprocessor that gets its fair share of the bus. Fitted on an H200; see cuda/bench/LOG.md.
constexpr float kAloneRate = 1.7f;   // how much faster a multiprocessor streams when it is nearly alone
constexpr float kSharedRate = 1.3f;  // the same for one of several blocks on it
constexpr float kImbalance = 0.1f;   // of a block's share
constexpr float kMergeParts = 1.5f;  // tickets, and reading back partial results
constexpr float kNextSplit = 8.0f;   // a block's second split: nothing of it is fetched before the first is done

// In rounds of a block's warps: from which stretch on a part of it is left for pieces, sixteenths that it keeps, and
// the least piece.
constexpr int kLongStretch = 40;
constexpr int kStretched = 15;
constexpr int kLeastPiece = 4;

struct PlanInputs {
  const int* context_lens;
  int num_seqs;
  int kv_heads;
  DecodeGrid grid;
  int multiprocessors;
  int least_steps;  // of a split; 0: chosen here
  Split* plan;
  int* empty_seqs;
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int round_up(int a, int b) { return divide_up(a, b) * b; }

// Sums of the values before each thread's, over the thread block; `total` gets the sum of all.
__device__ inline int exclusive_sum(int value, int& total) {
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

// ---- single blocks: equal stretches, and pieces

// Share i of head h is block i * kv_heads + h's, or a piece of that number. Its first split is entry i * kv_heads + h
// of the plan; the only other kind is part 0 of a pair behind another pair's end, in the entries that follow. Steps of
// a stretch: the same for all, rounded up so that every warp has as many.
__device__ __forceinline__ int stretch_of(int all, const PlanInputs& in) {
  const int fair = round_up(divide_up(all, in.grid.clusters / in.kv_heads), in.grid.warps);
  return max(max(fair, in.least_steps), in.grid.warps);
}

// How one head's steps, all contexts laid end to end, are cut into shares: stretches, one a block, then pieces, which
// blocks take as they get there. Multiprocessors do not all get the same share of the bus: where a stretch is long,
// blocks of equal stretches end far apart.
struct Shares {
  int stretches, stretch, pieces, piece;

  __device__ __forceinline__ Shares(int all, const PlanInputs& in) {
    const int most = in.grid.clusters / in.kv_heads, round = in.grid.warps;
    stretch = stretch_of(all, in);
    stretches = divide_up(all, stretch);
    pieces = 0;
    piece = stretch;
    if (stretch < kLongStretch * round || stretch <= in.least_steps) return;
    stretch = all / most * kStretched / (16 * round) * round;
    stretches = most;
    const int rest = all - stretches * stretch;
    piece = max(round_up(divide_up(rest, kPiecesABlock * most), round), kLeastPiece * round);
    pieces = divide_up(rest, piece);
  }

  __device__ __forceinline__ int count() const { return stretches + pieces; }
  __device__ __forceinline__ int begin(int share) const {
    return min(share, stretches) * stretch + max(share - stretches, 0) * piece;
  }
  // That which has this step.
  __device__ __forceinline__ int at(int step) const {
    const int behind = step - stretches * stretch;
    return behind < 0 ? step / stretch : stretches + behind / piece;
  }
};

__device__ inline void plan_stretches(const Context& c) {
  const PlanInputs& in = c.in;
  const int heads = in.kv_heads;
  const int all = sum_before(c.before, in.num_seqs, [&](int s) { return c.steps[s]; });
  const Shares shares(all, in);
  const int used = shares.count() * heads, blocks = max(in.grid.clusters, used);
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
    const int first = shares.at(start), parts = shares.at(start + steps - 1) - first + 1;
    for (int i = lane; i < parts * heads; i += 32) {
      const int part = i / heads, head = i % heads;
      const int share = first + part, share_end = min(shares.begin(share + 1), all);
      const int begin = max(start, shares.begin(share)), end = min(start + steps, share_end);
      const int entry = begin == shares.begin(share) ? share * heads + head : blocks + s * heads + head;
      c.plan[entry] = {static_cast<int16_t>(s),
                       static_cast<int16_t>(head),
                       begin - start,
                       end - start,
                       in.context_lens[s],
                       first * heads + head,
                       static_cast<int16_t>(part),
                       static_cast<int16_t>(parts),
                       end == share_end ? -1 - shares.pieces * heads : blocks + after * heads + head,
                       c.empties};
    }
  }
}

// ---- one part of one pair each: always for clusters

__device__ __forceinline__ int parts_of(int steps, int size) { return divide_up(steps, size); }

// Of a single block's steps, were the other multiprocessors done. Of several blocks on one, each has its share of it,
// and its last round of steps takes as long as any.
__device__ __forceinline__ float alone_cost(int steps, const PlanInputs& in) {
  const int blocks = in.grid.clusters / in.multiprocessors;
  if (blocks < 2) return static_cast<float>(steps) / kAloneRate;
  return static_cast<float>(round_up(steps, in.grid.warps) * blocks) / kSharedRate;
}

__device__ inline float cost(int size, int parts, int pairs, int all, const PlanInputs& in) {
  const float share = static_cast<float>(all) / static_cast<float>(in.multiprocessors);
  const float of_block = static_cast<float>(size) / static_cast<float>(in.grid.cluster);
  const float alone = in.grid.cluster > 1 ? of_block / kAloneRate : alone_cost(size, in);
  return fmaxf(share + kImbalance * of_block, alone) + (parts > pairs ? kMergeParts : 0.0f);
}

// Steps of the largest part: the cheapest of cutting the longest context into 1 to 64 parts that all fit. 0: none fits,
// or equal stretches are cheaper.
__device__ inline int choose_size(const Context& c) {
  __shared__ float costs[kCandidates];
  __shared__ int sizes[kCandidates];
  const PlanInputs& in = c.in;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // All warps of a cluster take a step. Single blocks are many: rounding would leave some of them without work.
  const int least = in.grid.cluster * in.grid.warps, round = in.grid.cluster > 1 ? least : 1;
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
    const int size = max(round_up(max(divide_up(longest, candidate + 1), in.least_steps), round), least);
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
  const unsigned cheapest = __reduce_min_sync(kAll, min(lower, upper));
  if (in.grid.cluster == 1) {
    const float share = static_cast<float>(all) / static_cast<float>(in.multiprocessors);
    const float alone = alone_cost(stretch_of(all / in.kv_heads, in), in);
    const float stretches = fmaxf(share, alone) + kNextSplit + kMergeParts;
    if (!(__uint_as_float(cheapest) < stretches)) return 0;
  }
  return sizes[__reduce_min_sync(kAll, lower == cheapest ? lane : upper == cheapest ? lane + 32 : kCandidates)];
}

__device__ inline void plan_parts(const Context& c, int size) {
  const PlanInputs& in = c.in;
  const int used = sum_before(c.before, in.num_seqs, [&](int s) { return parts_of(c.steps[s], size); }) * in.kv_heads;
  for (int cluster = used + threadIdx.x; cluster < in.grid.clusters; cluster += kThreads) {
    c.plan[cluster].seq = -1;
    c.plan[cluster].empties = c.empties;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int s = warp; s < in.num_seqs; s += kWarps) {
    const int parts = parts_of(c.steps[s], size);
    for (int i = lane; i < parts * in.kv_heads; i += 32) {
      // Clusters: the parts of a pair follow each other; single blocks: the heads of a part do.
      const bool by_head = in.grid.cluster > 1;
      const int head = by_head ? i / parts : i % in.kv_heads, part = by_head ? i % parts : i / in.kv_heads;
      const int first = c.before[s] * in.kv_heads + (by_head ? head * parts : head);
      const auto cut = [&](int at) { return static_cast<int>(static_cast<int64_t>(c.steps[s]) * at / parts); };
      c.plan[first + part * (by_head ? 1 : in.kv_heads)] = {
          static_cast<int16_t>(s),    static_cast<int16_t>(head),  cut(part), cut(part + 1), in.context_lens[s], first,
          static_cast<int16_t>(part), static_cast<int16_t>(parts), -1,        c.empties};
    }
  }
}

// ---- parts that depend on a context's own length alone

// Steps of each part but the last of a context: two for every warp, more where that would be too many parts.
__device__ __forceinline__ int fixed_size(int steps, const DecodeGrid& grid) {
  const int round = 2 * grid.warps;
  return max(round, round_up(divide_up(steps, grid.fixed_parts), round));
}

// Entry i is read by block i modulo the grid, which goes on to its next one; the heads of a part follow each other.
__device__ inline void plan_fixed(const Context& c) {
  const PlanInputs& in = c.in;
  const auto parts_of_seq = [&](int s) { return parts_of(c.steps[s], fixed_size(c.steps[s], in.grid)); };
  const int all = sum_before(c.before, in.num_seqs, parts_of_seq) * in.kv_heads;
  for (int block = all + threadIdx.x; block < in.grid.clusters; block += kThreads) {
    c.plan[block].seq = -1;
    c.plan[block].empties = c.empties;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int s = warp; s < in.num_seqs; s += kWarps) {
    const int steps = c.steps[s], size = fixed_size(steps, in.grid), parts = parts_of_seq(s);
    const int base = c.before[s] * in.kv_heads;
    for (int i = lane; i < parts * in.kv_heads; i += 32) {
      const int part = i / in.kv_heads, head = i % in.kv_heads, next = base + i + in.grid.clusters;
      c.plan[base + i] = {static_cast<int16_t>(s),
                          static_cast<int16_t>(head),
                          part * size,
                          min((part + 1) * size, steps),
                          in.context_lens[s],
                          base + head,
                          static_cast<int16_t>(part),
                          static_cast<int16_t>(parts),
                          next < all ? next : -1,
                          c.empties};
    }
  }
}

// One thread block of kThreads, with 2 * num_seqs ints of dynamic shared memory.
__device__ __forceinline__ void make_plan(const PlanInputs& in, int* seq_arrays) {
  __shared__ int empties;
  int* steps = seq_arrays;
  if (threadIdx.x == 0) empties = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < in.num_seqs; s += kThreads) {
    steps[s] = divide_up(max(in.context_lens[s], 0), kStepTokens);
    if (steps[s] == 0) in.empty_seqs[atomicAdd(&empties, 1)] = s;
  }
  __syncthreads();
  const Context context{in, steps, steps + in.num_seqs, in.plan, empties};
  if (in.grid.fixed_parts > 0) {
    plan_fixed(context);
  } else {
    const int size = choose_size(context);
    size > 0 ? plan_parts(context, size) : plan_stretches(context);
  }
}

}  // namespace octavo::gpu::decode_plan

namespace octavo::gpu {

// Checked.
decode_plan::PlanInputs plan_inputs(const DecodeGrid& grid, const PlanAttentionArgs& args);

}  // namespace octavo::gpu
