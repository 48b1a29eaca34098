#include "octavo/write_kv.h"

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/normalise.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

template <class T>
class TokenWriter {
 public:
  TokenWriter(const WriteKvArgs& args, int64_t token)
      : args_(args),
        token_(token),
        dim_(args.pool.head_dim),
        row_(static_cast<const T*>(args.qkv) + token * args.qkv_stride),
        cos_sin_(args.cos_sin + static_cast<int64_t>(args.positions[token]) * args.rotary_dim) {}

  void write() {
    T* query = static_cast<T*>(args_.query_out) + token_ * args_.q_heads * dim_;
    for (int32_t head = 0; head < args_.q_heads; ++head) {
      rotate(head, static_cast<const T*>(args_.q_norm_weight));
      put(query + static_cast<int64_t>(head) * dim_);
    }
    const int64_t slot = args_.slots[token_];
    if (slot >= 0) write_slot(slot);
  }

 private:
  void write_slot(int64_t slot) {
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

  void read(int32_t head) {
    const T* source = row_ + static_cast<int64_t>(head) * dim_;
    for (int32_t i = 0; i < dim_; ++i) values_[i] = cpu::load(source[i]);
    if (args_.bias == nullptr) return;
    const T* bias = static_cast<const T*>(args_.bias) + static_cast<int64_t>(head) * dim_;
    for (int32_t i = 0; i < dim_; ++i) values_[i] += cpu::load(bias[i]);
  }

  void rotate(int32_t head, const T* norm_weight) {
    read(head);
    if (norm_weight != nullptr) normalise(values_, values_, norm_weight, args_.norm_eps, dim_);
    const int32_t half = args_.rotary_dim / 2;
    const float* cos = cos_sin_;
    const float* sin = cos_sin_ + half;
    float* first = values_;
    float* second = values_ + half;
    for (int32_t i = 0; i < half; ++i) {
      const float a = first[i];
      const float b = second[i];
      first[i] = a * cos[i] - b * sin[i];
      second[i] = b * cos[i] + a * sin[i];
    }
  }

  void put(T* target) const {
    for (int32_t i = 0; i < dim_; ++i) cpu::store(target[i], values_[i]);
  }

  const WriteKvArgs& args_;
  const int64_t token_;
  const int32_t dim_;
  const T* row_;
  const float* cos_sin_;
  float values_[kMaxHeadDim];
};

}  // namespace

void write_kv(const WriteKvArgs& args) {
  with_element(args.pool.dtype, [&]<class T>(T) {
    const int64_t width = static_cast<int64_t>(args.q_heads + 2 * args.pool.kv_heads) * args.pool.head_dim;
    parallel_ranges(args.num_tokens, 1, 4 * width, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) TokenWriter<T>(args, token).write();
    });
  });
}

}  // namespace octavo::cpu::OCTAVO_ISA
