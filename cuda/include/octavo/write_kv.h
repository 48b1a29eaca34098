// The step between the QKV projection and attention: bias, QK-norm, RoPE, and the write of K and V into the pool.
// Order per head, as in Hugging Face: bias, then RMSNorm over head_dim (Qwen3), then rotation of the two halves.
#pragma once

#include "octavo/tensor.h"

namespace octavo {

struct WriteKvArgs {
  void* query_out;            // [num_tokens, q_heads, head_dim], contiguous
  const void* qkv;            // [num_tokens, (q_heads + 2 kv_heads) * head_dim], row stride qkv_stride
  int64_t qkv_stride;         // elements
  const void* bias;           // [(q_heads + 2 kv_heads) * head_dim] or null
  const void* q_norm_weight;  // [head_dim] or null
  const void* k_norm_weight;  // [head_dim] or null
  float norm_eps;
  const float* cos_sin;  // [max_positions, rotary_dim]: rotary_dim/2 cosines, then rotary_dim/2 sines
  int32_t max_positions;
  int32_t rotary_dim;        // <= head_dim; the rest passes through
  const int32_t* positions;  // [num_tokens]
  const int64_t* slots;      // [num_tokens], block * block_size + offset; -1 writes nothing
  KvPool pool;               // qkv, query_out, bias, norm weights and pool have one dtype
  int32_t layer;
  int32_t num_tokens;
  int32_t q_heads;
  Launch launch;
};

namespace cpu {
void write_kv(const WriteKvArgs& args);
}
namespace gpu {
void write_kv(const WriteKvArgs& args);
}

}  // namespace octavo
