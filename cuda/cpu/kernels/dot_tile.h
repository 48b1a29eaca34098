// The inner loop of linear and of attention scores: a few rows against four columns, along their common length.
#pragma once

#include "cpu/kernels/simd.h"

namespace octavo::cpu::OCTAVO_ISA {

// Rows of x taken at once: as many accumulators as there are registers, four columns wide.
#if defined(__AVX512F__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 3;
#endif
constexpr int kTileColumns = 4;

// Where a tile's columns come from: each gives, for the step that starts at k, kVecs vectors of column c.
template <class W, bool kPrefetch>
struct PlainColumns {
  static constexpr int kVecs = 1;
  const W* column[kTileColumns];
  int64_t ahead[kTileColumns];  // kPrefetch: what is so far behind the vector read is wanted next

  OCTAVO_INLINE void get(int c, int64_t k, Vec* out) const {
    if constexpr (kPrefetch) __builtin_prefetch(column[c] + k + ahead[c], 0, 2);
    out[0] = load(column[c] + k);
  }

  OCTAVO_INLINE Vec get_rest(int c, int64_t k, int rest) const {
    float values[kLanes] = {};
    for (int i = 0; i < rest; ++i) values[i] = cpu::load(column[c][k + i]);
    return load(values);
  }
};

template <int kRows>
struct TileSums {
  Vec v[kRows][kTileColumns];
};

template <int kRows>
OCTAVO_INLINE void multiply_add(const Vec* rows, Vec column, int c, TileSums<kRows>& sums) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums.v[r][c] = fma(rows[r], column, sums.v[r][c]);
}

template <int kRows>
OCTAVO_INLINE void load_rows(const float* x, int64_t x_stride, Vec* rows) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) rows[r] = load(x + r * x_stride);
}

template <int kRows, class Columns>
OCTAVO_INLINE void dot_step(const float* x, int64_t x_stride, const Columns& columns, int64_t k,
                            TileSums<kRows>& sums) {
  Vec rows[kRows];
  if constexpr (Columns::kVecs == 1) load_rows<kRows>(x + k, x_stride, rows);
#pragma GCC unroll 8
  for (int c = 0; c < kTileColumns; ++c) {
    Vec column[Columns::kVecs];
    columns.get(c, k, column);
#pragma GCC unroll 8
    for (int i = 0; i < Columns::kVecs; ++i) {
      // Several vectors of each row would not fit the registers beside the sums: read them again, from the first level.
      if constexpr (Columns::kVecs > 1) load_rows<kRows>(x + k + i * kLanes, x_stride, rows);
      multiply_add<kRows>(rows, column[i], c, sums);
    }
  }
}

// The step past the last whole vector, over copies padded with zeros.
template <int kRows, class Columns>
OCTAVO_INLINE void dot_rest(const float* x, int64_t x_stride, const Columns& columns, int64_t k, int rest,
                            TileSums<kRows>& sums) {
  float padded[kRows][kLanes] = {};
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < rest; ++i) padded[r][i] = x[r * x_stride + k + i];
  }
  Vec rows[kRows];
  load_rows<kRows>(padded[0], kLanes, rows);
#pragma GCC unroll 8
  for (int c = 0; c < kTileColumns; ++c) multiply_add<kRows>(rows, columns.get_rest(c, k, rest), c, sums);
}

// out[r][c] (+)= sum over k < length of x[r][k] * column c [k]. Each element is summed in one order, whatever kRows is
// and wherever the column comes from: lane by lane along k, then across lanes; so a row's result never depends on the
// rows beside it.
template <int kRows, class Columns>
OCTAVO_INLINE void dot_tile(const float* x, int64_t x_stride, const Columns& columns, int64_t length, bool add,
                            float* out, int64_t out_stride) {
  constexpr int kStep = Columns::kVecs * kLanes;
  TileSums<kRows> sums;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kTileColumns; ++c) sums.v[r][c] = splat(0.0f);
  }
  const int64_t whole = length / kStep * kStep;
  for (int64_t k = 0; k < whole; k += kStep) dot_step<kRows>(x, x_stride, columns, k, sums);
  if constexpr (Columns::kVecs == 1) {
    if (whole < length) dot_rest<kRows>(x, x_stride, columns, whole, static_cast<int>(length - whole), sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r + 1 < kRows; r += 2) {
    sum_lanes(sums.v[r], sums.v[r + 1], add, out + r * out_stride, out + (r + 1) * out_stride);
  }
  if constexpr (kRows % 2 == 1) sum_lanes(sums.v[kRows - 1], add, out + (kRows - 1) * out_stride);
}

}  // namespace octavo::cpu::OCTAVO_ISA
