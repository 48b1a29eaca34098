#include "octavo/block_allocator.h"

#include <algorithm>
#include <limits>
#include <string>

#include "octavo/error.h"

namespace octavo {
namespace {

int64_t checked_size(int64_t num_blocks) {
  if (num_blocks < 1 || num_blocks >= std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("num_blocks must be at least 1 and below 2^31 - 1, got " + std::to_string(num_blocks));
  }
  return num_blocks;
}

std::string name_of(int64_t block) { return "block " + std::to_string(block); }

}  // namespace

BlockAllocator::BlockAllocator(int64_t num_blocks)
    : num_blocks_(checked_size(num_blocks)),
      next_(num_blocks + 1),
      prev_(num_blocks + 1),
      ref_counts_(num_blocks + 1),
      keys_(num_blocks + 1),
      published_(num_blocks + 1) {
  reset();
}

std::vector<int32_t> BlockAllocator::allocate(int64_t count) {
  if (count < 0) throw std::invalid_argument("count must not be negative, got " + std::to_string(count));
  const int64_t available = free_.size + cached_.size;
  if (count > available) {
    throw OutOfBlocks(std::to_string(count) + " blocks wanted, " + std::to_string(available) + " available");
  }
  std::vector<int32_t> blocks(count);
  for (int32_t& block : blocks) block = take();
  return blocks;
}

void BlockAllocator::retain(std::span<const int64_t> blocks) {
  for (const int64_t block : blocks) {
    const int32_t id = checked_id(block);
    if (ref_counts_[id] == 0 && !published_[id]) throw std::invalid_argument(name_of(block) + " is free");
  }
  for (const int64_t block : blocks) {
    const auto id = static_cast<int32_t>(block);
    if (ref_counts_[id]++ == 0) remove(cached_, id);
  }
}

void BlockAllocator::release(std::span<const int64_t> blocks) {
  // Counts first, all or nothing; queues only once every count was there to lower.
  retired_.clear();
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int64_t block = blocks[i];
    const bool exists = block >= 1 && block <= num_blocks_;
    if (!exists || ref_counts_[block] == 0) {
      for (size_t j = 0; j < i; ++j) ++ref_counts_[blocks[j]];
      throw std::invalid_argument(name_of(block) + (exists ? " is not live" : " does not exist"));
    }
    if (--ref_counts_[block] == 0) retired_.push_back(static_cast<int32_t>(block));
  }
  for (const int32_t block : retired_) push_back(published_[block] ? cached_ : free_, block);
}

int32_t BlockAllocator::ref_count(int64_t block) const { return ref_counts_[checked_id(block)]; }

int64_t BlockAllocator::publish(int64_t block, uint64_t key) {
  const int32_t id = checked_id(block);
  if (ref_counts_[id] == 0) throw std::invalid_argument(name_of(block) + " is not live");
  const int64_t holder = find(key);
  if (holder >= 0) return holder;
  if (published_[id]) throw std::invalid_argument(name_of(block) + " is published under another key");
  index_.emplace(key, id);
  keys_[id] = key;
  published_[id] = 1;
  return id;
}

int64_t BlockAllocator::publish_all(std::span<const int64_t> blocks, std::span<const uint64_t> keys) {
  if (blocks.size() != keys.size()) throw std::invalid_argument("blocks and keys differ in length");
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (publish(blocks[i], keys[i]) != blocks[i]) return static_cast<int64_t>(i);
  }
  return static_cast<int64_t>(blocks.size());
}

int64_t BlockAllocator::find(uint64_t key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? -1 : found->second;
}

int64_t BlockAllocator::grow_tables(const BlockTables& tables, std::span<const int32_t> rows,
                                    std::span<const int32_t> wanted) {
  if (rows.size() != wanted.size()) throw std::invalid_argument("rows and wanted differ in length");
  for (size_t i = 0; i < rows.size(); ++i) {
    checked_row(tables, rows[i]);
    if (wanted[i] < 0 || wanted[i] > tables.max_blocks) {
      throw std::invalid_argument("row " + std::to_string(rows[i]) + ": " + std::to_string(wanted[i]) +
                                  " blocks wanted, a row holds " + std::to_string(tables.max_blocks));
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const int32_t length = tables.lengths[rows[i]];
    if (wanted[i] - length > free_.size + cached_.size) return static_cast<int64_t>(i);
    int32_t* row = tables.ids + rows[i] * tables.max_blocks;
    for (int32_t column = length; column < wanted[i]; ++column) row[column] = take();
    if (wanted[i] > length) tables.lengths[rows[i]] = wanted[i];
  }
  return static_cast<int64_t>(rows.size());
}

void BlockAllocator::release_row(const BlockTables& tables, int64_t row) {
  const int64_t length = checked_row(tables, row);
  int32_t* ids = tables.ids + row * tables.max_blocks;
  std::vector<int64_t> blocks(length);
  for (int64_t i = 0; i < length; ++i) blocks[i] = ids[length - 1 - i];
  release(blocks);
  for (int64_t i = 0; i < length; ++i) ids[i] = 0;
  tables.lengths[row] = 0;
}

void BlockAllocator::reset() {
  for (int64_t block = 1; block <= num_blocks_; ++block) {
    if (ref_counts_[block] > 0) throw std::invalid_argument(name_of(block) + " is live");
  }
  free_ = cached_ = Queue{};
  index_.clear();
  std::fill(published_.begin(), published_.end(), 0);
  for (int64_t block = 1; block <= num_blocks_; ++block) push_back(free_, static_cast<int32_t>(block));
}

void BlockAllocator::check() const {
  const int64_t queued = check_queue(free_, false, "free") + check_queue(cached_, true, "cached");
  int64_t live = 0;
  int64_t published = 0;
  for (int64_t block = 1; block <= num_blocks_; ++block) {
    if (ref_counts_[block] < 0) throw std::runtime_error(name_of(block) + " has a negative count");
    live += ref_counts_[block] > 0;
    published += published_[block];
    if (published_[block] && find(keys_[block]) != block) {
      throw std::runtime_error(name_of(block) + " is published under a key that does not lead to it");
    }
  }
  if (live + queued != num_blocks_) {
    throw std::runtime_error(std::to_string(live) + " live and " + std::to_string(queued) + " queued blocks of " +
                             std::to_string(num_blocks_));
  }
  if (published != static_cast<int64_t>(index_.size())) {
    throw std::runtime_error(std::to_string(index_.size()) + " keys for " + std::to_string(published) +
                             " published blocks");
  }
}

void BlockAllocator::push_back(Queue& queue, int32_t block) {
  prev_[block] = queue.back;
  next_[block] = 0;
  (queue.size == 0 ? queue.front : next_[queue.back]) = block;
  queue.back = block;
  ++queue.size;
}

void BlockAllocator::remove(Queue& queue, int32_t block) {
  const int32_t before = prev_[block];
  const int32_t after = next_[block];
  (before == 0 ? queue.front : next_[before]) = after;
  (after == 0 ? queue.back : prev_[after]) = before;
  --queue.size;
}

// The next block to hand out, with count 1. The caller has checked that there is one.
int32_t BlockAllocator::take() {
  Queue& queue = free_.size > 0 ? free_ : cached_;
  const int32_t block = queue.front;
  remove(queue, block);
  if (published_[block]) {
    index_.erase(keys_[block]);
    published_[block] = 0;
  }
  ref_counts_[block] = 1;
  return block;
}

int32_t BlockAllocator::checked_id(int64_t block) const {
  if (block < 1 || block > num_blocks_) throw std::invalid_argument(name_of(block) + " does not exist");
  return static_cast<int32_t>(block);
}

// The row's length, once the row and its length are known to be inside the tables.
int64_t BlockAllocator::checked_row(const BlockTables& tables, int64_t row) const {
  if (row < 0 || row >= tables.slots) throw std::invalid_argument("row " + std::to_string(row) + " does not exist");
  const int64_t length = tables.lengths[row];
  if (length < 0 || length > tables.max_blocks) {
    throw std::invalid_argument("row " + std::to_string(row) + " has length " + std::to_string(length));
  }
  return length;
}

int64_t BlockAllocator::check_queue(const Queue& queue, bool published, const char* name) const {
  int64_t count = 0;
  int32_t before = 0;
  for (int32_t block = queue.front; block != 0; before = block, block = next_[block]) {
    const std::string which = name_of(block) + " in the " + name + " queue";
    if (++count > queue.size) throw std::runtime_error(which + " is behind the queue's end");
    if (ref_counts_[block] != 0) throw std::runtime_error(which + " has a count");
    if ((published_[block] != 0) != published) throw std::runtime_error(which + " belongs in the other queue");
    if (prev_[block] != before) throw std::runtime_error(which + " has a wrong predecessor");
  }
  if (count != queue.size || queue.back != before) {
    throw std::runtime_error(std::string("the ") + name + " queue is broken");
  }
  return count;
}

}  // namespace octavo
