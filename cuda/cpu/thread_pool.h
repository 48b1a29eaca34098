// The CPU ops' threads: persistent, shared by all ops, the caller being one of them.
#pragma once

#include <cstdint>
#include <functional>

namespace octavo::cpu {

// Runs task(i) for each i in [0, count), on all threads; returns when all are done. Tasks do not throw.
void parallel_for(int64_t count, const std::function<void(int64_t)>& task);

}  // namespace octavo::cpu
