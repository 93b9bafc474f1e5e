// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <string>

#include "common/paths.h"
#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/sampling_kernels.h"

namespace fd {

#define FD_TABLE(path)                                                                                           \
  Kernels {                                                                                                      \
    path::pack_linear, path::linear, path::pack_quantized, path::linear_quantized, path::rms_norm, path::gather, \
        path::append_attention, path::read_memory, path::multiply_registers, path::multiply_integers             \
  }

const Kernels& kernels() {
  static const Kernels table = [] { FD_RETURN_FOR_PATH(FD_TABLE) }();
  return table;
}

#define FD_SAMPLING_TABLE(path) path::kSamplingKernels

const SamplingKernels& sampling_kernels() { FD_RETURN_FOR_PATH(FD_SAMPLING_TABLE) }

}  // namespace fd

#define FD_EXPORT extern "C" __attribute__((visibility("default")))

// Returns null when the environment's settings can be honoured, otherwise the sentence that says why not. Called once
// after loading: the operators rely on it.
FD_EXPORT const char* fd_configuration_error() {
  static std::string error;
  try {
    fd::current_isa();
    fd::num_threads();
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

FD_EXPORT const char* fd_isa_name() { return fd::isa_name(fd::current_isa()); }

FD_EXPORT int fd_num_threads() { return fd::num_threads(); }

// For benchmarks; see Kernels.
FD_EXPORT float fd_read_memory(const void* data, int64_t bytes) { return fd::kernels().read_memory(data, bytes); }

FD_EXPORT double fd_multiply_registers(int64_t steps) { return fd::kernels().multiply_registers(steps); }

FD_EXPORT double fd_multiply_integers(int64_t steps) { return fd::kernels().multiply_integers(steps); }
