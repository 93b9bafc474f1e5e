// SPDX-License-Identifier: Apache-2.0
// Memory, streams, events and graphs of a device, as C functions. The CUDA library implements them with the runtime
// API, the emulated one on the host (emulation/runtime.cc). Every function that returns an int returns a code of
// errors.h; after a failure `fd_last_error` says why.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"

// What is fixed for a device.
struct FdDeviceProperties {
  char name[256];
  int32_t architecture;  // 90 for compute capability 9.0
  int32_t num_multiprocessors;
  int32_t driver_version;  // as CUDA counts: 12080 for 12.8
  int64_t total_bytes;
  int64_t shared_bytes;  // per block, if it asks for them
};

// What Paddle has asked of the device since the library was loaded.
struct FdDeviceCounters {
  int64_t allocations;  // of memory of the device, and of pinned memory
  int64_t copies;       // and fills
  int64_t waits;        // for a stream, an event or the device
};

FD_EXPORT const char* fd_last_error();

FD_EXPORT int fd_device_count(int* count);
FD_EXPORT int fd_device_properties(int device, FdDeviceProperties* properties);
FD_EXPORT int fd_device_memory(int device, int64_t* free_bytes, int64_t* total_bytes);
// Makes a device the present one of the calling thread; the functions below are about it.
FD_EXPORT int fd_device_set(int device);
FD_EXPORT int fd_device_sync();

FD_EXPORT int fd_device_alloc(size_t bytes, void** address);
FD_EXPORT int fd_device_free(void* address);
// Host memory that copies read and write while the host goes on.
FD_EXPORT int fd_device_alloc_pinned(size_t bytes, void** address);
FD_EXPORT int fd_device_free_pinned(void* address);

// In the order of a stream; null is the stream of blocking copies, which does not wait for other streams.
FD_EXPORT int fd_device_copy_async(void* to, const void* from, size_t bytes, void* stream);
FD_EXPORT int fd_device_set_async(void* to, int value, size_t bytes, void* stream);

FD_EXPORT int fd_device_stream_create(void** stream);
FD_EXPORT int fd_device_stream_destroy(void* stream);
FD_EXPORT int fd_device_stream_sync(void* stream);

FD_EXPORT int fd_device_event_create(void** event);
FD_EXPORT int fd_device_event_destroy(void* event);
FD_EXPORT int fd_device_event_record(void* event, void* stream);
FD_EXPORT int fd_device_event_wait(void* event, void* stream);
FD_EXPORT int fd_device_event_sync(void* event);

// Records what the calling thread puts into a stream instead of running it.
FD_EXPORT int fd_device_graph_begin(void* stream);
FD_EXPORT int fd_device_graph_end(void* stream, void** graph);
FD_EXPORT int fd_device_graph_launch(void* graph, void* stream);
FD_EXPORT int fd_device_graph_free(void* graph);

// Of the plug-in (paddle_device.cc) only: Paddle's operators have no kernel for the device and run on the CPU, so each
// of them copies. Operators and copies of this library are not counted.
FD_EXPORT int fd_device_counters(FdDeviceCounters* counters);
