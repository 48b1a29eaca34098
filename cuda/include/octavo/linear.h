// out = x W^T + bias, with W in fp32, bf16 or a GGUF block format, packed once. A row of `out` depends on its row of
// `x` alone, bit by bit: not on how many rows there are, nor on the number of threads.
#pragma once

#include <cstddef>
#include <memory>

#include "octavo/tensor.h"

namespace octavo {

// The block formats hold 32 weights each, as GGUF stores them (fp16 scales, low nibbles first):
// Q4_0: d, 16 bytes, (q - 8) d. Q4_1: d, m, 16 bytes, q d + m. Q8_0: d, 32 signed bytes, q d.
enum class WeightFormat : int32_t { kFloat32, kBFloat16, kQ4_0, kQ4_1, kQ8_0 };

inline constexpr int kBlockWeights = 32;

// Bytes that a row of `in_features` weights takes, as it is given.
constexpr int64_t row_bytes(WeightFormat format, int64_t in_features) {
  switch (format) {
    case WeightFormat::kFloat32:
      return in_features * 4;
    case WeightFormat::kBFloat16:
      return in_features * 2;
    case WeightFormat::kQ4_0:
      return in_features / kBlockWeights * 18;
    case WeightFormat::kQ4_1:
      return in_features / kBlockWeights * 20;
    case WeightFormat::kQ8_0:
      break;
  }
  return in_features / kBlockWeights * 34;
}

// A weight matrix in the order in which linear reads it. Immutable.
class LinearWeight {
 public:
  // rows: [out_features, row_bytes(format, in_features)] bytes; not needed afterwards.
  LinearWeight(WeightFormat format, const void* rows, int32_t out_features, int32_t in_features);

  WeightFormat format() const { return format_; }
  int32_t out_features() const { return out_features_; }
  int32_t in_features() const { return in_features_; }
  const uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }  // bytes

 private:
  struct Release {
    size_t size;
    void operator()(uint8_t* data) const;
  };

  WeightFormat format_;
  int32_t out_features_;
  int32_t in_features_;
  size_t size_;
  std::unique_ptr<uint8_t, Release> data_;
};

struct LinearArgs {
  void* out;      // [num_tokens, out_features]
  const void* x;  // [num_tokens, in_features]
  const LinearWeight* weight;
  const void* bias;  // [out_features] or null
  int32_t num_tokens;
  DType dtype;  // of out, x and bias; sums in fp32
};

namespace cpu {
void linear(const LinearArgs& args);
}

}  // namespace octavo
