// linear, for one row of x to thousands, every row with the same bits whatever the number:
// - up to a tile's rows: weights are decoded in registers as they stream past;
// - up to what the first-level cache holds: four weight rows are decoded to it, and all rows of x pass over them;
// - more: a panel of weight rows is decoded to the second-level cache, and groups of rows of x pass over it in turn.
// Floor: one read of the weights, or T N K fused multiply-adds, whichever takes longer.
#include "octavo/linear.h"

#include "cpu/kernels/dot_tile.h"
#include "cpu/kernels/kernels.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

constexpr int64_t kPanelColumns = 64;
constexpr int64_t kResidentRows = 18;  // of x, a chunk long, beside four weight rows and the sums, in 48 KiB
constexpr int64_t kLongestChunk = 640;
constexpr int64_t kMostRows = 512;
constexpr int64_t kCacheLine = 64;

OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The common length is summed in chunks that the first-level cache holds, equal ones, whole blocks.
OCTAVO_INLINE int64_t chunk_length(int64_t length) {
  const int64_t equal = ceil_div(length, ceil_div(length, kLongestChunk));
  return ceil_div(equal, kBlockWeights) * kBlockWeights;
}

// Which weights a tile should ask for while it works: those `distance` elements behind, shared out among the `groups`
// of rows that pass over the same tile, of which this is one.
struct Ahead {
  int64_t distance;
  int64_t group;
  int64_t groups;

  OCTAVO_INLINE int64_t operator()(int64_t column) const { return column % groups == group ? distance : 0; }
};

// Four columns from `c` on, of `count` that start at `weights`; past the last one, column c is repeated.
template <bool kPrefetch, class W>
OCTAVO_INLINE PlainColumns<W, kPrefetch> plain_tile(const W* weights, int64_t stride, int64_t c, int64_t count,
                                                    const Ahead& ahead) {
  PlainColumns<W, kPrefetch> tile;
  for (int i = 0; i < kTileColumns; ++i) {
    tile.column[i] = weights + (c + i < count ? c + i : c) * stride;
    tile.ahead[i] = ahead(c + i);
  }
  return tile;
}

template <WeightFormat kFormat>
inline void decode_row(const uint8_t* row, int64_t length, int64_t ahead, float* out) {
  if constexpr (kFormat == WeightFormat::kBFloat16) {
    const auto* weights = reinterpret_cast<const BFloat16*>(row);
    for (int64_t k = 0; k < length; k += kLanes) {
      const int lanes = static_cast<int>(least(length - k, kLanes));
      __builtin_prefetch(row + 2 * k + ahead);
      store_some(out + k, load_some(weights + k, lanes), lanes);
    }
  } else if constexpr (kFormat != WeightFormat::kFloat32) {
    for (int64_t k = 0; k < length; k += kBlockWeights) {
      Vec values[kBlockVecs];
      const uint8_t* block = row + row_bytes(kFormat, k);
      __builtin_prefetch(block + ahead);
      decode_block<kFormat>(block, values);
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
        chunk_(chunk_length(args.in_features)),
        weight_stride_(row_bytes(kFormat, args.in_features)) {}

  // Output columns [begin, end).
  void columns(int64_t begin, int64_t end) const {
    // Panels of one size: a narrow last one would read x anew for little.
    const int64_t width =
        ceil_div(ceil_div(end - begin, ceil_div(end - begin, kPanelColumns)), kTileColumns) * kTileColumns;
    for (int64_t column = begin; column < end; column += width) {
      const Panel panel{static_cast<const uint8_t*>(args_.weight) + column * weight_stride_, column,
                        least(end - column, width)};
      if (num_rows_ <= kTileRows) {
        with_rows<kTileRows>(num_rows_, [&]<int kRows>() { streamed<kRows>(panel); });
      } else if (num_rows_ <= kResidentRows) {
        resident(panel);
      } else {
        panelled(panel);
      }
    }
  }

 private:
  static constexpr bool kDecoded = kFormat != WeightFormat::kFloat32;

  struct Panel {
    const uint8_t* weights;
    int64_t column;
    int64_t count;
  };

  // Calls f<kRows>() with kRows = rows.
  template <int kRows, class F>
  OCTAVO_INLINE static void with_rows(int64_t rows, const F& f) {
    if constexpr (kRows > 0) {
      if (rows == kRows) return f.template operator()<kRows>();
      with_rows<kRows - 1>(rows, f);
    }
  }

  // f<kRows>(first row, group, number of groups) for groups of rows of much the same size.
  template <class F>
  OCTAVO_INLINE void for_groups(const F& f) const {
    const int64_t groups = ceil_div(num_rows_, kTileRows);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = num_rows_ * group / groups;
      with_rows<kTileRows>(num_rows_ * (group + 1) / groups - row,
                           [&]<int kRows>() { f.template operator()<kRows>(row, Ahead{0, group, groups}); });
    }
  }

  // f(start, length) for each chunk of the common length.
  template <class F>
  OCTAVO_INLINE void for_chunks(const F& f) const {
    for (int64_t start = 0; start < length_; start += chunk_) f(start, least(length_ - start, chunk_));
  }

  template <int kRows>
  void streamed(const Panel& panel) const {
    float sums[kRows * kPanelColumns];
    for_chunks([&](int64_t start, int64_t chunk) {
      for (int64_t c = 0; c < panel.count; c += kTileColumns) {
        dot_tile<kRows>(x_ + start, length_, stored_tile(panel, c, start), chunk, start > 0, sums + c, kPanelColumns);
      }
    });
    finish(sums, 0, kRows, panel);
  }

  // Columns c ... of the panel from `start` on, as they are stored.
  OCTAVO_INLINE auto stored_tile(const Panel& panel, int64_t c, int64_t start) const {
    if constexpr (kFormat == WeightFormat::kFloat32 || kFormat == WeightFormat::kBFloat16) {
      using W = std::conditional_t<kFormat == WeightFormat::kFloat32, float, BFloat16>;
      const auto* weights = reinterpret_cast<const W*>(panel.weights) + start;
      return plain_tile<true>(weights, length_, c, panel.count, Ahead{kTileColumns * length_, 0, 1});
    } else {
      BlockColumns<kFormat> tile;
      for (int i = 0; i < kTileColumns; ++i) {
        tile.column[i] = panel.weights + (c + i < panel.count ? c + i : c) * weight_stride_ + row_bytes(kFormat, start);
      }
      tile.ahead = kTileColumns * weight_stride_;
      return tile;
    }
  }

  void resident(const Panel& panel) const {
    float sums[kResidentRows * kPanelColumns];
    float* decoded = kDecoded ? scratch(Scratch::kWeights, kTileColumns * chunk_) : nullptr;
    for_chunks([&](int64_t start, int64_t chunk) {
      for (int64_t c = 0; c < panel.count; c += kTileColumns) {
        const float* weights = reinterpret_cast<const float*>(panel.weights) + c * length_ + start;
        const int64_t count = least(panel.count - c, kTileColumns);
        if constexpr (kDecoded) {
          decode(panel, c, count, start, chunk, kTileColumns * weight_stride_, decoded, chunk_);
          weights = decoded;
        }
        for_groups([&]<int kRows>(int64_t row, Ahead ahead) {
          ahead.distance = kTileColumns * length_;
          const auto tile = plain_tile<!kDecoded>(weights, kDecoded ? chunk_ : length_, 0, count, ahead);
          dot_tile<kRows>(x_ + row * length_ + start, length_, tile, chunk, start > 0, sums + row * kPanelColumns + c,
                          kPanelColumns);
        });
      }
    });
    finish(sums, 0, num_rows_, panel);
  }

  void panelled(const Panel& panel) const {
    const float* weights = reinterpret_cast<const float*>(panel.weights);
    if constexpr (kDecoded) {
      float* decoded = scratch(Scratch::kWeights, kPanelColumns * length_);
      decode(panel, 0, panel.count, 0, length_, 0, decoded, length_);
      weights = decoded;
    }
    for_groups([&]<int kRows>(int64_t row, Ahead ahead) {
      float sums[kRows * kPanelColumns];
      ahead.distance = kPanelColumns * length_;
      for_chunks([&](int64_t start, int64_t chunk) {
        for (int64_t c = 0; c < panel.count; c += kTileColumns) {
          const auto tile = plain_tile<!kDecoded>(weights + start, length_, c, panel.count, ahead);
          dot_tile<kRows>(x_ + row * length_ + start, length_, tile, chunk, start > 0, sums + c, kPanelColumns);
        }
      });
      finish(sums, row, kRows, panel);
      if constexpr (kDecoded) prefetch_share(panel, ahead);
    });
  }

  // Of the next panel's stored weights, the share of one of the groups that pass over this panel.
  void prefetch_share(const Panel& panel, const Ahead& ahead) const {
    const int64_t bytes = kPanelColumns * weight_stride_;
    const uint8_t* next = panel.weights + bytes;
    for (int64_t at = bytes * ahead.group / ahead.groups; at < bytes * (ahead.group + 1) / ahead.groups;
         at += kCacheLine) {
      __builtin_prefetch(next + at, 0, 2);
    }
  }

  // Weights [start, start + chunk) of `count` columns to rows of `out`; meanwhile asks for what is `ahead` bytes
  // behind.
  void decode(const Panel& panel, int64_t c, int64_t count, int64_t start, int64_t chunk, int64_t ahead, float* out,
              int64_t out_stride) const {
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* row = panel.weights + (c + i) * weight_stride_ + row_bytes(kFormat, start);
      decode_row<kFormat>(row, chunk, ahead, out + i * out_stride);
    }
  }

  // Rows of the sums [rows][kPanelColumns], plus the bias, to the output.
  void finish(const float* sums, int64_t row, int64_t rows, const Panel& panel) const {
    for (int64_t r = 0; r < rows; ++r)
      finish_row(sums + r * kPanelColumns, first_row_ + row + r, panel.column, panel.count);
  }

  void finish_row(const float* sums, int64_t row, int64_t column, int64_t count) const {
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
  const int64_t chunk_;
  const int64_t weight_stride_;  // bytes
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
