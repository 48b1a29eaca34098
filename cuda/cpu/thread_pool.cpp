#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/denormals.h"
#include "octavo/error.h"

namespace octavo::cpu {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);  // longer than the gap between two ops of a step
constexpr int kPausesPerLook = 32;

cpu_set_t allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0 || CPU_COUNT(&set) == 0) CPU_SET(0, &set);
  return set;
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
  explicit ThreadPool(int threads) : allowed_(allowed_cpus()), workers_(threads - 1) {
    for (Worker& worker : workers_) worker.thread = std::thread([this, &worker] { work(worker); });
  }

  ~ThreadPool() {
    stopping_ = true;
    count_ = 0;
    publish();
    for (Worker& worker : workers_) worker.thread.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(int64_t count, void (*task)(void*, int64_t), void* context) {
    part_from_caller();
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
  struct alignas(64) Worker {
    std::thread thread;
    std::atomic<int> cpu = -1;  // where it last ran
  };

  static constexpr int kIndexBits = 32;
  static constexpr uint64_t kClosed = (uint64_t{1} << kIndexBits) - 1;

  static uint64_t ticket(uint64_t job, uint64_t index) { return job << kIndexBits | index; }

  // A worker on the caller's CPU would wait for the caller, who waits for it: some kernels, of virtual machines above
  // all, leave the two together for long. Such a worker is put on a CPU that none of us uses, and is free to move from
  // there.
  void part_from_caller() {
    const int here = sched_getcpu();
    for (Worker& worker : workers_) {
      if (worker.cpu.load(std::memory_order_relaxed) != here && worker.cpu.load(std::memory_order_relaxed) >= 0)
        continue;
      const int target = unused_cpu(here);
      if (target < 0) return;
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(target, &only);
      pthread_setaffinity_np(worker.thread.native_handle(), sizeof(only), &only);
      pthread_setaffinity_np(worker.thread.native_handle(), sizeof(allowed_), &allowed_);
      worker.cpu = target;
    }
  }

  int unused_cpu(int here) const {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (cpu == here || !CPU_ISSET(cpu, &allowed_)) continue;
      const auto is_there = [&](const Worker& worker) { return worker.cpu.load(std::memory_order_relaxed) == cpu; };
      if (std::none_of(workers_.begin(), workers_.end(), is_there)) return cpu;
    }
    return -1;
  }

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

  void work(Worker& self) {
    const DenormalsAsZero flush;
    uint32_t seen = 0;
    while (!stopping_) {
      wait_for_job(seen);
      seen = opened_;
      if (const int cpu = sched_getcpu(); cpu != self.cpu.load(std::memory_order_relaxed)) self.cpu = cpu;
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

  const cpu_set_t allowed_;
  std::vector<Worker> workers_;
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
    const cpu_set_t allowed = allowed_cpus();
    if (!pool) pool = std::make_unique<ThreadPool>(CPU_COUNT(&allowed));
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
