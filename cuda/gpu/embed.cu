// Embedding rows of token ids, and the advance of a decode batch. Floor: each row read and written once; in practice
// the launch. A thread block a row.
#include "octavo/embed.h"

#include <algorithm>

#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu {
namespace {

constexpr int kMaxThreads = 256;

struct Rows {
  Eight* out;
  const Eight* table;
  int pieces;  // 16-byte pieces of a row
  int vocab;
};

__device__ __forceinline__ void copy_row(const Rows& rows, int row, int token) {
  const bool known = token >= 0 && token < rows.vocab;
  const Eight* from = rows.table + static_cast<int64_t>(token) * rows.pieces;
  Eight* to = rows.out + static_cast<int64_t>(row) * rows.pieces;
  for (int i = threadIdx.x; i < rows.pieces; i += blockDim.x) to[i] = known ? from[i] : Eight{};
}

__global__ void __launch_bounds__(kMaxThreads)
    embed_kernel(const Rows rows, const int* token_ids, const int* sources, const int* newest) {
  ptx::wait_for_previous_kernel();
  const int row = blockIdx.x;
  const int source = sources != nullptr ? sources[row] : -1;
  copy_row(rows, row, source >= 0 ? newest[source] : token_ids[row]);
  __threadfence();
}

__global__ void __launch_bounds__(kMaxThreads)
    advance_kernel(const Rows rows, const __grid_constant__ AdvanceArgs args) {
  ptx::wait_for_previous_kernel();
  const int row = blockIdx.x;
  const int source = args.rows[row];
  copy_row(rows, row, source >= 0 ? args.newest[source] : -1);
  if (threadIdx.x == 0) {
    const int position = source >= 0 ? args.context_lens[row] : 0;
    const int* table = args.block_tables + static_cast<int64_t>(row) * args.max_blocks_per_seq;
    const int64_t block = source >= 0 ? table[position / args.block_size] : 0;
    args.positions[row] = position;
    args.slots[row] = block * args.block_size + position % args.block_size;
    args.context_lens[row] = source >= 0 ? position + 1 : 0;
  }
  __threadfence();
}

Rows rows_of(void* out, const void* table, int32_t hidden, int32_t vocab, DType dtype) {
  const int64_t bytes = static_cast<int64_t>(hidden) * (dtype == DType::kFloat32 ? 4 : 2);
  require(bytes % 16 == 0, "embed: a row must be a multiple of 16 bytes");
  return {static_cast<Eight*>(out), static_cast<const Eight*>(table), static_cast<int>(bytes / 16), vocab};
}

dim3 threads_of(const Rows& rows) { return dim3(std::min(kMaxThreads, (rows.pieces + 31) / 32 * 32)); }

}  // namespace

void embed(const EmbedArgs& args) {
  if (args.num_tokens == 0) return;
  const Rows rows = rows_of(args.out, args.table, args.hidden, args.vocab, args.dtype);
  launch_kernel("embed", embed_kernel, {.grid = dim3(args.num_tokens), .block = threads_of(rows)}, args.launch, rows,
                args.token_ids, args.sources, args.newest);
}

void advance(const AdvanceArgs& args) {
  if (args.num_seqs == 0) return;
  const Rows rows = rows_of(args.out, args.table, args.hidden, args.vocab, args.dtype);
  launch_kernel("advance", advance_kernel, {.grid = dim3(args.num_seqs), .block = threads_of(rows)}, args.launch, rows,
                args);
}

}  // namespace octavo::gpu
