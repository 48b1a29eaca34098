// linear. Few rows of x: weights are decoded in registers as they stream past. More: a panel of weight rows is decoded
// once and stays in the second-level cache while each group of rows of x, small enough for the first level, passes over
// it. Floor: one read of the weights, or T N K fused multiply-adds.
#include "octavo/linear.h"

#include "cpu/kernels/dot_tile.h"
#include "cpu/kernels/kernels.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kPanelColumns = 64;
constexpr int64_t kChunk = 768;  // of the common length: so that both sides of a tile stay in the first-level cache
constexpr int64_t kMostRows = 512;
constexpr int64_t kCacheLine = 64;

OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A panel's columns as weights of the kind W, every `stride` elements; past the last one, the first is repeated.
template <class W, bool kPrefetch>
struct PlainPanel {
  const W* weights;
  int64_t stride;
  int64_t ahead;

  OCTAVO_INLINE PlainColumns<W, kPrefetch> tile(int64_t c, int64_t count, int64_t start) const {
    PlainColumns<W, kPrefetch> columns;
    for (int i = 0; i < kTileColumns; ++i) columns.column[i] = weights + (c + i < count ? c + i : c) * stride + start;
    columns.ahead = ahead;
    return columns;
  }
};

template <WeightFormat kFormat>
struct BlockPanel {
  const uint8_t* weights;
  int64_t stride;  // bytes
  int64_t ahead;

  OCTAVO_INLINE BlockColumns<kFormat> tile(int64_t c, int64_t count, int64_t start) const {
    BlockColumns<kFormat> columns;
    for (int i = 0; i < kTileColumns; ++i) {
      columns.column[i] = weights + (c + i < count ? c + i : c) * stride + row_bytes(kFormat, start);
    }
    columns.ahead = ahead;
    return columns;
  }
};

template <WeightFormat kFormat>
inline void decode_row(const uint8_t* row, int64_t length, float* out) {
  if constexpr (kFormat == WeightFormat::kBFloat16) {
    const auto* weights = reinterpret_cast<const BFloat16*>(row);
    for (int64_t k = 0; k < length; k += kLanes) {
      const int lanes = static_cast<int>(least(length - k, kLanes));
      store_some(out + k, load_some(weights + k, lanes), lanes);
    }
  } else if constexpr (kFormat != WeightFormat::kFloat32) {
    for (int64_t k = 0; k < length; k += kBlockWeights) {
      Vec values[kBlockVecs];
      decode_block<kFormat>(row + row_bytes(kFormat, k), values);
      for (int i = 0; i < kBlockVecs; ++i) store(out + k + i * kLanes, values[i]);
    }
  }
}

template <class T, WeightFormat kFormat>
class Linear {
 public:
  // x: rows [first_row, first_row + num_rows) in fp32, lanes in the order that kFormat wants.
  Linear(const LinearArgs& args, const float* x, int64_t first_row, int64_t num_rows)
      : args_(args),
        x_(x),
        first_row_(first_row),
        num_rows_(num_rows),
        length_(args.in_features),
        weight_stride_(row_bytes(kFormat, args.in_features)) {}

  // Output columns [begin, end).
  void columns(int64_t begin, int64_t end) const {
    for (int64_t column = begin; column < end; column += kPanelColumns) {
      const int64_t count = least(end - column, kPanelColumns);
      const uint8_t* rows = static_cast<const uint8_t*>(args_.weight) + column * weight_stride_;
      if (num_rows_ <= 2 * kTileRows) {
        streamed(rows, column, count);
      } else {
        decoded(rows, column, count);
      }
    }
  }

 private:
  void streamed(const uint8_t* rows, int64_t column, int64_t count) const {
    if constexpr (kFormat == WeightFormat::kFloat32) {
      const auto* weights = reinterpret_cast<const float*>(rows);
      groups(PlainPanel<float, true>{weights, length_, kTileColumns * length_}, column, count);
    } else if constexpr (kFormat == WeightFormat::kBFloat16) {
      const auto* weights = reinterpret_cast<const BFloat16*>(rows);
      groups(PlainPanel<BFloat16, true>{weights, length_, kTileColumns * length_}, column, count);
    } else {
      groups(BlockPanel<kFormat>{rows, weight_stride_, kTileColumns * weight_stride_}, column, count);
    }
  }

  void decoded(const uint8_t* rows, int64_t column, int64_t count) const {
    PlainPanel<float, false> panel{reinterpret_cast<const float*>(rows), length_, 0};
    if constexpr (kFormat != WeightFormat::kFloat32) {
      float* weights = scratch(Scratch::kWeights, kPanelColumns * length_);
      for (int64_t c = 0; c < count; ++c)
        decode_row<kFormat>(rows + c * weight_stride_, length_, weights + c * length_);
      panel.weights = weights;
    }
    groups(panel, column, count);
  }

  // All rows of x against the panel, in groups of much the same size.
  template <class Panel>
  OCTAVO_INLINE void groups(const Panel& panel, int64_t column, int64_t count) const {
    const int64_t number = (num_rows_ + kTileRows - 1) / kTileRows;
    for (int64_t i = 0; i < number; ++i) {
      const int64_t row = num_rows_ * i / number;
      group_of<kTileRows>(num_rows_ * (i + 1) / number - row, panel, row, column, count);
    }
  }

  template <int kRows, class Panel>
  OCTAVO_INLINE void group_of(int64_t rows, const Panel& panel, int64_t row, int64_t column, int64_t count) const {
    if constexpr (kRows > 0) {
      if (rows == kRows) return group<kRows>(panel, row, column, count);
      group_of<kRows - 1>(rows, panel, row, column, count);
    }
  }

  // kRows rows of x against the panel.
  template <int kRows, class Panel>
  void group(const Panel& panel, int64_t row, int64_t column, int64_t count) const {
    float sums[kRows][kPanelColumns];
    for (int64_t start = 0; start < length_; start += kChunk) {
      for (int64_t c = 0; c < count; c += kTileColumns) {
        dot_tile<kRows>(x_ + row * length_ + start, length_, panel.tile(c, count, start),
                        least(length_ - start, kChunk), start > 0, &sums[0][c], kPanelColumns);
      }
    }
    for (int r = 0; r < kRows; ++r) finish(sums[r], first_row_ + row + r, column, count);
  }

  void finish(const float* sums, int64_t row, int64_t column, int64_t count) const {
    T* out = static_cast<T*>(args_.out) + row * args_.out_features + column;
    const T* bias = static_cast<const T*>(args_.bias);
    for (int64_t c = 0; c < count; c += kLanes) {
      const int lanes = static_cast<int>(least(count - c, kLanes));
      Vec sum = load_some(sums + c, lanes);
      if (bias != nullptr) sum = sum + load_some(bias + column + c, lanes);
      store_some(out + c, sum, lanes);
    }
  }

  const LinearArgs& args_;
  const float* x_;
  const int64_t first_row_;
  const int64_t num_rows_;
  const int64_t length_;
  const int64_t weight_stride_;
};

// x as the kernels want it: itself, or a copy in fp32 with transposed lanes.
template <WeightFormat kFormat, class T>
const float* prepared(const T* x, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    if (!transposed(kFormat)) return x;
  }
  float* out = scratch(Scratch::kActivations, count);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int lanes = static_cast<int>(least(count - i, kLanes));
    const Vec v = load_some(x + i, lanes);
    store_some(out + i, transposed(kFormat) ? transpose_lanes(v) : v, lanes);
  }
  return out;
}

template <class T, WeightFormat kFormat>
void run(const LinearArgs& args) {
  const int64_t length = args.in_features;
  for (int64_t first = 0; first < args.num_tokens; first += kMostRows) {
    const int64_t rows = least(args.num_tokens - first, kMostRows);
    const float* x = prepared<kFormat>(static_cast<const T*>(args.x) + first * length, rows * length);
    const Linear<T, kFormat> linear(args, x, first, rows);
    parallel_ranges(args.out_features, kTileColumns, rows * length,
                    [&](int64_t begin, int64_t end) { linear.columns(begin, end); });
  }
}

template <class T>
void run_format(const LinearArgs& args) {
  switch (args.format) {
    case WeightFormat::kFloat32:
      return run<T, WeightFormat::kFloat32>(args);
    case WeightFormat::kBFloat16:
      return run<T, WeightFormat::kBFloat16>(args);
    case WeightFormat::kQ4_0:
      return run<T, WeightFormat::kQ4_0>(args);
    case WeightFormat::kQ4_1:
      return run<T, WeightFormat::kQ4_1>(args);
    case WeightFormat::kQ8_0:
      return run<T, WeightFormat::kQ8_0>(args);
  }
}

}  // namespace

void linear(const LinearArgs& args) {
  with_element(args.dtype, [&]<class T>(T) { run_format<T>(args); });
}

}  // namespace octavo::cpu::OCTAVO_ISA
