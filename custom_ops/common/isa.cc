// SPDX-License-Identifier: Apache-2.0
#include "common/isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fd {
namespace {

// Whether the processor can run a path.
bool is_supported(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return isa == Isa::kPortable;
}

// Whether this library was built with a path (FD_BUILD_PATHS of setup.py).
bool is_built(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
#if defined(FD_HAVE_AVX2)
      return true;
#endif
      return false;
    case Isa::kAvx512:
#if defined(FD_HAVE_AVX512)
      return true;
#endif
      return false;
    case Isa::kAvx512Bf16:
#if defined(FD_HAVE_AVX512_BF16)
      return true;
#endif
      return false;
  }
  return false;
}

bool is_usable(Isa isa) { return is_supported(isa) && is_built(isa); }

// Whether instructions that multiply pairs of bf16 are faster than those for fp32. AMD's processors do twice as many
// operations per second with them; Intel's (Emerald Rapids) do half as many.
bool is_bf16_fast() {
#if defined(__x86_64__)
  return !__builtin_cpu_is("intel");
#endif
  return false;
}

Isa fastest() {
  if (is_usable(Isa::kAvx512Bf16) && is_bf16_fast()) return Isa::kAvx512Bf16;
  if (is_usable(Isa::kAvx512)) return Isa::kAvx512;
  return is_usable(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
}

Isa select_isa() {
  const char* wanted = std::getenv("FD_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return fastest();
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (std::strcmp(wanted, isa_name(isa)) != 0) continue;
    if (!is_supported(isa))
      throw std::invalid_argument(std::string("FD_CPU_ISA: this processor has no '") + wanted +
                                  "'; the fastest path that it supports is '" + isa_name(fastest()) + "'");
    if (!is_built(isa))
      throw std::invalid_argument(std::string("FD_CPU_ISA: this library was built without '") + wanted +
                                  "'; rebuild it with FD_BUILD_PATHS=all");
    return isa;
  }
  throw std::invalid_argument(std::string("FD_CPU_ISA: expected avx512_bf16, avx512, avx2 or portable, got '") +
                              wanted + "'");
}

}  // namespace

Isa current_isa() {
  static const Isa isa = select_isa();
  return isa;
}

const char* isa_name(Isa isa) {
  static const char* const names[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return names[static_cast<int>(isa)];
}

}  // namespace fd
