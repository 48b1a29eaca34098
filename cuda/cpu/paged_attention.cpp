// Checks what the kernels rely on, and cuts the batch into pieces of a few query tokens.
#include "octavo/paged_attention.h"

#include <algorithm>
#include <vector>

#include "cpu/denormals.h"
#include "cpu/dispatch.h"
#include "cpu/kernels/kernels.h"
#include "octavo/error.h"

namespace octavo::cpu {
namespace {

constexpr int32_t kChunkRows = 48;  // query rows that share one pass over K and V

void check_sequence(const PagedAttentionArgs& args, int32_t seq) {
  const KvPool& pool = args.pool;
  const int64_t length = args.context_lens[seq];
  const int64_t queries = args.query_start[seq + 1] - args.query_start[seq];
  const int64_t blocks = (length + pool.block_size - 1) / pool.block_size;
  if (length < 0 || blocks > args.max_blocks_per_seq) throw OpError("context_lens: longer than the block table");
  if (queries < 0 || (length > 0 && queries > length)) throw OpError("query_start: more queries than context");
  for (int64_t i = 0; i < blocks; ++i) {
    const int32_t block = args.block_tables[seq * args.max_blocks_per_seq + i];
    if (block < 0 || block >= pool.num_blocks) throw OpError("block_tables: a block outside the pool");
  }
}

}  // namespace

void paged_attention(const PagedAttentionArgs& args) {
  if (args.query_start[0] < 0 || args.query_start[args.num_seqs] > args.num_tokens) {
    throw OpError("query_start: beyond the rows of query");
  }
  const int32_t most = std::max(1, kChunkRows / (args.q_heads / args.pool.kv_heads));
  std::vector<QueryChunk> chunks;
  for (int32_t seq = 0; seq < args.num_seqs; ++seq) {
    check_sequence(args, seq);
    const int32_t end = args.query_start[seq + 1];
    for (int32_t first = args.query_start[seq]; first < end; first += most) {
      const int32_t context = args.context_lens[seq];
      const int32_t count = std::min(most, end - first);
      chunks.push_back({seq, first, count, context == 0 ? 1 - count : context - (end - first) + 1});
    }
  }
  const DenormalsAsZero flush;
  kernels().paged_attention(args, chunks.data(), static_cast<int64_t>(chunks.size()));
}

}  // namespace octavo::cpu
