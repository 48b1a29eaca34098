#include "octavo/embed.h"

#include <algorithm>
#include <cstring>

#include "cpu/thread_pool.h"
#include "octavo/error.h"

namespace octavo::cpu {
namespace {

struct Rows {
  char* out;
  const char* table;
  int64_t bytes;  // of a row
  int32_t vocab;

  void copy(int64_t row, int32_t token) const {
    char* to = out + row * bytes;
    if (token < 0 || token >= vocab) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, table + token * bytes, bytes);
    }
  }
};

Rows rows_of(void* out, const void* table, int32_t hidden, int32_t vocab, DType dtype) {
  return {static_cast<char*>(out), static_cast<const char*>(table),
          int64_t{hidden} * (dtype == DType::kFloat32 ? 4 : 2), vocab};
}

}  // namespace

void embed(const EmbedArgs& args) {
  const Rows rows = rows_of(args.out, args.table, args.hidden, args.vocab, args.dtype);
  parallel_for(args.num_tokens, [&](int64_t row) {
    const int32_t source = args.sources != nullptr ? args.sources[row] : -1;
    rows.copy(row, source >= 0 ? args.newest[source] : args.token_ids[row]);
  });
}

void advance(const AdvanceArgs& args) {
  const Rows rows = rows_of(args.out, args.table, args.hidden, args.vocab, args.dtype);
  for (int32_t row = 0; row < args.num_seqs; ++row) {
    const bool live = args.rows[row] >= 0;
    rows.copy(row, live ? args.newest[args.rows[row]] : -1);
    const int32_t position = live ? args.context_lens[row] : 0;
    const int32_t in_table = position / args.block_size;
    if (live && in_table >= args.max_blocks_per_seq) throw OpError("advance: a block table without room for the token");
    const int64_t block = live ? args.block_tables[int64_t{row} * args.max_blocks_per_seq + in_table] : 0;
    args.positions[row] = position;
    args.slots[row] = block * args.block_size + position % args.block_size;
    args.context_lens[row] = live ? position + 1 : 0;
  }
}

}  // namespace octavo::cpu
