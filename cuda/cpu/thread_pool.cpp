#include "cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "octavo/error.h"

namespace octavo::cpu {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);  // longer than the gap between two ops of a step
constexpr int kPausesPerLook = 32;

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One job at a time. Workers take indices from `ticket_`, which carries the job's number, so that a worker that wakes
// late can never take from a job that has ended; the caller waits for tasks, never for a sleeping worker.
class ThreadPool {
 public:
  explicit ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~ThreadPool() {
    stopping_ = true;
    count_ = 0;
    publish();
    for (std::thread& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(int64_t count, void (*task)(void*, int64_t), void* context) {
    count_ = count;
    task_ = task;
    context_ = context;
    done_ = 0;
    publish();
    take_tasks();
    while (done_.load(std::memory_order_acquire) < count) pause();
    ticket_ = ticket(ticket_ >> kIndexBits, kClosed);
  }

 private:
  static constexpr int kIndexBits = 32;
  static constexpr uint64_t kClosed = (uint64_t{1} << kIndexBits) - 1;

  static uint64_t ticket(uint64_t job, uint64_t index) { return job << kIndexBits | index; }

  // Opens the next job and wakes those that sleep.
  void publish() {
    ticket_ = ticket((ticket_ >> kIndexBits) + 1, 0);
    ++opened_;
    if (sleepers_ > 0) opened_.notify_all();
  }

  void take_tasks() {
    uint64_t seen = ticket_;
    while (true) {
      const uint64_t index = seen & kClosed;
      const auto task = task_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      if (index == kClosed || static_cast<int64_t>(index) >= count_.load(std::memory_order_relaxed)) return;
      if (!ticket_.compare_exchange_weak(seen, seen + 1)) continue;
      task(context, static_cast<int64_t>(index));
      done_.fetch_add(1, std::memory_order_release);
      seen = ticket_;
    }
  }

  void work() {
    uint32_t seen = 0;
    while (!stopping_) {
      wait_for_job(seen);
      seen = opened_;
      take_tasks();
    }
  }

  void wait_for_job(uint32_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < deadline) {
      for (int i = 0; i < kPausesPerLook; ++i) {
        if (opened_.load(std::memory_order_relaxed) != seen) return;
        pause();
      }
    }
    ++sleepers_;
    opened_.wait(seen);
    --sleepers_;
  }

  std::vector<std::thread> workers_;
  std::atomic<int64_t> count_ = 0;
  std::atomic<void (*)(void*, int64_t)> task_ = nullptr;
  std::atomic<void*> context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_ = kClosed;
  alignas(64) std::atomic<int64_t> done_ = 0;
  alignas(64) std::atomic<uint32_t> opened_ = 0;
  std::atomic<int> sleepers_ = 0;
  std::atomic<bool> stopping_ = false;
};

std::mutex pool_mutex;  // held while a job runs: one at a time
std::unique_ptr<ThreadPool> pool;
std::atomic<int> pool_size = 0;

}  // namespace

void set_num_threads(int count) {
  if (count < 1 || count > 1024) throw OpError("the number of threads must be from 1 to 1024");
  const std::lock_guard lock(pool_mutex);
  pool.reset();
  pool = std::make_unique<ThreadPool>(count);
  pool_size = count;
}

int num_threads() {
  if (pool_size == 0) {
    const std::lock_guard lock(pool_mutex);
    if (!pool) pool = std::make_unique<ThreadPool>(available_cpus());
    pool_size = pool->size();
  }
  return pool_size;
}

void run_tasks(int64_t count, void (*task)(void*, int64_t), void* context) {
  if (count <= 1 || num_threads() == 1) {
    for (int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  const std::lock_guard lock(pool_mutex);
  pool->run(count, task, context);
}

}  // namespace octavo::cpu
