// SPDX-License-Identifier: Apache-2.0
// The instruction-set path of this process. setup.py compiles a source that mentions FD_ISA once per path; such a
// source defines everything inside the namespace fd::FD_ISA. It must not use templates of the standard library that
// have external linkage: the linker keeps one copy of them, possibly one compiled for instructions that the processor
// lacks.
#pragma once

namespace fd {

enum class Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// Returns the path selected at the first call: the fastest one that the processor supports and this library was built
// with, or the one that the environment variable FD_CPU_ISA names. Throws std::invalid_argument if the name is unknown
// or if the processor or the library lacks that path.
Isa current_isa();

const char* isa_name(Isa isa);

}  // namespace fd
