// SPDX-License-Identifier: Apache-2.0
// The identity of a library: fastdeploy/ops/registry.py refuses one that was built for another version of the package.
#define FD_EXPORT extern "C" __attribute__((visibility("default")))

FD_EXPORT const char* fd_library_version() { return FD_VERSION; }

FD_EXPORT const char* fd_library_hash() { return FD_SOURCE_HASH; }
