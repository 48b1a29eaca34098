#include "cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "octavo/error.h"
#include "octavo/threads.h"

namespace octavo::cpu {
namespace {

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

class ThreadPool {
 public:
  explicit ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~ThreadPool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(int64_t count, const std::function<void(int64_t)>& task) {
    std::lock_guard one_at_a_time(run_mutex_);
    {
      std::lock_guard lock(mutex_);
      task_ = &task;
      count_ = count;
      next_ = 0;
      busy_ = static_cast<int>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    take_tasks();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take_tasks() {
    for (int64_t i = next_++; i < count_; i = next_++) (*task_)(i);
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      lock.unlock();
      take_tasks();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::mutex run_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int64_t)>* task_ = nullptr;
  std::atomic<int64_t> next_ = 0;
  int64_t count_ = 0;
  int busy_ = 0;
  uint64_t generation_ = 0;
  bool stopping_ = false;
};

std::mutex pool_mutex;
std::shared_ptr<ThreadPool> pool;

std::shared_ptr<ThreadPool> shared_pool() {
  std::lock_guard lock(pool_mutex);
  if (!pool) pool = std::make_shared<ThreadPool>(available_cpus());
  return pool;
}

}  // namespace

void set_num_threads(int count) {
  if (count < 1) throw OpError("the number of threads must be at least 1");
  auto fresh = std::make_shared<ThreadPool>(count);
  std::lock_guard lock(pool_mutex);
  pool = std::move(fresh);
}

int num_threads() { return shared_pool()->size(); }

void parallel_for(int64_t count, const std::function<void(int64_t)>& task) {
  const std::shared_ptr<ThreadPool> threads = shared_pool();
  if (count <= 1 || threads->size() == 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  threads->run(count, task);
}

}  // namespace octavo::cpu
