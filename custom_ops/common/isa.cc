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
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  }
#endif
  return isa == Isa::kPortable;
}

Isa widest() {
  if (supported(Isa::kAvx512)) return Isa::kAvx512;
  return supported(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
}

Isa choose() {
  const char* wanted = std::getenv("FD_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return widest();
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (std::strcmp(wanted, isa_name(isa)) != 0) continue;
    if (supported(isa)) return isa;
    throw std::invalid_argument(std::string("FD_CPU_ISA: this processor supports at most '") + isa_name(widest()) +
                                "', got '" + wanted + "'");
  }
  throw std::invalid_argument(std::string("FD_CPU_ISA: expected avx512, avx2 or portable, got '") + wanted + "'");
}

}  // namespace

Isa current_isa() {
  static const Isa isa = choose();
  return isa;
}

const char* isa_name(Isa isa) {
  static const char* const names[] = {"portable", "avx2", "avx512"};
  return names[static_cast<int>(isa)];
}

}  // namespace fd
