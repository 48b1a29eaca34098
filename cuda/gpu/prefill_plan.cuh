// How prefill attention is shared out over the GPU: every thread block gets an equal stretch of all the work laid end
// to end, KV head after KV head, sequence after sequence, tile of query rows after tile, tile of keys after tile. So a
// tile of query rows may be cut into parts for neighbouring blocks; the last of them to finish merges the parts.
//
// Where keys and values are more than the L2 holds, the work is shared out in rounds: in each, all blocks work on
// neighbouring sequences and heads. Only the first round cuts tiles; it makes up for what the others' whole tiles leave
// uneven.
#pragma once

#include <cstddef>
#include <cstdint>

#include "octavo/paged_attention.h"

namespace octavo::gpu {

constexpr int kPrefillTileRows = 128;  // query rows, of whole tokens: tokens times the group's query heads
constexpr int kPrefillTileKeys = 128;
constexpr int kMaxRounds = 8;  // stretches of a block

// Where a stretch begins; it ends where the next one begins. Block b's are b, b + blocks, and so on; those past the
// last round begin past the last tile, at head == kv_heads.
struct alignas(16) PrefillCut {
  int head, seq, tile, key;  // tile: of the sequence's query rows; key: tile of keys

  __host__ __device__ bool same_tile(const PrefillCut& other) const {
    return head == other.head && seq == other.seq && tile == other.tile;
  }
};

// The sequences of a launch, and what follows from their lengths.
struct PrefillSequences {
  const int* query_start;
  const int* context_lens;
  int num_seqs;
  int kv_heads;
  int tile_tokens;  // query tokens of a tile: with all heads of a group as many rows as fit

#ifdef __CUDACC__
  __device__ __forceinline__ int query_len(int seq) const {
    return __ldg(query_start + seq + 1) - __ldg(query_start + seq);
  }
  __device__ __forceinline__ int tiles(int query_len) const { return (query_len + tile_tokens - 1) / tile_tokens; }
  // Tiles of keys that some row of a tile sees; at least one, of which nothing is seen where the context is empty.
  __device__ __forceinline__ int key_tiles(int query_len, int context_len, int tile) const {
    const int tokens = min(query_len, (tile + 1) * tile_tokens);
    return max(1, (context_len - query_len + tokens + kPrefillTileKeys - 1) / kPrefillTileKeys);
  }
  // The same place, named by a tile that exists.
  __device__ __forceinline__ PrefillCut normal(PrefillCut cut) const {
    while (cut.head < kv_heads && cut.tile >= tiles(query_len(cut.seq))) {
      cut.tile = 0;
      if (++cut.seq == num_seqs) {
        cut.seq = 0;
        ++cut.head;
      }
    }
    return cut;
  }
#endif
};

// The last bytes of the attention workspace. Tickets are zero between launches.
struct PrefillWorkspace {
  explicit PrefillWorkspace(int head_dim);
  int blocks;  // thread blocks of a launch: as many as run at once
  size_t tickets, cuts, stats, outputs, bytes;
};

// Byte offset in a workspace of `workspace_bytes`; throws if it is too small.
size_t prefill_workspace_at(const PrefillWorkspace& layout, size_t workspace_bytes);

}  // namespace octavo::gpu
