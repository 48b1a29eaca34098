// How linear's weights lie in memory. Columns (output features) go in panels of 48, three strips of 16, the last panel
// padded with zeros; a panel is one contiguous run along k (input features), cut into cells:
//   fp32, bf16   one k: 48 values.
//   Q4_0, Q4_1   32 k, strip by strip: 16 fp16 scales, (Q4_1) 16 fp16 offsets, then four groups of 8 k, each 16 words
//   of
//                32 bits, a column's eight nibbles, the lowest k lowest.
//   Q8_0         32 k, strip by strip: 16 fp16 scales, then for each k 16 signed bytes.
// So one strip of one k is always one vector load (or a shift of one) away from 16 lanes.
#pragma once

#include "octavo/linear.h"

namespace octavo::cpu {

inline constexpr int kStripColumns = 16;
inline constexpr int kPanelStrips = 3;
inline constexpr int kPanelColumns = kStripColumns * kPanelStrips;
inline constexpr int kNibbleGroup = 8;  // k in a group of words

constexpr bool in_blocks(WeightFormat format) {
  return format != WeightFormat::kFloat32 && format != WeightFormat::kBFloat16;
}

constexpr int64_t cell_length(WeightFormat format) { return in_blocks(format) ? kBlockWeights : 1; }

// Bytes of one strip in one cell.
constexpr int64_t strip_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return 4 * kStripColumns;
    case WeightFormat::kBFloat16:
      return 2 * kStripColumns;
    case WeightFormat::kQ4_0:
      return (2 + 16) * kStripColumns;
    case WeightFormat::kQ4_1:
      return (4 + 16) * kStripColumns;
    case WeightFormat::kQ8_0:
      break;
  }
  return (2 + 32) * kStripColumns;
}

constexpr int64_t cell_bytes(WeightFormat format) { return kPanelStrips * strip_bytes(format); }

constexpr int64_t panel_bytes(WeightFormat format, int64_t in_features) {
  return in_features / cell_length(format) * cell_bytes(format);
}

}  // namespace octavo::cpu
