// plan_prefill: one thread block cuts a step's prefill attention into stretches, once for all layers.
#include "gpu/prefill_plan.cuh"

#include <algorithm>

#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxSeqs = 4096;
constexpr int kMaxBlocks = 256;
constexpr int kTileCost = 1;            // of a tile of query rows, beside its tiles of keys
constexpr int kWindowBytes = 24 << 20;  // of keys and values that all blocks read at a time: they stay in the L2
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

// A warp finds what lies at `place` of one KV head's work. Cuts within `least` tiles of keys of a tile's ends move to
// the nearer one; `moved`: by how much.
__device__ PrefillCut cut_at(const PrefillSequences& sequences, const int* before, int head, int place, int least,
                             int& moved) {
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
  moved = 0;
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
    const int whole = __shfl_sync(kAll, cost, owner);
    const int keys = whole - kTileCost;
    PrefillCut cut{head, seq, first + owner, max(0, in_tile - kTileCost)};
    if (min(cut.key, keys - cut.key) <= least) {
      const bool later = keys - cut.key < cut.key;
      moved = later ? whole - in_tile : -in_tile;
      cut.tile += later ? 1 : 0;
      cut.key = 0;
    }
    return sequences.normal(cut);
  }
  return sequences.normal({head, seq, tiles, 0});
}

// Stretches of all rounds but the first end where tiles of query rows do; those of the first make up for it.
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const PrefillSequences sequences, PrefillCut* cuts, int blocks, int window_keys) {
  __shared__ int before[kMaxSeqs + 1];                       // cost of the sequences before each, in one KV head's work
  __shared__ int places[(kMaxRounds + 1) * kMaxBlocks + 1];  // where stretches begin, in the work of all heads
  __shared__ int all_keys, longest;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ptx::wait_for_previous_kernel();
  if (threadIdx.x == 0) all_keys = longest = 0;
  __syncthreads();
  for (int seq = warp; seq < sequences.num_seqs; seq += kThreads / 32) {
    const int query_len = sequences.query_len(seq), context_len = __ldg(sequences.context_lens + seq);
    const int tiles = sequences.tiles(query_len);
    int cost = 0, last = 0;
    for (int tile = lane; tile < tiles; tile += 32) {
      last = tile_cost(sequences, query_len, context_len, tile, tiles);
      cost += last;
    }
    cost = warp_sum(cost);
    last = __reduce_max_sync(kAll, last);
    if (lane == 0) {
      before[seq] = cost;
      atomicAdd(&all_keys, last);
      atomicMax(&longest, last);
    }
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
  const int of_head = before[sequences.num_seqs], all = of_head * sequences.kv_heads;
  const int used = min(blocks, all);
  // Stretches are long enough that those of the first round can make up for how far the others' ends move.
  int rounds = min(kMaxRounds, all_keys * sequences.kv_heads / window_keys + 1);
  while (rounds > 1 && rounds * rounds * longest > all / blocks) --rounds;
  const int stretches = rounds * blocks;
  const auto part = [&](int index, int parts) { return static_cast<int>(static_cast<int64_t>(all) * index / parts); };
  const auto cut = [&](int stretch, int place, int least) {
    PrefillCut at{sequences.kv_heads, 0, 0, 0};
    int moved = 0;
    if (place < all) at = cut_at(sequences, before, place / of_head, place % of_head, least, moved);
    if (lane == 0) {
      cuts[stretch] = at;
      places[stretch] = place + moved;
    }
  };
  for (int stretch = blocks + warp; stretch <= stretches; stretch += kThreads / 32) {
    cut(stretch, part(stretch, stretches), all);
  }
  for (int stretch = stretches + 1 + warp; stretch <= stretches + blocks; stretch += kThreads / 32) {
    cut(stretch, all, 0);
  }
  __syncthreads();
  const int least = used > 0 ? min(2, all / used / 8) : 0;
  if (warp == 0) {
    int begin = 0;
    for (int first = 0; first < blocks; first += 32) {
      const int block = first + lane;
      int share = 0;
      if (block < used) {
        share = part(block + 1, used) - part(block, used);
        for (int at = blocks + block; at < stretches; at += blocks) share -= places[at + 1] - places[at];
      }
      const int through = inclusive_sum(share, lane);
      if (block < blocks) places[block] = begin + through - share;
      begin += __shfl_sync(kAll, through, 31);
    }
  }
  __syncthreads();
  for (int block = warp; block < blocks; block += kThreads / 32) cut(block, block < used ? places[block] : all, least);
}

}  // namespace

PrefillWorkspace::PrefillWorkspace(int head_dim) : blocks(0), tickets(0), cuts(0), stats(0), outputs(0), bytes(0) {
  if (!current_device().has_warpgroups || head_dim % 64 != 0) return;
  blocks = std::min(current_device().multiprocessors, kMaxBlocks);
  const size_t parts = 2 * static_cast<size_t>(blocks);  // a block has at most two: its first tile's and its last's
  cuts = aligned(parts * sizeof(int));
  stats = cuts + aligned(((kMaxRounds + 1) * blocks + 1) * sizeof(PrefillCut));
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
                                   kPrefillTileRows / (args.q_heads / args.kv_heads)};
  launch_kernel("plan_prefill", plan_kernel, {.grid = dim3(1), .block = dim3(kThreads)}, args.launch, sequences,
                reinterpret_cast<PrefillCut*>(workspace + layout.cuts), layout.blocks,
                std::max(1, kWindowBytes / (kPrefillTileKeys * args.head_dim * 4)));
}

}  // namespace octavo::gpu
