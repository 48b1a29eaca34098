// The head of a step: token ids to rows of the embedding, and, for a decode step that no host prepares, the advance of
// every sequence by one token. Both write integers that later kernels read early, so neither lets its successor start
// before it is done (see Launch).
#pragma once

#include "octavo/tensor.h"

namespace octavo {

struct EmbedArgs {
  void* out;                 // [num_tokens, hidden]
  const void* table;         // [vocab, hidden]; ids outside it give zeros
  const int32_t* token_ids;  // [num_tokens]
  const int32_t* sources;    // [num_tokens] or null: >= 0: the id is newest[source], not token_ids'
  const int32_t* newest;     // [any], last sampled token of each sequence slot
  int32_t num_tokens;
  int32_t hidden;
  int32_t vocab;
  DType dtype;  // of out and table
  Launch launch;
};

// Row s continues sequence slot rows[s] with its newest token: position = context_lens[s], the slot of that position
// from the block table, then context_lens[s] += 1. rows[s] < 0 is a padded row: position 0, slot 0 in the scratch
// block, context length 0.
struct AdvanceArgs {
  void* out;                    // [num_seqs, hidden]
  const void* table;            // [vocab, hidden]
  const int32_t* newest;        // [any]
  const int32_t* rows;          // [num_seqs]
  int32_t* context_lens;        // [num_seqs], in and out
  int32_t* positions;           // [num_seqs], out
  int64_t* slots;               // [num_seqs], out
  const int32_t* block_tables;  // [num_seqs, max_blocks_per_seq], with room for the new token
  int32_t max_blocks_per_seq;
  int32_t block_size;
  int32_t num_seqs;
  int32_t hidden;
  int32_t vocab;
  DType dtype;
  Launch launch;
};

namespace cpu {
void embed(const EmbedArgs& args);  // fp32 and bf16
void advance(const AdvanceArgs& args);
}  // namespace cpu
namespace gpu {
void embed(const EmbedArgs& args);  // any dtype
void advance(const AdvanceArgs& args);
}  // namespace gpu

}  // namespace octavo
