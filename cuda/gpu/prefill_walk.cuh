// The tiles of query rows that a thread block of prefill attention by stretches works on, in turn.
#pragma once

#include "gpu/prefill.cuh"

namespace octavo::gpu {

// A tile of query rows and the tiles of keys that this block multiplies it with. Rows of one sequence and KV head are
// its tokens times the group's query heads: row = token * group + head in group.
struct PrefillItem {
  PrefillCut place;  // key: the first tile of keys
  int end;           // past the last tile of keys
  int whole;         // 1: the block has all of the tile's keys
  int exists;        // 0: the block is done
  int first_row;     // of the sequence's rows
  int first_token;   // of the sequence, in the batch
  int query_len, context_len;

  // The last key that a row of the tile may see.
  __device__ __forceinline__ int limit(int group, int row) const {
    return context_len - query_len + (first_row + row) / group;
  }
};

// Where every kStep-th row of a tile lies in queries and outputs. Steps are a few additions: divisions a row would take
// longer than its copy.
template <int kStep>
class PrefillRowCursor {
 public:
  __device__ __forceinline__ PrefillRowCursor(const Prefill& args, int head_dim)
      : group_(args.group),
        heads_(kStep % args.group),
        tokens_(kStep / args.group),
        token_stride_(args.q_heads * head_dim),
        head_dim_(head_dim) {}

  // The first offset, in elements; the cursor's own are relative to it.
  __device__ __forceinline__ int64_t start(const PrefillItem& item, int row) {
    const int token = (item.first_row + row) / group_;
    head_ = (item.first_row + row) % group_;
    left_ = item.query_len - token;
    offset_ = 0;
    return static_cast<int64_t>(item.first_token + token) * token_stride_ +
           (item.place.head * group_ + head_) * head_dim_;
  }

  __device__ __forceinline__ void step() {
    head_ += heads_;
    const int carried = head_ >= group_ ? 1 : 0;
    head_ -= carried * group_;
    left_ -= tokens_ + carried;
    offset_ += tokens_ * token_stride_ + heads_ * head_dim_ + carried * (token_stride_ - group_ * head_dim_);
  }

  __device__ __forceinline__ bool exists() const { return left_ > 0; }  // it is not past the sequence's end
  __device__ __forceinline__ int offset() const { return offset_; }

 private:
  const int group_, heads_, tokens_, token_stride_, head_dim_;
  int head_, left_, offset_;
};

class PrefillWalk {
 public:
  __device__ __forceinline__ explicit PrefillWalk(const Prefill& args)
      : sequences_{args.query_start, args.context_lens, args.num_seqs, args.kv_heads, args.group},
        at_(args.cuts[blockIdx.x]),
        end_(args.cuts[blockIdx.x + 1]) {}

  __device__ __forceinline__ PrefillItem next() {
    PrefillItem item{};
    if (at_.same_tile(end_) && at_.key == end_.key) return item;
    item.exists = 1;
    item.place = at_;
    item.query_len = sequences_.query_len(at_.seq);
    item.context_len = __ldg(sequences_.context_lens + at_.seq);
    item.first_token = __ldg(sequences_.query_start + at_.seq);
    item.first_row = at_.tile * kPrefillTileRows;
    const int keys = sequences_.key_tiles(item.query_len, item.context_len, at_.tile);
    const bool cut = at_.same_tile(end_);
    item.end = cut ? end_.key : keys;
    item.whole = at_.key == 0 && !cut;
    if (cut) {
      at_ = end_;
    } else {
      ++at_.tile;
      at_.key = 0;
      at_ = sequences_.normal(at_);
    }
    return item;
  }

 private:
  PrefillSequences sequences_;
  PrefillCut at_, end_;
};

// The blocks that share a tile of query rows are neighbours.
struct PrefillParts {
  int first, last;  // blocks

  __device__ __forceinline__ PrefillParts(const PrefillCut* cuts, const PrefillCut& tile)
      : first(blockIdx.x), last(blockIdx.x) {
    while (cuts[first].same_tile(tile) && cuts[first].key > 0) --first;
    while (cuts[last + 1].same_tile(tile) && cuts[last + 1].key > 0) ++last;
  }

  // Where a block leaves its part: the first one began the tile as the last of its own.
  __device__ __forceinline__ int slot(int block) const { return block == first ? 2 * block + 1 : 2 * block; }
};

}  // namespace octavo::gpu
