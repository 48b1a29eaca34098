#include "octavo/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/element.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu {
namespace {

void check_metadata(const PagedAttentionArgs& args) {
  const KvPool& pool = args.pool;
  for (int32_t seq = 0; seq < args.num_seqs; ++seq) {
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
  if (args.query_start[0] < 0 || args.query_start[args.num_seqs] > args.num_tokens) {
    throw OpError("query_start: beyond the rows of query");
  }
}

// One query row against one KV head: softmax in two passes over scores held in memory.
template <class T>
void attend(const PagedAttentionArgs& args, const int32_t* table, int64_t token, int32_t head, int64_t length) {
  const KvPool& pool = args.pool;
  const int32_t dim = pool.head_dim;
  const int64_t row = (token * args.q_heads + head) * dim;
  T* out = static_cast<T*>(args.out) + row;
  const T* query = static_cast<const T*>(args.query) + row;
  const int32_t kv_head = head / (args.q_heads / pool.kv_heads);
  const T* base = static_cast<const T*>(pool.data) + args.layer * pool.layer_stride() + kv_head * pool.head_stride();
  const auto key_at = [&](int64_t i) {
    return base + table[i / pool.block_size] * pool.block_stride() + i % pool.block_size * dim;
  };

  thread_local std::vector<float> scores;
  thread_local std::vector<float> sums;
  scores.resize(length);
  sums.assign(dim, 0.0f);
  float highest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < length; ++i) {
    const T* key = key_at(i);
    float dot = 0.0f;
    for (int32_t d = 0; d < dim; ++d) dot += load(query[d]) * load(key[d]);
    scores[i] = dot * args.scale;
    highest = std::max(highest, scores[i]);
  }
  float total = 0.0f;
  for (int64_t i = 0; i < length; ++i) {
    const float weight = std::exp(scores[i] - highest);
    const T* value = key_at(i) + pool.kv_stride();
    total += weight;
    for (int32_t d = 0; d < dim; ++d) sums[d] += weight * load(value[d]);
  }
  for (int32_t d = 0; d < dim; ++d) store(out[d], length == 0 ? 0.0f : sums[d] / total);
}

template <class T>
void attend_all(const PagedAttentionArgs& args) {
  struct Row {
    int32_t seq;
    int64_t token;
    int64_t length;
  };
  std::vector<Row> rows;
  for (int32_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t first = args.query_start[seq];
    const int64_t queries = args.query_start[seq + 1] - first;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t length = std::max<int64_t>(args.context_lens[seq] - queries + i + 1, 0);
      rows.push_back({seq, first + i, args.context_lens[seq] == 0 ? 0 : length});
    }
  }
  parallel_for(static_cast<int64_t>(rows.size()) * args.q_heads, [&](int64_t i) {
    const Row& row = rows[i / args.q_heads];
    const int32_t* table = args.block_tables + static_cast<int64_t>(row.seq) * args.max_blocks_per_seq;
    attend<T>(args, table, row.token, static_cast<int32_t>(i % args.q_heads), row.length);
  });
}

}  // namespace

void paged_attention(const PagedAttentionArgs& args) {
  check_metadata(args);
  with_element(args.pool.dtype, [&]<class T>(T) { attend_all<T>(args); });
}

}  // namespace octavo::cpu
