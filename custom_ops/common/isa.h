// SPDX-License-Identifier: Apache-2.0
// The instruction-set path of this process. A source that mentions the macro of the same name (setup.py) is compiled
// once per path, with everything that it defines inside the namespace fd::<path>; it must not use library templates
// with external linkage, because the linker keeps one copy of those, possibly the one with the widest instructions.
#pragma once

namespace fd {

enum class Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// Returns the path selected at the first call: the fastest one that the processor supports and this library was built
// with, or the one that the environment variable FD_CPU_ISA names. Throws std::invalid_argument for a name that is
// unknown, or of a path that the processor or the library lacks.
Isa current_isa();

const char* isa_name(Isa isa);

}  // namespace fd
