// What the runtime throws. Neither leaves anything half done.
#pragma once

#include <stdexcept>

namespace octavo {

// An op was called with arguments it does not serve. Python: `engine._runtime.OpError`.
struct OpError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The pool has fewer free blocks than asked for. Python: `engine.errors.OutOfBlocksError`.
struct OutOfBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace octavo
