// SPDX-License-Identifier: Apache-2.0
// How the C functions of the GPU library fail: they return a code, and `fd_last_error` says why.
#pragma once

#include <cstdint>

namespace fd::gpu {

enum Code : int {
  kSuccess = 0,
  kInvalidArgument = 1,  // raised as ValueError
  kDeviceFailed = 2,     // a launch, a copy or an allocation; the device may be lost
};

// Sets what `fd_last_error` of this thread returns, formatted as by printf, and returns the code.
[[gnu::format(printf, 2, 3)]] int fail(int code, const char* format, ...);

// "<op>: <argument>: expected <expected>, got <got>".
int refuse(const char* op, const char* argument, const char* expected, int64_t got);

}  // namespace fd::gpu

// For the beginning of an operator `fd_<op>`: returns if an argument is not as expected.
#define FD_REQUIRE(op, argument, condition, expected) \
  if (!(condition)) return fd::gpu::refuse(op, #argument, expected, static_cast<int64_t>(argument))
