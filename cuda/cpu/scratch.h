// Buffers that a thread keeps from call to call. Each use has its own, so that none overlap while they live.
#pragma once

#include <cstddef>

namespace octavo::cpu {

enum class Scratch { kActivations, kWeights, kQueries, kSums, kScores, kRowState, kCount };

// At least `count` floats, 64-byte aligned, with undefined content; valid until this thread asks for the same use
// again.
float* scratch(Scratch use, size_t count);

}  // namespace octavo::cpu
