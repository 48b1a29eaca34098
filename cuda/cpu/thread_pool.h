// The CPU ops' threads: persistent, shared by all ops, the caller being one of them.
#pragma once

#include <cstdint>

#include "octavo/threads.h"

namespace octavo::cpu {

// task(context, i) for each i in [0, count), on all threads; returns when all are done. Tasks do not throw.
void run_tasks(int64_t count, void (*task)(void* context, int64_t index), void* context);

// Below this many operations a task costs more to hand over than to run.
inline constexpr int64_t kTaskOperations = 1 << 15;

[[gnu::always_inline]] inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class F>
void parallel_for(int64_t count, const F& f) {
  run_tasks(
      count, [](void* context, int64_t i) { (*static_cast<const F*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// f(begin, end) over pieces of [0, total) whose bounds are multiples of `multiple`; `operations` is the cost of one
// item.
template <class F>
void parallel_ranges(int64_t total, int64_t multiple, int64_t operations, const F& f) {
  const int64_t units = (total + multiple - 1) / multiple;
  const int64_t cost = units * multiple * operations;
  // Several pieces for each thread, so that one that was held up leaves little undone; more if they are long anyway.
  const int64_t few = least(4 * num_threads(), 1 + cost / kTaskOperations);
  const int64_t many = least(16 * num_threads(), cost / (32 * kTaskOperations));
  const int64_t pieces = num_threads() == 1 ? 1 : least(units, few < many ? many : few);
  parallel_for(pieces, [&](int64_t i) {
    const int64_t begin = units * i / pieces * multiple;
    const int64_t end = units * (i + 1) / pieces * multiple;
    f(begin, end < total ? end : total);
  });
}

}  // namespace octavo::cpu
