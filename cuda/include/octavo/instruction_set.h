// Which instruction set the CPU ops run on: the widest that this CPU has, unless told otherwise (tests do).
#pragma once

#include <string>
#include <vector>

namespace octavo::cpu {

std::string instruction_set();
std::vector<std::string> instruction_sets();  // those that this build and this CPU have, widest first
void set_instruction_set(const std::string& name);

}  // namespace octavo::cpu
