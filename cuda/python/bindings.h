// The parts of the module, each in its own file.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo::python {

void init_allocator(nanobind::module_& module);
void init_decode_linear(nanobind::module_& module);
void init_ops(nanobind::module_& module);
void init_prefill_linear(nanobind::module_& module);
void init_step_arrays(nanobind::module_& module);
void init_step_ops(nanobind::module_& module);

}  // namespace octavo::python
