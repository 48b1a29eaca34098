// The block allocator: ids, reference counts, publication keys. It knows nothing of what blocks hold.
// The contract, order included, is engine/kv/allocator.py; engine/kv/oracle.py is the same in Python.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace octavo {

// Row-major [slots, max_blocks] block ids and [slots] row lengths, owned by the caller.
struct BlockTables {
  int32_t* ids;
  int32_t* lengths;
  int64_t slots;
  int64_t max_blocks;
};

class BlockAllocator {
 public:
  explicit BlockAllocator(int64_t num_blocks);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_free() const { return free_.size; }
  int64_t num_cached() const { return cached_.size; }
  int64_t num_live() const { return num_blocks_ - free_.size - cached_.size; }

  std::vector<int32_t> allocate(int64_t count);
  void retain(std::span<const int64_t> blocks);
  void release(std::span<const int64_t> blocks);
  int32_t ref_count(int64_t block) const;

  int64_t publish(int64_t block, uint64_t key);
  int64_t publish_all(std::span<const int64_t> blocks, std::span<const uint64_t> keys);
  int64_t find(uint64_t key) const;

  int64_t grow_tables(const BlockTables& tables, std::span<const int32_t> rows, std::span<const int32_t> wanted);
  void release_row(const BlockTables& tables, int64_t row);

  void reset();
  void check() const;

 private:
  // A doubly linked queue through next_ and prev_: a block is in one queue at most.
  struct Queue {
    int32_t front = 0;
    int32_t back = 0;
    int64_t size = 0;
  };

  void push_back(Queue& queue, int32_t block);
  void remove(Queue& queue, int32_t block);
  int32_t take();
  int32_t checked_id(int64_t block) const;
  int64_t checked_row(const BlockTables& tables, int64_t row) const;
  int64_t check_queue(const Queue& queue, bool published, const char* name) const;

  int64_t num_blocks_;
  Queue free_;
  Queue cached_;
  std::vector<int32_t> next_;  // [num_blocks + 1]; 0 (the scratch block) ends a queue
  std::vector<int32_t> prev_;
  std::vector<int32_t> ref_counts_;
  std::vector<uint64_t> keys_;  // valid where published_
  std::vector<uint8_t> published_;
  std::unordered_map<uint64_t, int32_t> index_;
  std::vector<int32_t> retired_;  // scratch of release()
};

}  // namespace octavo
