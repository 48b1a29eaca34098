// plan_prefill: one thread block cuts a step's prefill attention into equal stretches, once for all layers.
#include "gpu/prefill_plan.cuh"

#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxSeqs = 4096;
constexpr int kTileCost = 2;  // of a tile of query rows, beside its tiles of keys
constexpr unsigned kAll = ~0u;

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

__device__ __forceinline__ int warp_sum(int value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(kAll, value, lane);
  return value;
}

__device__ __forceinline__ int inclusive_sum(int value, int lane) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int lower = __shfl_up_sync(kAll, value, lanes);
    if (lane >= lanes) value += lower;
  }
  return value;
}

__device__ __forceinline__ int tile_cost(const PrefillSequences& sequences, int query_len, int context_len, int tile,
                                         int tiles) {
  return tile < tiles ? sequences.key_tiles(query_len, context_len, tile) + kTileCost : 0;
}

// A warp finds what lies at `place` of one KV head's work. Cuts within `least` tiles of keys of a tile's ends move
// there.
__device__ PrefillCut cut_at(const PrefillSequences& sequences, const int* before, int head, int place, int least) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = sequences.num_seqs - 1;  // the last sequence that begins at or before `place`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (before[middle] <= place) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int seq = low;
  const int query_len = sequences.query_len(seq), context_len = __ldg(sequences.context_lens + seq);
  const int tiles = sequences.tiles(query_len);
  int rest = place - before[seq];
  for (int first = 0; first < tiles; first += 32) {
    const int cost = tile_cost(sequences, query_len, context_len, first + lane, tiles);
    const int through = inclusive_sum(cost, lane);
    const unsigned past = __ballot_sync(kAll, through > rest);
    if (past == 0) {
      rest -= __shfl_sync(kAll, through, 31);
      continue;
    }
    const int owner = __ffs(past) - 1;
    const int in_tile = rest - __shfl_sync(kAll, through - cost, owner);
    const int keys = __shfl_sync(kAll, cost, owner) - kTileCost;
    PrefillCut cut{head, seq, first + owner, max(0, in_tile - kTileCost)};
    if (cut.key <= least) {
      cut.key = 0;
    } else if (keys - cut.key <= least) {
      ++cut.tile;
      cut.key = 0;
    }
    return sequences.normal(cut);
  }
  return sequences.normal({head, seq, tiles, 0});
}

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const PrefillSequences sequences, PrefillCut* cuts, int blocks) {
  __shared__ int before[kMaxSeqs + 1];  // cost of the sequences before each, in one KV head's work
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ptx::wait_for_previous_kernel();
  for (int seq = warp; seq < sequences.num_seqs; seq += kThreads / 32) {
    const int query_len = sequences.query_len(seq), context_len = __ldg(sequences.context_lens + seq);
    const int tiles = sequences.tiles(query_len);
    int cost = 0;
    for (int tile = lane; tile < tiles; tile += 32) {
      cost += tile_cost(sequences, query_len, context_len, tile, tiles);
    }
    cost = warp_sum(cost);
    if (lane == 0) before[seq] = cost;
  }
  __syncthreads();
  if (warp == 0) {
    int total = 0;
    for (int first = 0; first < sequences.num_seqs; first += 32) {
      const int cost = first + lane < sequences.num_seqs ? before[first + lane] : 0;
      const int through = inclusive_sum(cost, lane);
      if (first + lane < sequences.num_seqs) before[first + lane] = total + through - cost;
      total += __shfl_sync(kAll, through, 31);
    }
    if (lane == 0) before[sequences.num_seqs] = total;
  }
  __syncthreads();
  const int of_head = before[sequences.num_seqs];
  const int64_t all = static_cast<int64_t>(of_head) * sequences.kv_heads;
  const int used = static_cast<int>(min(static_cast<int64_t>(blocks), all));
  for (int block = warp; block <= blocks; block += kThreads / 32) {
    PrefillCut cut{sequences.kv_heads, 0, 0, 0};
    if (block < used) {
      const int64_t place = block * all / used;
      const int least = min(2, static_cast<int>(all / used / 8));
      cut = cut_at(sequences, before, static_cast<int>(place / of_head), static_cast<int>(place % of_head), least);
    }
    if (lane == 0) cuts[block] = cut;
  }
}

}  // namespace

PrefillWorkspace::PrefillWorkspace(int head_dim) : blocks(0), tickets(0), cuts(0), stats(0), outputs(0), bytes(0) {
  if (!current_device().has_warpgroups || head_dim % 64 != 0) return;
  blocks = current_device().multiprocessors;
  const size_t parts = 2 * static_cast<size_t>(blocks);  // a block has at most two: its first tile's and its last's
  cuts = aligned(parts * sizeof(int));
  stats = cuts + aligned((blocks + 1) * sizeof(PrefillCut));
  outputs = stats + aligned(parts * 256 * 4 * sizeof(float));
  bytes = outputs + aligned(parts * kPrefillTileRows * head_dim * sizeof(float));
}

size_t prefill_workspace_at(const PrefillWorkspace& layout, size_t workspace_bytes) {
  require(workspace_bytes >= layout.bytes, "paged_attention: workspace too small");
  return (workspace_bytes - layout.bytes) / 256 * 256;
}

void plan_prefill(const PlanPrefillArgs& args) {
  const PrefillWorkspace layout(args.head_dim);
  if (args.num_seqs == 0 || layout.blocks == 0) return;
  require(args.num_seqs <= kMaxSeqs, "plan_prefill: more than 4096 sequences");
  require(args.workspace != nullptr, "plan_prefill: workspace too small");
  char* workspace = static_cast<char*>(args.workspace) + prefill_workspace_at(layout, args.workspace_bytes);
  const PrefillSequences sequences{args.query_start, args.context_lens, args.num_seqs, args.kv_heads,
                                   args.q_heads / args.kv_heads};
  launch_kernel("plan_prefill", plan_kernel, {.grid = dim3(1), .block = dim3(kThreads)}, args.launch, sequences,
                reinterpret_cast<PrefillCut*>(workspace + layout.cuts), layout.blocks);
}

}  // namespace octavo::gpu
