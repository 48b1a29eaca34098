// Attention of a few query tokens, all heads of one KV head's group together, over the sequence's blocks: scores of up
// to sixteen keys, online softmax, weighted sum of values. Floor: one read of the sequence's K and V per group of
// tokens.
#include "octavo/paged_attention.h"

#include "cpu/kernels/dot_tile.h"
#include "cpu/kernels/kernels.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int kKeys = 16;
constexpr int kSumVecs = 4;  // vectors of a value row taken at once
#if defined(__AVX512F__)
constexpr int kSumRows = 4;
#else
constexpr int kSumRows = 2;
#endif

// sums[r][0, kVecs vectors) = sums * shrink[r] + weights[r] times the value rows. In key order for each row, whatever
// the tile, so that a row's result never depends on the rows beside it.
template <int kRows, int kVecs, class T>
OCTAVO_INLINE void sum_values(float* sums, int64_t sum_stride, const float* shrink, const float* weights,
                              const T* values, int64_t value_stride, int keys) {
  Vec total[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) total[r][v] = load(sums + r * sum_stride + v * kLanes) * splat(shrink[r]);
  }
  for (int key = 0; key < keys; ++key) {
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) value[v] = load(values + key * value_stride + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = splat(weights[r * kKeys + key]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) total[r][v] = fma(weight, value[v], total[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(sums + r * sum_stride + v * kLanes, total[r][v]);
  }
}

template <class T>
class Attention {
 public:
  Attention(const PagedAttentionArgs& args, const QueryChunk& chunk, int32_t kv_head)
      : args_(args),
        chunk_(chunk),
        kv_head_(kv_head),
        group_(args.q_heads / args.pool.kv_heads),
        rows_(chunk.count * group_),
        dim_(args.pool.head_dim),
        queries_(scratch(Scratch::kQueries, rows_ * dim_)),
        sums_(scratch(Scratch::kSums, rows_ * dim_)),
        scores_(scratch(Scratch::kScores, rows_ * kKeys)),
        highest_(scratch(Scratch::kRowState, 3 * rows_)),
        totals_(highest_ + rows_),
        shrink_(highest_ + 2 * rows_) {}

  void run() {
    load_queries();
    const int32_t* table = args_.block_tables + static_cast<int64_t>(chunk_.seq) * args_.max_blocks_per_seq;
    const KvPool& pool = args_.pool;
    const T* layer =
        static_cast<const T*>(pool.data) + args_.layer * pool.layer_stride() + kv_head_ * pool.head_stride();
    const int32_t context = chunk_.visible + chunk_.count - 1;
    for (int32_t position = 0; position < context;) {
      const int32_t offset = position % pool.block_size;
      const T* keys = layer + table[position / pool.block_size] * pool.block_stride() + offset * dim_;
      const int32_t count = least(kKeys, least(pool.block_size - offset, context - position));
      const int32_t next = position + count;
      if (next < context && next % pool.block_size == 0) {
        prefetch(layer + table[next / pool.block_size] * pool.block_stride(), least(kKeys, context - next));
      }
      attend(keys, keys + pool.kv_stride(), position, count);
      position += count;
    }
    write_out();
  }

 private:
  static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

  // Blocks lie anywhere in memory, so nothing but this loop knows where the next one is.
  void prefetch(const T* keys, int32_t count) const {
    constexpr int32_t kLine = 64 / sizeof(T);
    for (int32_t i = 0; i < count * dim_; i += kLine) {
      __builtin_prefetch(keys + i, 0, 2);
      __builtin_prefetch(keys + args_.pool.kv_stride() + i, 0, 2);
    }
  }

  // Row r: head r % group of token r / group.
  int64_t query_offset(int32_t row) const {
    const int64_t token = chunk_.first + row / group_;
    return (token * args_.q_heads + kv_head_ * group_ + row % group_) * dim_;
  }

  void load_queries() {
    for (int32_t row = 0; row < rows_; ++row) {
      const T* query = static_cast<const T*>(args_.query) + query_offset(row);
      for (int32_t d = 0; d < dim_; ++d) {
        queries_[row * dim_ + d] = cpu::load(query[d]) * args_.scale;
        sums_[row * dim_ + d] = 0.0f;
      }
      highest_[row] = -__builtin_inff();
      totals_[row] = 0.0f;
    }
  }

  void attend(const T* keys, const T* values, int32_t position, int32_t count) {
    const int32_t unseeing = position - chunk_.visible + 1;  // tokens that see none of these keys
    const int32_t first = unseeing > 0 ? unseeing * group_ : 0;
    for (int32_t row = first; row < rows_; row += kTileRows) {
      score_tile<kTileRows>(least(rows_ - row, kTileRows), row, keys, count);
    }
    for (int32_t row = first; row < rows_; ++row) {
      soften(row, least(count, chunk_.visible + row / group_ - position));
    }
    for (int32_t row = first; row < rows_; row += kSumRows) {
      sum_tile<kSumRows>(least(rows_ - row, kSumRows), row, values, count);
    }
  }

  template <int kRows>
  OCTAVO_INLINE void score_tile(int32_t rows, int32_t row, const T* keys, int32_t count) {
    if constexpr (kRows > 0) {
      if (rows < kRows) return score_tile<kRows - 1>(rows, row, keys, count);
      for (int32_t key = 0; key < count; key += kTileColumns) {
        PlainColumns<T, false> columns;
        for (int i = 0; i < kTileColumns; ++i) columns.column[i] = keys + least(key + i, count - 1) * dim_;
        dot_tile<kRows>(queries_ + row * dim_, dim_, columns, dim_, false, scores_ + row * kKeys + key, kKeys);
      }
    }
  }

  // Scores of the first `visible` keys to weights; those of the others to zero.
  void soften(int32_t row, int32_t visible) {
    float* scores = scores_ + row * kKeys;
    for (int32_t key = visible < 0 ? 0 : visible; key < kKeys; ++key) scores[key] = -__builtin_inff();
    Vec top = load(scores);
    for (int key = kLanes; key < kKeys; key += kLanes) top = max(top, load(scores + key));
    const float seen = max_lane(top);
    const float highest = highest_[row] > seen ? highest_[row] : seen;
    Vec sum = splat(0.0f);
    for (int key = 0; key < kKeys; key += kLanes) {
      const Vec weight = exp(load(scores + key) - splat(highest));
      store(scores + key, weight);
      sum = sum + weight;
    }
    shrink_[row] = 1.0f;
    if (highest != highest_[row]) {
      float shrink[kLanes];
      store(shrink, exp(splat(highest_[row] - highest)));
      shrink_[row] = shrink[0];
    }
    highest_[row] = highest;
    totals_[row] = totals_[row] * shrink_[row] + sum_lanes(sum);
  }

  template <int kRows>
  OCTAVO_INLINE void sum_tile(int32_t rows, int32_t row, const T* values, int32_t count) {
    if constexpr (kRows > 0) {
      if (rows < kRows) return sum_tile<kRows - 1>(rows, row, values, count);
      int32_t d = 0;
      for (; d + kSumVecs * kLanes <= dim_; d += kSumVecs * kLanes) sum_vecs<kRows, kSumVecs>(row, d, values, count);
      for (; d + kLanes <= dim_; d += kLanes) sum_vecs<kRows, 1>(row, d, values, count);
      for (; d < dim_; ++d) sum_column<kRows>(row, d, values, count);
    }
  }

  template <int kRows, int kVecs>
  OCTAVO_INLINE void sum_vecs(int32_t row, int32_t d, const T* values, int32_t count) {
    sum_values<kRows, kVecs>(sums_ + row * dim_ + d, dim_, shrink_ + row, scores_ + row * kKeys, values + d, dim_,
                             count);
  }

  // One column of the values, where head_dim is no multiple of the vector's width.
  template <int kRows>
  void sum_column(int32_t row, int32_t d, const T* values, int32_t count) {
    for (int32_t r = row; r < row + kRows; ++r) {
      float& sum = sums_[r * dim_ + d];
      sum *= shrink_[r];
      for (int32_t key = 0; key < count; ++key) sum += scores_[r * kKeys + key] * cpu::load(values[key * dim_ + d]);
    }
  }

  void write_out() {
    for (int32_t row = 0; row < rows_; ++row) {
      T* out = static_cast<T*>(args_.out) + query_offset(row);
      const float scale = chunk_.visible > 0 ? 1.0f / totals_[row] : 0.0f;
      for (int32_t d = 0; d < dim_; ++d) cpu::store(out[d], sums_[row * dim_ + d] * scale);
    }
  }

  const PagedAttentionArgs& args_;
  const QueryChunk& chunk_;
  const int32_t kv_head_;
  const int32_t group_;
  const int32_t rows_;
  const int32_t dim_;
  float* const queries_;  // [rows, dim], scaled
  float* const sums_;     // [rows, dim]
  float* const scores_;   // [rows, kKeys]
  float* const highest_;  // [rows], as are the next two
  float* const totals_;
  float* const shrink_;
};

}  // namespace

void paged_attention(const PagedAttentionArgs& args, const QueryChunk* chunks, int64_t num_chunks) {
  with_element(args.pool.dtype, [&]<class T>(T) {
    const int64_t heads = args.pool.kv_heads;
    parallel_for(num_chunks * heads,
                 [&](int64_t i) { Attention<T>(args, chunks[i / heads], static_cast<int32_t>(i % heads)).run(); });
  });
}

}  // namespace octavo::cpu::OCTAVO_ISA
