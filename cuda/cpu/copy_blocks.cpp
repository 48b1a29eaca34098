#include "octavo/copy_blocks.h"

#include <cstring>

#include "cpu/thread_pool.h"
#include "octavo/error.h"

namespace octavo::cpu {

void copy_blocks(const CopyBlocksArgs& args) {
  for (int32_t i = 0; i < 2 * args.num_pairs; ++i) {
    if (args.pairs[i] < 0 || args.pairs[i] >= args.pool.num_blocks) throw OpError("pairs: a block outside the pool");
  }
  const int64_t element = args.pool.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t bytes = args.pool.block_stride() * element;
  auto* pool = static_cast<char*>(args.pool.data);
  parallel_for(args.num_pairs, [&](int64_t i) {
    std::memcpy(pool + args.pairs[2 * i + 1] * bytes, pool + args.pairs[2 * i] * bytes, bytes);
  });
}

}  // namespace octavo::cpu
