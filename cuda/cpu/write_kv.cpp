#include "octavo/write_kv.h"

#include <array>
#include <cmath>
#include <vector>

#include "cpu/element.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu {
namespace {

constexpr int32_t kMaxHeadDim = 512;

template <class T>
class TokenWriter {
 public:
  TokenWriter(const WriteKvArgs& args, int64_t token)
      : args_(args),
        dim_(args.pool.head_dim),
        row_(static_cast<const T*>(args.qkv) + token * args.qkv_stride),
        cos_sin_(args.cos_sin + static_cast<int64_t>(args.positions[token]) * args.rotary_dim) {}

  void write(int64_t token) {
    T* query = static_cast<T*>(args_.query_out) + token * args_.q_heads * dim_;
    for (int32_t head = 0; head < args_.q_heads; ++head) {
      rotate(head, static_cast<const T*>(args_.q_norm_weight));
      put(query + static_cast<int64_t>(head) * dim_);
    }
    const int64_t slot = args_.slots[token];
    if (slot < 0) return;
    const KvPool& pool = args_.pool;
    T* key = static_cast<T*>(pool.data) + slot / pool.block_size * pool.block_stride() +
             args_.layer * pool.layer_stride() + slot % pool.block_size * dim_;
    for (int32_t head = 0; head < pool.kv_heads; ++head) {
      rotate(args_.q_heads + head, static_cast<const T*>(args_.k_norm_weight));
      put(key + head * pool.head_stride());
      read(args_.q_heads + pool.kv_heads + head);
      put(key + pool.kv_stride() + head * pool.head_stride());
    }
  }

 private:
  void read(int32_t head) {
    const T* source = row_ + static_cast<int64_t>(head) * dim_;
    for (int32_t i = 0; i < dim_; ++i) values_[i] = load(source[i]);
    if (args_.bias == nullptr) return;
    const T* bias = static_cast<const T*>(args_.bias) + static_cast<int64_t>(head) * dim_;
    for (int32_t i = 0; i < dim_; ++i) values_[i] += load(bias[i]);
  }

  void rotate(int32_t head, const T* norm_weight) {
    read(head);
    if (norm_weight != nullptr) normalise(norm_weight);
    const int32_t half = args_.rotary_dim / 2;
    for (int32_t i = 0; i < half; ++i) {
      const float a = values_[i];
      const float b = values_[i + half];
      values_[i] = a * cos_sin_[i] - b * cos_sin_[half + i];
      values_[i + half] = b * cos_sin_[i] + a * cos_sin_[half + i];
    }
  }

  void normalise(const T* weight) {
    float sum = 0.0f;
    for (int32_t i = 0; i < dim_; ++i) sum += values_[i] * values_[i];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(dim_) + args_.norm_eps);
    for (int32_t i = 0; i < dim_; ++i) values_[i] *= scale * load(weight[i]);
  }

  void put(T* target) const {
    for (int32_t i = 0; i < dim_; ++i) store(target[i], values_[i]);
  }

  const WriteKvArgs& args_;
  const int32_t dim_;
  const T* row_;
  const float* cos_sin_;
  std::array<float, kMaxHeadDim> values_;
};

}  // namespace

void write_kv(const WriteKvArgs& args) {
  if (args.pool.head_dim > kMaxHeadDim) throw OpError("kv_pool: head_dim above 512");
  const int64_t slots = args.pool.num_blocks * args.pool.block_size;
  for (int32_t token = 0; token < args.num_tokens; ++token) {
    if (args.slots[token] >= slots) throw OpError("slots: a slot outside the pool");
    if (args.positions[token] < 0 || args.positions[token] >= args.max_positions) {
      throw OpError("positions: a position outside cos_sin");
    }
  }
  with_element(args.pool.dtype, [&]<class T>(T) {
    parallel_for(args.num_tokens, [&](int64_t token) { TokenWriter<T>(args, token).write(token); });
  });
}

}  // namespace octavo::cpu
