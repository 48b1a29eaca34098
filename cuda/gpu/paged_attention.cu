// Paged attention: checks, then the decode or the prefill kernel of the head_dim.
#include "octavo/paged_attention.h"

#include <algorithm>

#include "gpu/decode_plan.cuh"
#include "gpu/launch.cuh"
#include "gpu/prefill.cuh"

namespace octavo::gpu {
namespace {

constexpr int kManySeqs = 48;
constexpr float kLog2E = 1.4426950408889634f;

template <class F>
void with_head_dim(int head_dim, const F& f) {
  switch (head_dim) {
    case 64:
      return f.template operator()<64>();
    case 80:
      return f.template operator()<80>();
    case 96:
      return f.template operator()<96>();
    case 128:
      return f.template operator()<128>();
    default:
      throw OpError("paged_attention: head_dim must be 64, 80, 96 or 128");
  }
}

void* at_layer(const KvPool& pool, int32_t layer) {
  return static_cast<uint16_t*>(pool.data) + layer * pool.layer_stride();
}

int checked_group(const KvPool& pool, int32_t q_heads) {
  const int group = q_heads / pool.kv_heads;
  require(group >= 1 && group <= kMaxGroup && group * pool.kv_heads == q_heads,
          "paged_attention: q_heads must be 1 to 8 times kv_heads");
  require(pool.block_size == kBlockTokens, "paged_attention: block_size must be 16");
  return group;
}

// What both decode ops have in common. `query` and its stride, and all that `writes` needs, are the caller's to add.
template <class Args>
void decode(const Args& args, Decode decode) {
  const KvPool& pool = args.pool;
  const int group = checked_group(pool, args.q_heads);
  const DecodeGrid grid = decode_grid(args.num_seqs, pool.kv_heads, pool.head_dim, args.fixed);
  const DecodeWorkspace layout(grid, args.num_seqs, pool.kv_heads, group, pool.head_dim);
  require(args.workspace != nullptr && args.workspace_bytes >= layout.bytes, "paged_attention: workspace too small");
  Launch launch = args.launch;
  if (!args.planned) {
    plan_attention({args.context_lens, args.num_seqs, args.q_heads, pool.kv_heads, pool.head_dim, 0, args.fixed,
                    args.workspace, args.workspace_bytes, launch});
  }
  char* workspace = static_cast<char*>(args.workspace);
  decode.out = args.out;
  decode.pool = at_layer(pool, args.layer);
  decode.block_stride = pool.block_stride();
  decode.value_offset = pool.kv_stride();
  decode.block_tiles = 2 * pool.layers * pool.kv_heads;
  decode.block_tables = args.block_tables;
  decode.max_blocks = args.max_blocks_per_seq;
  decode.plan = reinterpret_cast<const Split*>(workspace + layout.plan);
  decode.empties = reinterpret_cast<const int*>(workspace + layout.empties);
  decode.tickets = reinterpret_cast<int*>(workspace + layout.tickets);
  decode.taken = reinterpret_cast<int*>(workspace + layout.taken);
  decode.stats = reinterpret_cast<float2*>(workspace + layout.stats);
  decode.outputs = reinterpret_cast<float4*>(workspace + layout.outputs);
  decode.scale_log2 = args.scale * kLog2E;
  decode.q_heads = args.q_heads;
  decode.kv_heads = pool.kv_heads;
  decode.group = group;
  // Where thread blocks start beside the QKV projection's, or KV takes far longer than the projection. Elsewhere KV on
  // its way early only delays the rows that the projection writes.
  decode.reads_early = grid.key_steps == 1 || pool.head_dim <= 64 || args.num_seqs > kManySeqs;
  with_head_dim(pool.head_dim, [&]<int kDim>() { DecodeKernels<kDim>::launch(pool, grid, decode, launch); });
}

// Spread over all of it, since every block of the matmul begins with rows of its own.
void set_ahead(Decode& decode, const DecodeAttentionArgs& args) {
  constexpr int64_t kLine = 128, kPieceBytes = 4096;
  require(reinterpret_cast<uintptr_t>(args.ahead.data) % 16 == 0, "decode_attention: ahead must be 16-byte aligned");
  const DecodeGrid grid = decode_grid(args.num_seqs, args.pool.kv_heads, args.pool.head_dim, args.fixed);
  const int64_t pieces = int64_t{grid.clusters} * grid.cluster * kIdlePieces;
  decode.ahead = static_cast<const char*>(args.ahead.data);
  decode.ahead_stride = static_cast<int>(args.ahead.bytes / pieces / kLine * kLine);
  decode.ahead_bytes = static_cast<int>(std::min<int64_t>(kPieceBytes, decode.ahead_stride));
}

void prefill(const PagedAttentionArgs& args) {
  const KvPool& pool = args.pool;
  const int group = checked_group(pool, args.q_heads);
  Prefill prefill{};
  prefill.out = args.out;
  prefill.query = args.query;
  prefill.pool = at_layer(pool, args.layer);
  prefill.layer = args.layer;
  prefill.block_stride = pool.block_stride();
  prefill.value_offset = pool.kv_stride();
  prefill.block_tables = args.block_tables;
  prefill.max_blocks = args.max_blocks_per_seq;
  prefill.query_start = args.query_start;
  prefill.context_lens = args.context_lens;
  prefill.num_seqs = args.num_seqs;
  prefill.scale_log2 = args.scale * kLog2E;
  prefill.q_heads = args.q_heads;
  prefill.kv_heads = pool.kv_heads;
  prefill.group = group;
  const PrefillWorkspace layout(pool.head_dim);
  if (layout.blocks > 0) {
    require(args.workspace != nullptr, "paged_attention: workspace too small");
    char* workspace = static_cast<char*>(args.workspace) + prefill_workspace_at(layout, args.workspace_bytes);
    if (!args.planned) {
      plan_prefill({args.query_start, args.context_lens, args.num_seqs, args.q_heads, pool.kv_heads, pool.head_dim,
                    args.workspace, args.workspace_bytes, args.launch});
    }
    prefill.blocks = layout.blocks;
    prefill.cuts = reinterpret_cast<const PrefillCut*>(workspace + layout.cuts);
    prefill.tickets = reinterpret_cast<int*>(workspace + layout.tickets);
    prefill.stats = reinterpret_cast<float4*>(workspace + layout.stats);
    prefill.outputs = reinterpret_cast<float4*>(workspace + layout.outputs);
  }
  with_head_dim(pool.head_dim,
                [&]<int kDim>() { PrefillKernels<kDim>::launch(prefill, pool, args.num_tokens, args.launch); });
}

}  // namespace

void paged_attention(const PagedAttentionArgs& args) {
  if (args.num_seqs == 0 || args.num_tokens == 0) return;
  if (args.max_query_len > 1) return prefill(args);
  Decode queries{};
  queries.query = args.query;
  queries.query_stride = static_cast<int64_t>(args.q_heads) * args.pool.head_dim;
  decode(args, queries);
}

void decode_attention(const DecodeAttentionArgs& args) {
  if (args.num_seqs == 0) return;
  require(args.qkv_stride % 2 == 0, "decode_attention: the row stride of qkv must be even");
  Decode rows{};
  rows.query = args.qkv;
  rows.query_stride = args.qkv_stride;
  rows.writes = true;
  rows.bias = args.bias;
  rows.q_norm_weight = args.q_norm_weight;
  rows.k_norm_weight = args.k_norm_weight;
  rows.norm_eps = args.norm_eps;
  rows.cos_sin = args.cos_sin;
  set_ahead(rows, args);
  decode(args, rows);
}

}  // namespace octavo::gpu
