// Copies whole KV blocks (all layers) inside one pool: copy-on-write and compaction.
#pragma once

#include "octavo/tensor.h"

namespace octavo {

struct CopyBlocksArgs {
  KvPool pool;
  const int64_t*
      pairs;  // [num_pairs, 2]: source, destination; destinations are distinct and no source is a destination
  int32_t num_pairs;
  Launch launch;
};

namespace cpu {
void copy_blocks(const CopyBlocksArgs& args);
}
namespace gpu {
void copy_blocks(const CopyBlocksArgs& args);  // pairs in device memory
}

}  // namespace octavo
