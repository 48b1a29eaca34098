// Chooses, once, the widest instruction set that this CPU has, and sends each op to the kernels compiled for it.
#include <atomic>
#include <string>

#include "octavo/error.h"
#include "octavo/instruction_set.h"
#include "octavo/linear.h"

#define OCTAVO_DECLARE_KERNELS(isa) \
  namespace octavo::cpu::isa {      \
  void linear(const LinearArgs&);   \
  }

OCTAVO_DECLARE_KERNELS(generic)
#if defined(__x86_64__)
OCTAVO_DECLARE_KERNELS(avx2)
OCTAVO_DECLARE_KERNELS(avx512)
#endif

namespace octavo::cpu {
namespace {

struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&);
};

#define OCTAVO_KERNELS(isa) \
  Kernels { #isa, isa::linear }

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
    if (supported(kernels.name)) return &kernels;
  }
  return nullptr;  // not reached: generic is always supported
}

std::atomic<const Kernels*> chosen = widest();

const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

}  // namespace

void set_instruction_set(const std::string& name) {
  for (const Kernels& candidate : kAll) {
    if (candidate.name == name && supported(name)) {
      chosen = &candidate;
      return;
    }
  }
  throw OpError("instruction set " + name + " is not one that this build and this CPU have");
}

std::string instruction_set() { return kernels().name; }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels& candidate : kAll) {
    if (supported(candidate.name)) names.emplace_back(candidate.name);
  }
  return names;
}

void linear(const LinearArgs& args) { kernels().linear(args); }

}  // namespace octavo::cpu
