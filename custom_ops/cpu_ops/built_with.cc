// SPDX-License-Identifier: Apache-2.0
// The version of Paddle that the library was compiled for and linked with.
#include "common/export.h"

FD_EXPORT const char* fd_paddle_version() { return FD_PADDLE_VERSION; }
