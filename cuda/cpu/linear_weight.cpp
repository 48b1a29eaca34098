// Packs weight rows into the layout of cpu/weight_layout.h.
#include "octavo/linear.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "cpu/thread_pool.h"
#include "cpu/weight_layout.h"

namespace octavo {
namespace {

using namespace cpu;

constexpr size_t kHugePage = size_t{2} << 20;

uint8_t* allocate(size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  if (size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);  // fewer address translations on the way; only a wish
  return static_cast<uint8_t*>(data);
}

// One column of a panel: `row` is its weights, `lane` its place in the strip that starts at `out`.
void pack_plain(const uint8_t* row, int64_t length, int element, int64_t lane, uint8_t* out, int64_t cell) {
  for (int64_t k = 0; k < length; ++k) std::memcpy(out + k * cell + lane * element, row + k * element, element);
}

void pack_nibbles(const uint8_t* nibbles, int64_t lane, uint8_t* words) {
  for (int group = 0; group < kBlockWeights / kNibbleGroup; ++group) {
    uint32_t word = 0;
    for (int i = 0; i < kNibbleGroup; ++i) {
      const int k = group * kNibbleGroup + i;
      const uint32_t nibble = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
      word |= nibble << (4 * i);
    }
    std::memcpy(words + (group * kStripColumns + lane) * 4, &word, sizeof(word));
  }
}

void pack_blocks(WeightFormat format, const uint8_t* row, int64_t length, int64_t lane, uint8_t* out) {
  const int halves = format == WeightFormat::kQ4_1 ? 2 : 1;
  for (int64_t k = 0; k < length; k += kBlockWeights) {
    const uint8_t* block = row + row_bytes(format, k);
    uint8_t* strip = out + k / kBlockWeights * cell_bytes(format);
    for (int i = 0; i < halves; ++i) std::memcpy(strip + (i * kStripColumns + lane) * 2, block + 2 * i, 2);
    const uint8_t* weights = block + 2 * halves;
    uint8_t* packed = strip + 2 * halves * kStripColumns;
    if (format == WeightFormat::kQ8_0) {
      for (int i = 0; i < kBlockWeights; ++i) packed[i * kStripColumns + lane] = weights[i];
    } else {
      pack_nibbles(weights, lane, packed);
    }
  }
}

}  // namespace

LinearWeight::LinearWeight(WeightFormat format, const void* rows, int32_t out_features, int32_t in_features)
    : format_(format), out_features_(out_features), in_features_(in_features) {
  const int64_t panels = (out_features + kPanelColumns - 1) / kPanelColumns;
  const int64_t bytes = panel_bytes(format, in_features);
  size_ = static_cast<size_t>(panels * bytes);
  data_ = {allocate(size_ == 0 ? 1 : size_), Release{size_ == 0 ? 1 : size_}};
  uint8_t* data = data_.get();
  parallel_ranges(panels, 1, kPanelColumns * int64_t{in_features}, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * kPanelColumns; column < end * kPanelColumns && column < out_features; ++column) {
      const uint8_t* row = static_cast<const uint8_t*>(rows) + column * row_bytes(format, in_features);
      uint8_t* strip =
          data + column / kPanelColumns * bytes + column % kPanelColumns / kStripColumns * strip_bytes(format);
      const int64_t lane = column % kStripColumns;
      if (in_blocks(format)) {
        pack_blocks(format, row, in_features, lane, strip);
      } else {
        pack_plain(row, in_features, format == WeightFormat::kFloat32 ? 4 : 2, lane, strip, cell_bytes(format));
      }
    }
  });
}

void LinearWeight::Release::operator()(uint8_t* data) const { munmap(data, size); }

}  // namespace octavo
