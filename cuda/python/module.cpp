#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "octavo/instruction_set.h"
#include "octavo/threads.h"
#include "python/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::dict build_info() {
  nb::dict info;
  info["cuda"] = OCTAVO_WITH_CUDA != 0;
  info["architectures"] = OCTAVO_ARCHITECTURES;
  info["compiler"] = __VERSION__;
  return info;
}

}  // namespace

NB_MODULE(_runtime, module) {
  nb::set_leak_warnings(false);  // a model that lives until the interpreter ends is no leak
  module.doc() = "Octavo's native runtime: the block allocator and the ops, on the CPU and on NVIDIA GPUs.";
  module.def("has_cuda", [] { return OCTAVO_WITH_CUDA != 0; }, "Whether this build has GPU kernels.");
  module.def("build_info", build_info, nb::sig("def build_info() -> dict[str, str | bool]"),
             "How this build was made: cuda, architectures, compiler.");
  module.def("set_num_threads", octavo::cpu::set_num_threads, "count"_a,
             "Threads of the CPU ops, the caller included.");
  module.def("num_threads", octavo::cpu::num_threads);
  module.def("instruction_set", octavo::cpu::instruction_set, "The instruction set that the CPU ops run on.");
  module.def("instruction_sets", octavo::cpu::instruction_sets,
             "Those that this build and this CPU have, widest first.");
  module.def("set_instruction_set", octavo::cpu::set_instruction_set, "name"_a);
  octavo::python::init_ops(module);
  octavo::python::init_step_ops(module);
  octavo::python::init_decode_linear(module);
  octavo::python::init_prefill_linear(module);
  octavo::python::init_allocator(module);
  octavo::python::init_step_arrays(module);
}
