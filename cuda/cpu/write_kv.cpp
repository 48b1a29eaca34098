// Checks what the kernel relies on.
#include "octavo/write_kv.h"

#include <string>

#include "cpu/denormals.h"
#include "cpu/dispatch.h"
#include "cpu/kernels/kernels.h"
#include "octavo/error.h"

namespace octavo::cpu {

void write_kv(const WriteKvArgs& args) {
  if (args.pool.head_dim > kMaxHeadDim) throw OpError("kv_pool: head_dim above " + std::to_string(kMaxHeadDim));
  const int64_t slots = args.pool.num_blocks * args.pool.block_size;
  for (int32_t token = 0; token < args.num_tokens; ++token) {
    if (args.slots[token] >= slots) throw OpError("slots: a slot outside the pool");
    if (args.positions[token] < 0 || args.positions[token] >= args.max_positions) {
      throw OpError("positions: a position outside cos_sin");
    }
  }
  const DenormalsAsZero flush;
  kernels().write_kv(args);
}

}  // namespace octavo::cpu
