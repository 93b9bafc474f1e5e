// SPDX-License-Identifier: Apache-2.0
// Selects the tables of kernels for the path of this process, and reports its configuration.
#include <exception>
#include <string>

#include "common/export.h"
#include "common/paths.h"
#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/sampling_kernels.h"

namespace fd {

#define FD_TABLE(path)                                                                                     \
  Kernels {                                                                                                \
    path::pack_linear, path::linear, path::pack_quantized, path::pack_coded, path::linear_quantized,       \
        path::project_heads, path::rms_norm, path::gather, path::gather_quantized, path::append_attention, \
        path::append_latent_attention, path::route, path::experts_up, path::experts_down                   \
  }

const Kernels& kernels() {
  static const Kernels table = [] { FD_RETURN_FOR_PATH(FD_TABLE) }();
  return table;
}

#define FD_SAMPLING_TABLE(path) path::kSamplingKernels

const SamplingKernels& sampling_kernels() { FD_RETURN_FOR_PATH(FD_SAMPLING_TABLE) }

}  // namespace fd

// Returns null, or an error message if FD_CPU_ISA or FD_NUM_THREADS is invalid. It must be called after loading and
// before any operator.
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
