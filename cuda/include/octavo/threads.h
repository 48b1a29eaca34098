// How many threads the CPU ops use, the calling one included: at least 1; at first, the CPUs this process may run on.
#pragma once

namespace octavo::cpu {

void set_num_threads(int count);
int num_threads();

}  // namespace octavo::cpu
