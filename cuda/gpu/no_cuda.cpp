// What a build without CUDA links instead of the kernels: the same symbols, each a clear error.
#include "octavo/copy_blocks.h"
#include "octavo/decode_linear.h"
#include "octavo/embed.h"
#include "octavo/error.h"
#include "octavo/norm.h"
#include "octavo/paged_attention.h"
#include "octavo/prefill_linear.h"
#include "octavo/sample.h"
#include "octavo/silu_mul.h"
#include "octavo/write_kv.h"

namespace octavo::gpu {
namespace {

[[noreturn]] void refuse(const char* op) {
  throw OpError(std::string(op) + ": tensors are on a GPU, but this build has no CUDA kernels (OCTAVO_CUDA=OFF)");
}

}  // namespace

void paged_attention(const PagedAttentionArgs&) { refuse("paged_attention"); }
size_t paged_attention_workspace_bytes(int32_t, int32_t, int32_t, int32_t, bool) {
  refuse("paged_attention_workspace_bytes");
}
void plan_attention(const PlanAttentionArgs&) { refuse("plan_attention"); }
void plan_prefill(const PlanPrefillArgs&) { refuse("plan_prefill"); }
void decode_attention(const DecodeAttentionArgs&) { refuse("decode_attention"); }
void write_kv(const WriteKvArgs&) { refuse("write_kv"); }
void copy_blocks(const CopyBlocksArgs&) { refuse("copy_blocks"); }
void rms_norm(const RmsNormArgs&) { refuse("rms_norm"); }
void silu_mul(const SiluMulArgs&) { refuse("silu_mul"); }
void embed(const EmbedArgs&) { refuse("embed"); }
void advance(const AdvanceArgs&) { refuse("advance"); }
void sample(const SampleArgs&) { refuse("sample"); }
size_t sample_workspace_bytes(int32_t) { refuse("sample_workspace_bytes"); }
bool decode_linear_supported(DecodeLinear, int64_t, int64_t, int64_t, DType) { return false; }
int32_t decode_square_sum_parts(int32_t) { refuse("decode_square_sum_parts"); }
bool decode_head_finds_best(int64_t, int64_t, int64_t, DType) { return false; }
void decode_start(const DecodeStartArgs&) { refuse("decode_start"); }
void decode_begin(const DecodeBeginArgs&) { refuse("decode_begin"); }
void decode_norm_linear(const DecodeNormLinearArgs&) { refuse("decode_norm_linear"); }
void decode_norm_gate_up(const DecodeNormLinearArgs&) { refuse("decode_norm_gate_up"); }
void decode_linear_add(const DecodeLinearAddArgs&) { refuse("decode_linear_add"); }
float prefill_linear_efficiency(PrefillLinear, int32_t, int32_t, int32_t, DType) { return 0.0f; }
void prefill_linear(const PrefillLinearArgs&) { refuse("prefill_linear"); }
float prefill_qkv_efficiency(int32_t, int32_t, int32_t, int32_t, DType) { return 0.0f; }
void prefill_qkv(const PrefillQkvArgs&) { refuse("prefill_qkv"); }

}  // namespace octavo::gpu
