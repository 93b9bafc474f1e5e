// SPDX-License-Identifier: Apache-2.0
// The version and source hash of a library. The package refuses a library that was built for another version.
#include "common/export.h"

FD_EXPORT const char* fd_library_version() { return FD_VERSION; }

FD_EXPORT const char* fd_library_hash() { return FD_SOURCE_HASH; }
