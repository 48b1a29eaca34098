// The ops as one instruction set compiles them.
#pragma once

#include "octavo/linear.h"

namespace octavo::cpu::OCTAVO_ISA {

void linear(const LinearArgs& args);

}  // namespace octavo::cpu::OCTAVO_ISA
