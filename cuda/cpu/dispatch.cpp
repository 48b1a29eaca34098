// Chooses, once, the widest instruction set that this CPU has, and sends each op to the kernels compiled for it.
#include "cpu/dispatch.h"

#include <atomic>
#include <string>

#include "cpu/denormals.h"
#include "octavo/error.h"
#include "octavo/instruction_set.h"

OCTAVO_DECLARE_KERNELS(generic)
#if defined(__x86_64__)
OCTAVO_DECLARE_KERNELS(avx2)
OCTAVO_DECLARE_KERNELS(avx512)
#endif

namespace octavo::cpu {
namespace {

#define OCTAVO_KERNELS(isa) \
  Kernels { #isa, isa::linear, isa::paged_attention, isa::rms_norm, isa::silu_mul, isa::write_kv }

bool supported(const std::string& name) {
#if defined(__x86_64__)
  if (name == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && supported("avx2");
  }
  if (name == "avx2") {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return name == "generic";
}

// Widest first.
const Kernels kAll[] = {
#if defined(__x86_64__)
    OCTAVO_KERNELS(avx512),
    OCTAVO_KERNELS(avx2),
#endif
    OCTAVO_KERNELS(generic),
};

const Kernels* widest() {
  for (const Kernels& kernels : kAll) {
    if (supported(kernels.instruction_set)) return &kernels;
  }
  return nullptr;  // not reached: generic is always supported
}

std::atomic<const Kernels*> chosen = widest();

}  // namespace

const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

void set_instruction_set(const std::string& name) {
  for (const Kernels& candidate : kAll) {
    if (candidate.instruction_set == name && supported(name)) {
      chosen = &candidate;
      return;
    }
  }
  throw OpError("instruction set " + name + " is not one that this build and this CPU have");
}

std::string instruction_set() { return kernels().instruction_set; }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels& candidate : kAll) {
    if (supported(candidate.instruction_set)) names.emplace_back(candidate.instruction_set);
  }
  return names;
}

void linear(const LinearArgs& args) {
  const DenormalsAsZero flush;
  kernels().linear(args);
}

void rms_norm(const RmsNormArgs& args) {
  const DenormalsAsZero flush;
  kernels().rms_norm(args);
}

void silu_mul(const SiluMulArgs& args) {
  const DenormalsAsZero flush;
  kernels().silu_mul(args);
}

void refuse_float16() { throw OpError("the CPU ops take float32 and bfloat16, not float16"); }

}  // namespace octavo::cpu
