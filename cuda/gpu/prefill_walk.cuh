// The tiles of query rows that a thread block of prefill attention by stretches works on, in turn.
#pragma once

#include "gpu/prefill.cuh"

namespace octavo::gpu {

// A tile of query rows and the tiles of keys that this block multiplies it with. Rows of a tile are its tokens times
// the group's query heads: row = token * group + head in group.
struct PrefillItem {
  PrefillCut place;  // key: the first tile of keys
  int end;           // past the last tile of keys
  int exists;        // 0: the block is done
  int whole;         // 1: the block has all of the tile's keys
  int first_token;   // of the tile, in the batch
  int tokens;        // of the tile
  int first_limit;   // the last key that its first token may see
  int context_len;
};

class PrefillWalk {
 public:
  __device__ __forceinline__ explicit PrefillWalk(const Prefill& args)
      : sequences_{args.query_start, args.context_lens, args.num_seqs, args.kv_heads, kPrefillTileRows / args.group},
        cuts_(args.cuts + blockIdx.x),
        at_(cuts_[0]),
        end_(cuts_[1]) {}

  __device__ __forceinline__ PrefillItem next() {
    PrefillItem item{};
    while (at_.same_tile(end_) && at_.key == end_.key) {
      if (at_.head == sequences_.kv_heads) return item;
      cuts_ += gridDim.x;  // the next round
      at_ = cuts_[0];
      end_ = cuts_[1];
    }
    const int query_len = sequences_.query_len(at_.seq), from = at_.tile * sequences_.tile_tokens;
    item.exists = 1;
    item.place = at_;
    item.context_len = __ldg(sequences_.context_lens + at_.seq);
    item.first_token = __ldg(sequences_.query_start + at_.seq) + from;
    item.tokens = min(sequences_.tile_tokens, query_len - from);
    item.first_limit = item.context_len - query_len + from;
    const int keys = sequences_.key_tiles(query_len, item.context_len, at_.tile);
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
  const PrefillCut* cuts_;
  PrefillCut at_, end_;
};

// The blocks that share a tile of query rows are neighbours, in the first round.
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
