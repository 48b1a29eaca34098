// Numbers below 1.2e-38 count as zero in the CPU ops: a multiplication that meets one takes a hundred times as long.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace octavo::cpu {

// While it lives, this thread takes and makes zeros for denormals.
class DenormalsAsZero {
 public:
  DenormalsAsZero() : before_(read()) { write(before_ | kFlush); }
  ~DenormalsAsZero() { write(before_); }
  DenormalsAsZero(const DenormalsAsZero&) = delete;
  DenormalsAsZero& operator=(const DenormalsAsZero&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // flush to zero, denormals are zero
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t value) { _mm_setcsr(static_cast<unsigned>(value)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = uint64_t{1} << 24;
  static uint64_t read() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace octavo::cpu
