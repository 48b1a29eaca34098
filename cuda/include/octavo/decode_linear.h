// The matmuls of a decode step, for 1 to 64 rows: each fused with what stands around it, so that a layer is four of
// these beside its attention. Weights are row-major [out][in], as torch holds them; sums are fp32, in an order that
// depends on the weight's shape only: a row's result depends neither on the other rows nor on how many there are.
#pragma once

#include "octavo/paged_attention.h"
#include "octavo/tensor.h"

namespace octavo {

constexpr int32_t kMaxDecodeBatch = 64;

// The residual stream of one decode step. `decode_start` and `decode_linear_add` write all three buffers, the ops with
// a norm read the last two: RMSNorm(residual) * weight = scaled / rms(residual), and the division comes after the
// matmul.
struct DecodeStream {
  float* residual;     // [batch][hidden]
  void* scaled;        // [batch][hidden] in the model's dtype: residual * weight of the next RMSNorm (fp16: 1/16 of it)
  float* square_sums;  // [batch][parts]: sums of residual^2 over hidden / parts channels each
  int32_t hidden;
};

enum class DecodeLinear : int32_t { kNormLinear = 0, kNormGateUp = 1, kLinearAdd = 2 };

// residual = x, the embeddings of the step's tokens.
struct DecodeStartArgs {
  DecodeStream stream;
  const void* x;            // [batch][hidden]
  const void* norm_weight;  // [hidden], of the first RMSNorm
  int32_t batch;
  DType dtype;  // of x, norm_weight and stream.scaled
  Launch launch;
};

// The first kernel of a step: the embeddings of its tokens, decode_start of them, and the plan of its attention. Only a
// matmul that `opens_step` may start before it is done.
struct DecodeBeginArgs {
  DecodeStream stream;
  const void* table;         // [vocab, hidden]; ids outside it give zeros
  const int32_t* token_ids;  // [batch]
  const int32_t* sources;    // [batch] or null: >= 0: the id is newest[source], not token_ids'
  const int32_t* newest;     // [any]
  const void* norm_weight;   // [hidden], of the first RMSNorm
  int32_t batch;
  int32_t vocab;
  DType dtype;             // of table, norm_weight and stream.scaled
  PlanAttentionArgs plan;  // its launch is not used
  Launch launch;
};

// decode_norm_linear: out = RMSNorm(residual) W^T, for the QKV projection and the LM head.
// decode_norm_gate_up: out = silu(gate) * up with [gate, up] = RMSNorm(residual) W^T.
struct DecodeNormLinearArgs {
  void* out;  // [batch][out_features]
  DecodeStream stream;
  const void* weight;  // [out_features][hidden]; decode_norm_gate_up: [2 * out_features][hidden], gate rows first
  float eps;
  int32_t batch;
  int32_t out_features;
  DType out_dtype;  // dtype, or kFloat32 (decode_norm_linear only)
  DType dtype;      // of weight and stream.scaled
  bool portable;    // the kernel of GPUs before sm_90 on any GPU, for tests; its sums may be in another order
  // For the LM head in fp32, where decode_head_finds_best; else null. best [batch], zero before: the largest of the
  // first `vocab` results of each row, packed (octavo/random.h), for `sample`. wanted [batch] or null: rows with 0 are
  // not stored in `out`.
  uint64_t* best;
  const int32_t* wanted;
  int32_t vocab;
  // Of a step's first matmul, behind decode_begin: lets no kernel start before that one is done, as what follows reads
  // its plan early.
  bool opens_step;
  Launch launch;
};

// residual += x W^T, for the output and down projections.
struct DecodeLinearAddArgs {
  DecodeStream stream;
  const void* x;            // [batch][in_features]
  const void* weight;       // [hidden][in_features]
  const void* norm_weight;  // [hidden], of the RMSNorm that comes next
  int32_t batch;
  int32_t in_features;
  DType dtype;  // of x, weight, norm_weight and stream.scaled
  bool portable;
  Ahead ahead;
  Launch launch;
};

namespace gpu {
// Whether the current device serves this matmul: 16-bit dtype, batch 1 to 64, in_features a multiple of 64,
// out_features (for kLinearAdd: hidden) of 8, and tiles that fit its shared memory. If not, use another kernel.
bool decode_linear_supported(DecodeLinear op, int64_t out_features, int64_t in_features, int64_t batch, DType dtype);
// Whether decode_norm_linear of this shape can give `best`.
bool decode_head_finds_best(int64_t out_features, int64_t in_features, int64_t batch, DType dtype);
// The `parts` of DecodeStream::square_sums.
int32_t decode_square_sum_parts(int32_t hidden);
void decode_start(const DecodeStartArgs& args);
void decode_begin(const DecodeBeginArgs& args);
void decode_norm_linear(const DecodeNormLinearArgs& args);
void decode_norm_gate_up(const DecodeNormLinearArgs& args);
void decode_linear_add(const DecodeLinearAddArgs& args);
}  // namespace gpu

}  // namespace octavo
