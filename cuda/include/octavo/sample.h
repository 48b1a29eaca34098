// From logits to tokens, each row by its own parameters and as if it were alone.
//
// temperature <= 1e-5: the largest logit, the lowest id among equals. Else scores are logit * (1 / temperature), in
// fp32, and the filters of Hugging Face's warpers follow in their order:
//   top-k  keeps scores >= the k-th largest;
//   top-p  keeps a token if what is strictly likelier weighs less than top_p of what top-k kept (fixed_weight, so
//   exact); min-p  keeps exp(score - highest score) >= min_p.
// Equal scores stay or go together. The draw is Gumbel-max: the kept token with the largest score + gumbel(word), where
// the word is of (seed, position, token id) alone; octavo/random.h has every bit of it.
// A row with NaN or +inf, or with nothing but -inf, gives token -1.
#pragma once

#include <cstddef>

#include "octavo/tensor.h"

namespace octavo {

constexpr float kGreedyTemperature = 1e-5f;

struct SampleArgs {
  int32_t* tokens;         // [num_rows]
  int32_t* newest;         // [any] or null: newest[targets[row]] = max(token, 0), for the next step's embedding
  const int64_t* targets;  // [num_rows] or null with `newest`
  const void* logits;      // [num_rows, vocab], row stride logits_stride
  int64_t logits_stride;   // elements
  DType dtype;
  int32_t num_rows;
  int32_t vocab;
  const float* temperature;  // [num_rows]; null: all greedy, and the rest is not read
  const int32_t* top_k;      // [num_rows], 0: off
  const float* top_p;        // [num_rows], >= 1: off
  const float* min_p;        // [num_rows], 0: off
  const uint64_t* seeds;     // [num_rows]
  const int32_t* positions;  // [num_rows], index in its sequence of the token to draw
  uint64_t* best;   // gpu only, [num_rows] or null: what decode_norm_linear found of these logits, which greedy
                    // rows take instead of reading them; zero again behind the op
  void* workspace;  // gpu only: sample_workspace_bytes(max_rows) bytes, zeroed once at allocation
  size_t workspace_bytes;
  Launch launch;
};

namespace cpu {
void sample(const SampleArgs& args);  // fp32 and bf16
}
namespace gpu {
void sample(const SampleArgs& args);  // fp32, bf16 and fp16. Graph-safe.
size_t sample_workspace_bytes(int32_t max_rows);
}  // namespace gpu

}  // namespace octavo
