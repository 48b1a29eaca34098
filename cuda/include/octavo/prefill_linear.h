// The matmuls of a step with many rows, fused with what follows them. Weights are row-major [out][in], as torch holds
// them; sums are fp32 and run along in_features from first to last, whatever the number of rows: a row's result depends
// on that row alone, to the bit.
#pragma once

#include "octavo/tensor.h"
#include "octavo/write_kv.h"

namespace octavo {

enum class PrefillLinear : int32_t {
  kPlain = 0,   // out = x W^T (+ bias)
  kAdd = 1,     // out += x W^T: the residual stream
  kGateUp = 2,  // out = silu(gate) * up with [gate, up] = x W^T: weight [2 * out_features][in], gate rows first
  kQkv = 3,     // what write_kv makes of x W^T; by prefill_qkv
};

struct PrefillLinearArgs {
  PrefillLinear kind;
  void* out;           // [num_tokens][out_features], contiguous
  const void* x;       // [num_tokens][in_features], contiguous
  const void* weight;  // [out_features][in_features]; kGateUp: twice as many rows
  const void* bias;    // [out_features] or null; kPlain only
  int32_t num_tokens;
  int32_t out_features;
  int32_t in_features;
  int32_t tile_columns;  // 0: chosen by shape; 128, 192 or 256 weight rows a tile, for tests and measurements
  DType dtype;           // of all tensors
  Launch launch;
};

// `write_kv` of the rows x W^T, which are never stored: neither its qkv nor the stride is looked at, and bias, norm and
// rotation are of fp32 sums. The whole head rotates: rotary_dim is head_dim.
struct PrefillQkvArgs {
  WriteKvArgs heads;
  const void* x;       // [num_tokens][in_features], contiguous
  const void* weight;  // [(q_heads + 2 kv_heads) * head_dim][in_features]
  int32_t in_features;
  int32_t tile_columns;  // as in PrefillLinearArgs, and a multiple of head_dim
};

namespace gpu {
// What part of the tensor cores' peak the kernel should reach at a shape, by its tiles, rounds and fixed costs. 0: not
// served; that is any device but sm_90a, a 32-bit dtype, or widths that are no multiples of 8.
float prefill_linear_efficiency(PrefillLinear kind, int32_t num_tokens, int32_t out_features, int32_t in_features,
                                DType dtype);
void prefill_linear(const PrefillLinearArgs& args);
// The same of prefill_qkv, which takes heads of 64, 96 and 128.
float prefill_qkv_efficiency(int32_t num_tokens, int32_t qkv_features, int32_t head_dim, int32_t in_features,
                             DType dtype);
void prefill_qkv(const PrefillQkvArgs& args);
}  // namespace gpu

}  // namespace octavo
