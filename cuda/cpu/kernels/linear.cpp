// linear, in pieces of 128 k of a panel of 48 columns. A few rows of x: weights are decoded in registers as they stream
// past. More: a piece is decoded to the first-level cache, and all rows of x pass over it. Each output element is the
// sum, in order, of its pieces, each one chain of fused multiply-adds along k; so its bits do not depend on the rows
// beside it, nor on how the work is shared out. Floor: one read of the weights, or T N K fused multiply-adds, whichever
// takes longer.
#include "octavo/linear.h"

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/strips.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// A tile of sums that fills the registers: rows by strips.
#if defined(__AVX512F__)
constexpr int kTileRows = 8;
constexpr int kTileStrips = kPanelStrips;
constexpr int kStreamedRows = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
constexpr int kTileStrips = 1;
constexpr int kStreamedRows = 1;
#else
constexpr int kTileRows = 3;
constexpr int kTileStrips = 1;
constexpr int kStreamedRows = 1;
#endif
constexpr int64_t kPiece = 128;  // of k: 24 KiB of decoded weights; and short chains round less
constexpr int64_t kMostRows = 512;
constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 4096;  // bytes of weights asked for in advance while they stream

template <int kRows, int kStrips>
class Sums {
 public:
  OCTAVO_INLINE Sums() {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 8
        for (int i = 0; i < kStripVecs; ++i) v_[r][s][i] = splat(0.0f);
      }
    }
  }

  // x: one k of each row.
  OCTAVO_INLINE void add(const float* x, int64_t x_stride, const Strip* weights) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec value = splat(x[r * x_stride]);
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 8
        for (int i = 0; i < kStripVecs; ++i) v_[r][s][i] = fma(value, weights[s].v[i], v_[r][s][i]);
      }
    }
  }

  // To p [kRows][kPanelColumns], in place of or on top of what is there.
  OCTAVO_INLINE void put(float* p, bool first) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 8
        for (int i = 0; i < kStripVecs; ++i) {
          float* place = p + r * kPanelColumns + s * kStripColumns + i * kLanes;
          store(place, first ? v_[r][s][i] : load(place) + v_[r][s][i]);
        }
      }
    }
  }

 private:
  Vec v_[kRows][kStrips][kStripVecs];
};

// sums (+)= `count` k of kRows rows of x times a panel's weights, decoded in registers.
template <WeightFormat kFormat, int kRows>
void stream_piece(const float* x, int64_t x_stride, const uint8_t* stored, int64_t count, bool first, float* sums) {
  constexpr int kCell = static_cast<int>(cell_length(kFormat));
  constexpr int kCellBytes = static_cast<int>(cell_bytes(kFormat));
  Sums<kRows, kPanelStrips> total;
  for (int64_t k = 0; k < count; k += kCell, stored += kCellBytes) {
    for (int at = 0; at < kCellBytes; at += kLine) __builtin_prefetch(stored + kAhead + at, 0, 2);
    const StripCell<kFormat> cells[kPanelStrips] = {StripCell<kFormat>(stored),
                                                    StripCell<kFormat>(stored + strip_bytes(kFormat)),
                                                    StripCell<kFormat>(stored + 2 * strip_bytes(kFormat))};
#pragma GCC unroll 32
    for (int i = 0; i < kCell; ++i) {
      const Strip weights[kPanelStrips] = {cells[0].at(i), cells[1].at(i), cells[2].at(i)};
      total.add(x + k + i, x_stride, weights);
    }
  }
  total.put(sums, first);
}

// Decodes `count` k of a panel to out [count][kPanelColumns].
template <WeightFormat kFormat>
void decode_piece(const uint8_t* stored, int64_t count, float* out) {
  constexpr int kCell = static_cast<int>(cell_length(kFormat));
  for (int64_t k = 0; k < count; k += kCell, stored += cell_bytes(kFormat)) {
#pragma GCC unroll 4
    for (int s = 0; s < kPanelStrips; ++s) {
      const StripCell<kFormat> cell(stored + s * strip_bytes(kFormat));
#pragma GCC unroll 32
      for (int i = 0; i < kCell; ++i) {
        const Strip strip = cell.at(i);
        float* place = out + (k + i) * kPanelColumns + s * kStripColumns;
#pragma GCC unroll 8
        for (int v = 0; v < kStripVecs; ++v) store(place + v * kLanes, strip.v[v]);
      }
    }
  }
}

// What a pass over a piece asks for meanwhile: of each k's `stride` bytes from `start` on, some cache lines.
struct Next {
  const uint8_t* start;
  int64_t stride;
};

// sums (+)= `count` k of kRows rows of x times kTileStrips strips of decoded weights [count][kPanelColumns].
template <int kRows, int kLines>
void add_piece(const float* x, int64_t x_stride, const float* weights, int64_t count, bool first, const Next& next,
               float* sums) {
  Sums<kRows, kTileStrips> total;
  for (int64_t k = 0; k < count; ++k, weights += kPanelColumns) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next.start + k * next.stride + line * kLine, 0, 2);
    Strip strips[kTileStrips];
#pragma GCC unroll 8
    for (int s = 0; s < kTileStrips; ++s) {
#pragma GCC unroll 8
      for (int i = 0; i < kStripVecs; ++i) strips[s].v[i] = load(weights + s * kStripColumns + i * kLanes);
    }
    total.add(x + k, x_stride, strips);
  }
  total.put(sums, first);
}

// Calls f<kRows>() with kRows = rows.
template <int kRows, class F>
OCTAVO_INLINE void with_rows(int64_t rows, const F& f) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return f.template operator()<kRows>();
    with_rows<kRows - 1>(rows, f);
  }
}

template <class T, WeightFormat kFormat>
class Linear {
 public:
  // x: rows [first_row, first_row + num_rows) in fp32.
  Linear(const LinearArgs& args, const float* x, int64_t first_row, int64_t num_rows)
      : args_(args), x_(x), first_row_(first_row), num_rows_(num_rows), length_(args.weight->in_features()) {}

  void panels(int64_t begin, int64_t end) const {
    float* sums = scratch(Scratch::kSums, num_rows_ * kPanelColumns);
    for (int64_t panel = begin; panel < end; ++panel) {
      const uint8_t* stored = args_.weight->data() + panel * panel_bytes(kFormat, length_);
      for (int64_t start = 0; start < length_; start += kPiece) {
        add(stored + start * kStride, start, least(length_ - start, kPiece), sums);
      }
      for (int64_t row = 0; row < num_rows_; ++row) finish(sums + row * kPanelColumns, row, panel * kPanelColumns);
    }
  }

 private:
  static constexpr int64_t kStride = cell_bytes(kFormat) / cell_length(kFormat);  // bytes for each k
  static constexpr int kLines = static_cast<int>((kStride + kLine - 1) / kLine);

  // sums [num_rows][kPanelColumns] (+)= k in [start, start + count).
  void add(const uint8_t* stored, int64_t start, int64_t count, float* sums) const {
    if (num_rows_ <= kStreamedRows) {
      return with_rows<kStreamedRows>(num_rows_, [&]<int kRows>() {
        stream_piece<kFormat, kRows>(x_ + start, length_, stored, count, start == 0, sums);
      });
    }
    const float* weights = reinterpret_cast<const float*>(stored);
    if constexpr (kFormat != WeightFormat::kFloat32) {
      float* decoded = scratch(Scratch::kWeights, kPiece * kPanelColumns);
      decode_piece<kFormat>(stored, count, decoded);
      weights = decoded;
    }
    const Next next{stored + kPiece * kStride, kStride};
    const int64_t groups = (num_rows_ + kTileRows - 1) / kTileRows;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = num_rows_ * group / groups;
      with_rows<kTileRows>(num_rows_ * (group + 1) / groups - row, [&]<int kRows>() {
        add_group<kRows>(group, groups, x_ + row * length_ + start, weights, count, start == 0, next,
                         sums + row * kPanelColumns);
      });
    }
  }

  // The next piece is asked for by the only group, or half by the first and half by the second.
  template <int kRows>
  void add_group(int64_t group, int64_t groups, const float* x, const float* weights, int64_t count, bool first,
                 const Next& next, float* sums) const {
    constexpr int kHalf = (kLines + 1) / 2;
    if (groups == 1) {
      add_strips<kRows, kLines>(x, weights, count, first, next, sums);
    } else if (group == 0) {
      add_strips<kRows, kHalf>(x, weights, count, first, next, sums);
    } else if (group == 1 && kLines > kHalf) {
      add_strips<kRows, kLines - kHalf>(x, weights, count, first, Next{next.start + kHalf * kLine, kStride}, sums);
    } else {
      add_strips<kRows, 0>(x, weights, count, first, next, sums);
    }
  }

  template <int kRows, int kAsked>
  OCTAVO_INLINE void add_strips(const float* x, const float* weights, int64_t count, bool first, const Next& next,
                                float* sums) const {
    for (int s = 0; s < kPanelStrips; s += kTileStrips) {
      const int64_t column = s * kStripColumns;
      add_piece<kRows, kAsked>(x, length_, weights + column, count, first, next, sums + column);
    }
  }

  // A row of sums, plus the bias, to the output.
  void finish(const float* sums, int64_t row, int64_t column) const {
    const int64_t columns = args_.weight->out_features();
    T* out = static_cast<T*>(args_.out) + (first_row_ + row) * columns + column;
    const T* bias = args_.bias == nullptr ? nullptr : static_cast<const T*>(args_.bias) + column;
    const int64_t count = least(columns - column, kPanelColumns);
    for (int64_t c = 0; c < count; c += kLanes) {
      const int lanes = static_cast<int>(least(count - c, kLanes));
      Vec sum = load(sums + c);
      if (bias != nullptr) sum = sum + load_some(bias + c, lanes);
      store_some(out + c, sum, lanes);
    }
  }

  const LinearArgs& args_;
  const float* x_;
  const int64_t first_row_;
  const int64_t num_rows_;
  const int64_t length_;
};

OCTAVO_INLINE const float* as_float(const float* x, int64_t) { return x; }

inline const float* as_float(const BFloat16* x, int64_t count) {
  float* out = scratch(Scratch::kActivations, count);
  for (int64_t i = 0; i < count; ++i) out[i] = cpu::load(x[i]);
  return out;
}

template <class T, WeightFormat kFormat>
void run(const LinearArgs& args) {
  const int64_t length = args.weight->in_features();
  const int64_t panels = (args.weight->out_features() + kPanelColumns - 1) / kPanelColumns;
  for (int64_t first = 0; first < args.num_tokens; first += kMostRows) {
    const int64_t rows = least(args.num_tokens - first, kMostRows);
    const float* x = as_float(static_cast<const T*>(args.x) + first * length, rows * length);
    const Linear<T, kFormat> linear(args, x, first, rows);
    parallel_ranges(panels, 1, rows * length * kPanelColumns,
                    [&](int64_t begin, int64_t end) { linear.panels(begin, end); });
  }
}

template <class T>
void run_format(const LinearArgs& args) {
  switch (args.weight->format()) {
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
