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

  // Where the row lies in queries and outputs, in elements; -1 past the sequence's end.
  __device__ __forceinline__ int64_t offset(const Prefill& args, int head_dim, int row) const {
    const int token = (first_row + row) / args.group;
    const int head = place.head * args.group + (first_row + row) % args.group;
    if (token >= query_len) return -1;
    return (static_cast<int64_t>(first_token + token) * args.q_heads + head) * head_dim;
  }
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
