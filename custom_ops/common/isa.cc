// SPDX-License-Identifier: Apache-2.0
#include "common/isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fd {
namespace {

bool supported(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
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

// Intel's processors do at least as many operations in fp32 as in products of bf16 pairs (Emerald Rapids: twice as
// many), AMD's half as many.
bool is_bf16_fast() {
#if defined(__x86_64__)
  return !__builtin_cpu_is("intel");
#endif
  return false;
}

Isa fastest() {
  if (supported(Isa::kAvx512Bf16) && is_bf16_fast()) return Isa::kAvx512Bf16;
  if (supported(Isa::kAvx512)) return Isa::kAvx512;
  return supported(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
}

Isa choose() {
  const char* wanted = std::getenv("FD_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return fastest();
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (std::strcmp(wanted, isa_name(isa)) != 0) continue;
    if (supported(isa)) return isa;
    throw std::invalid_argument(std::string("FD_CPU_ISA: this processor has no '") + wanted +
                                "'; the fastest path that it has is '" + isa_name(fastest()) + "'");
  }
  throw std::invalid_argument(std::string("FD_CPU_ISA: expected avx512_bf16, avx512, avx2 or portable, got '") +
                              wanted + "'");
}

}  // namespace

Isa current_isa() {
  static const Isa isa = choose();
  return isa;
}

const char* isa_name(Isa isa) {
  static const char* const names[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return names[static_cast<int>(isa)];
}

}  // namespace fd
