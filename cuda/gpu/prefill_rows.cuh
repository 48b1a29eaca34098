// Which query rows a thread block of prefill attention works on. Rows of one sequence and KV head are its tokens times
// the group's query heads: row = token * group + head in group.
#pragma once

#include "gpu/prefill.cuh"

namespace octavo::gpu {

template <int kRows>
struct PrefillRows {
  int seq, query_len, context_len;
  int first_row;    // of the sequence's rows
  int first_token;  // of the sequence, in the batch
  int visible;      // keys that the block's last row sees

  // Finds block `index` of the grid by counting blocks over the sequences, a warp together. False: none is left.
  __device__ __forceinline__ bool find(const Prefill& args, int index) {
    constexpr unsigned kAll = ~0u;
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0; first < args.num_seqs; first += 32) {
      const int candidate = first + lane;
      int length = 0;
      if (candidate < args.num_seqs) {
        length = __ldg(args.query_start + candidate + 1) - __ldg(args.query_start + candidate);
      }
      const int count = (length * args.group + kRows - 1) / kRows;
      int through = count;  // inclusive prefix sum
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int lower = __shfl_up_sync(kAll, through, lanes);
        if (lane >= lanes) through += lower;
      }
      const unsigned past = __ballot_sync(kAll, before + through > index);
      if (past == 0) {
        before += __shfl_sync(kAll, through, 31);
        continue;
      }
      const int owner = __ffs(past) - 1;
      const int in_seq = index - before - __shfl_sync(kAll, through - count, owner);
      seq = first + owner;
      query_len = __shfl_sync(kAll, length, owner);
      // The last rows see the most keys: they start first.
      first_row = (__shfl_sync(kAll, count, owner) - 1 - in_seq) * kRows;
      first_token = __ldg(args.query_start + seq);
      context_len = __ldg(args.context_lens + seq);
      const int last_token = min(query_len, (first_row + kRows - 1) / args.group + 1) - 1;
      visible = max(0, context_len - query_len + last_token + 1);
      return true;
    }
    return false;
  }

  // The last key that one of the block's rows may see.
  __device__ __forceinline__ int limit(const Prefill& args, int row) const {
    return context_len - query_len + (first_row + row) / args.group;
  }

  // Where the row lies in queries and outputs, in elements. `valid`: it is not past the sequence's end.
  __device__ __forceinline__ int64_t offset(const Prefill& args, int kv_head, int head_dim, int row,
                                            bool& valid) const {
    const int token = (first_row + row) / args.group;
    const int head = kv_head * args.group + (first_row + row) % args.group;
    valid = token < query_len;
    return (static_cast<int64_t>(first_token + token) * args.q_heads + head) * head_dim;
  }
};

// Thread blocks that are enough for any split of `num_tokens` tokens over the sequences.
inline unsigned prefill_blocks(const Prefill& args, int num_tokens, int rows) {
  return static_cast<unsigned>(static_cast<int64_t>(num_tokens) * args.group / rows + args.num_seqs);
}

}  // namespace octavo::gpu
