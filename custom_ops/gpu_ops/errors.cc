// SPDX-License-Identifier: Apache-2.0
#include "gpu_ops/errors.h"

#include <cstdarg>
#include <cstdio>

#include "gpu_ops/device_api.h"

namespace fd::gpu {

namespace {
thread_local char last_error[1024];
}  // namespace

int fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return code;
}

int refuse(const char* op, const char* argument, const char* expected, int64_t got) {
  return fail(kInvalidArgument, "%s: %s: expected %s, got %lld", op, argument, expected, static_cast<long long>(got));
}

}  // namespace fd::gpu

const char* fd_last_error() { return fd::gpu::last_error; }
