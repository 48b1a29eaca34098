// Paged attention: softmax(scale * Q K^T) V over the block-major pool, causal, bottom-right aligned, grouped-query.
// One op for decode (one query token a sequence) and chunked prefill (any number); a sequence's queries are the last
// query_start[s+1]-query_start[s] of its context_lens[s] tokens, whose K and V are already in the pool.
#pragma once

#include <cstddef>

#include "octavo/tensor.h"

namespace octavo {

struct PagedAttentionArgs {
  void* out;          // [num_tokens, q_heads, head_dim], contiguous
  const void* query;  // [num_tokens, q_heads, head_dim], contiguous, rotated
  KvPool pool;        // out, query and pool have one dtype
  int32_t layer;
  const int32_t* block_tables;  // [num_seqs, max_blocks_per_seq]
  const int32_t* query_start;   // [num_seqs + 1], prefix sums of the query lengths
  const int32_t* context_lens;  // [num_seqs], tokens in the cache including this step's; 0 writes zeros
  int32_t num_seqs;
  int32_t num_tokens;  // rows of query; query_start[num_seqs] <= num_tokens
  int32_t max_blocks_per_seq;
  int32_t max_query_len;  // 1: every sequence has exactly one query token (decode)
  int32_t q_heads;
  float scale;
  void* workspace;  // gpu only: paged_attention_workspace_bytes(...) bytes, zeroed once at allocation
  size_t workspace_bytes;
  bool planned;  // gpu only: plan_attention (decode) or plan_prefill has run for these lengths; else the op runs it
  bool fixed;    // gpu decode only: as in PlanAttentionArgs, with which it must agree
  Launch launch;
};

// Shares a decode batch out over the GPU, on the device. The plan goes into the workspace and serves every layer of the
// step: run it once, when context_lens is final, and call paged_attention with `planned`.
struct PlanAttentionArgs {
  const int32_t* context_lens;  // [num_seqs]
  int32_t num_seqs;             // as in paged_attention; up to 4096
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t least_tokens;  // of a context that a thread block reads on its own; 0: chosen on the device (else for tests)
  bool fixed;  // a sequence's bits depend on itself alone, not on its company: slower, and several times the workspace
  void* workspace;
  size_t workspace_bytes;
  Launch launch;
};

// The same for steps in which a sequence has any number of query tokens: shares prefill attention out over the GPU, for
// all layers. The two plans do not touch each other.
struct PlanPrefillArgs {
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  int32_t num_seqs;             // as in paged_attention; up to 4096
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  void* workspace;
  size_t workspace_bytes;
  Launch launch;
};

// write_kv and paged_attention of a decode step in one: one token a sequence, position context_lens[s] - 1, its slot
// from the block table. A sequence with context length 0 writes nothing and gets zeros.
struct DecodeAttentionArgs {
  void* out;           // [num_seqs, q_heads, head_dim], contiguous
  const void* qkv;     // [num_seqs, (q_heads + 2 kv_heads) * head_dim], row stride qkv_stride
  int64_t qkv_stride;  // elements
  const void* bias;    // as in WriteKvArgs, each or null
  const void* q_norm_weight;
  const void* k_norm_weight;
  float norm_eps;
  const float* cos_sin;  // [max_positions, head_dim]: the whole head rotates
  KvPool pool;           // of the dtype of all the above
  int32_t layer;
  const int32_t* block_tables;  // [num_seqs, max_blocks_per_seq]
  const int32_t* context_lens;  // [num_seqs], including this step's token
  int32_t num_seqs;
  int32_t max_blocks_per_seq;
  int32_t q_heads;
  float scale;
  void* workspace;  // as in PagedAttentionArgs
  size_t workspace_bytes;
  bool planned;
  bool fixed;
  Ahead ahead;  // fetched by thread blocks that have no part of any context
  Launch launch;
};

namespace cpu {
// Any head_dim that is a multiple of 8; fp32 accumulation; fp32 and bf16.
void paged_attention(const PagedAttentionArgs& args);
}  // namespace cpu

namespace gpu {
// head_dim 64, 80, 96 or 128; group q_heads/kv_heads 1..8; block_size 16; bf16 and fp16. Graph-safe.
void paged_attention(const PagedAttentionArgs& args);
void plan_attention(const PlanAttentionArgs& args);
void plan_prefill(const PlanPrefillArgs& args);
void decode_attention(const DecodeAttentionArgs& args);
// Workspace for any batch up to max_seqs sequences: depends on capacities and the current device only.
size_t paged_attention_workspace_bytes(int32_t max_seqs, int32_t q_heads, int32_t kv_heads, int32_t head_dim,
                                       bool fixed);
}  // namespace gpu

}  // namespace octavo
