// Paged attention: checks, then the decode or the prefill kernel of the head_dim.
#include "octavo/paged_attention.h"

#include "gpu/decode_plan.cuh"
#include "gpu/launch.cuh"
#include "gpu/prefill.cuh"

namespace octavo::gpu {
namespace {

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

const void* at_layer(const KvPool& pool, int32_t layer) {
  return static_cast<const uint16_t*>(pool.data) + layer * pool.layer_stride();
}

void decode(const PagedAttentionArgs& args, int group) {
  const KvPool& pool = args.pool;
  const DecodeGrid grid = decode_grid(args.num_seqs, pool.kv_heads, pool.head_dim);
  const DecodeWorkspace layout(grid, group, pool.head_dim);
  require(args.workspace != nullptr && args.workspace_bytes >= layout.bytes, "paged_attention: workspace too small");
  Launch launch = args.launch;
  if (!args.planned) {
    plan_attention({args.context_lens, args.num_seqs, args.q_heads, pool.kv_heads, pool.head_dim, 0, args.workspace,
                    args.workspace_bytes, launch});
    launch.pdl = false;  // the plan is read before the wait
  }
  char* workspace = static_cast<char*>(args.workspace);
  const Decode decode{args.out,
                      args.query,
                      at_layer(pool, args.layer),
                      pool.block_stride(),
                      pool.kv_stride(),
                      args.block_tables,
                      args.max_blocks_per_seq,
                      reinterpret_cast<const Split*>(workspace + layout.plan),
                      grid.capacity,
                      reinterpret_cast<int*>(workspace + layout.tickets),
                      reinterpret_cast<float2*>(workspace + layout.stats),
                      reinterpret_cast<float4*>(workspace + layout.outputs),
                      args.scale * kLog2E,
                      args.q_heads,
                      group};
  with_head_dim(pool.head_dim, [&]<int kDim>() { DecodeKernels<kDim>::launch(pool.dtype, grid, decode, launch); });
}

void prefill(const PagedAttentionArgs& args, int group) {
  const KvPool& pool = args.pool;
  const Prefill prefill{args.out,
                        args.query,
                        at_layer(pool, args.layer),
                        pool.block_stride(),
                        pool.kv_stride(),
                        args.block_tables,
                        args.max_blocks_per_seq,
                        args.query_start,
                        args.context_lens,
                        args.num_seqs,
                        args.scale * kLog2E,
                        args.q_heads,
                        group};
  with_head_dim(pool.head_dim, [&]<int kDim>() {
    PrefillKernels<kDim>::launch(pool.dtype, prefill, pool.kv_heads, args.num_tokens, args.launch);
  });
}

}  // namespace

void paged_attention(const PagedAttentionArgs& args) {
  const int group = args.q_heads / args.pool.kv_heads;
  require(group >= 1 && group <= kMaxGroup && group * args.pool.kv_heads == args.q_heads,
          "paged_attention: q_heads must be 1 to 8 times kv_heads");
  require(args.pool.block_size == kBlockTokens, "paged_attention: block_size must be 16");
  if (args.num_seqs == 0 || args.num_tokens == 0) return;
  args.max_query_len == 1 ? decode(args, group) : prefill(args, group);
}

}  // namespace octavo::gpu
