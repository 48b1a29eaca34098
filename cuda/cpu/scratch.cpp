#include "cpu/scratch.h"

#include <array>
#include <memory>
#include <new>

namespace octavo::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Deleter {
  void operator()(float* p) const { ::operator delete(p, kAlignment); }
};

struct Buffer {
  std::unique_ptr<float, Deleter> data;
  size_t count = 0;
};

}  // namespace

float* scratch(Scratch use, size_t count) {
  thread_local std::array<Buffer, static_cast<size_t>(Scratch::kCount)> buffers;
  Buffer& buffer = buffers[static_cast<size_t>(use)];
  if (buffer.count < count) {
    buffer.data.reset(static_cast<float*>(::operator new(count * sizeof(float), kAlignment)));
    buffer.count = count;
  }
  return buffer.data.get();
}

}  // namespace octavo::cpu
