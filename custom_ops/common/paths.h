// SPDX-License-Identifier: Apache-2.0
// Selects among the instruction-set paths that this library was built with (FD_BUILD_PATHS of setup.py).
#pragma once

#include "common/isa.h"

#if defined(FD_HAVE_AVX2)
#define FD_CASE_AVX2(make) \
  case Isa::kAvx2:         \
    return make(avx2);
#else
#define FD_CASE_AVX2(make)
#endif

#if defined(FD_HAVE_AVX512)
#define FD_CASE_AVX512(make) \
  case Isa::kAvx512:         \
    return make(avx512);
#else
#define FD_CASE_AVX512(make)
#endif

#if defined(FD_HAVE_AVX512_BF16)
#define FD_CASE_AVX512_BF16(make) \
  case Isa::kAvx512Bf16:          \
    return make(avx512_bf16);
#else
#define FD_CASE_AVX512_BF16(make)
#endif

// Returns make(path) from the enclosing function; `path` is the namespace of the path that this process runs.
#define FD_RETURN_FOR_PATH(make) \
  switch (current_isa()) {       \
    FD_CASE_AVX2(make)           \
    FD_CASE_AVX512(make)         \
    FD_CASE_AVX512_BF16(make)    \
    default:                     \
      return make(portable);     \
  }
