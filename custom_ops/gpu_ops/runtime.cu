// SPDX-License-Identifier: Apache-2.0
// `device_api.h` with the CUDA runtime.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "gpu_ops/device_api.h"
#include "gpu_ops/errors.h"

namespace {

int check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return 0;
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0)
      return fd::gpu::fail(fd::gpu::kDeviceFailed, "there is no NVIDIA driver; this library needs one for CUDA %d.%d",
                           runtime / 1000, runtime % 1000 / 10);
    return fd::gpu::fail(fd::gpu::kDeviceFailed, "driver too old: it supports CUDA %d.%d, this library needs %d.%d",
                         driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  }
  return fd::gpu::fail(fd::gpu::kDeviceFailed, "%s: %s", what, cudaGetErrorString(error));
}

cudaStream_t stream_of(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(void* handle) { return static_cast<cudaEvent_t>(handle); }

}  // namespace

int fd_device_count(int* count) { return check("cudaGetDeviceCount", cudaGetDeviceCount(count)); }

int fd_device_properties(int device, FdDeviceProperties* properties) {
  cudaDeviceProp found;
  if (check("cudaGetDeviceProperties", cudaGetDeviceProperties(&found, device)) != 0) return fd::gpu::kDeviceFailed;
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "%s", found.name);
  properties->architecture = found.major * 10 + found.minor;
  properties->num_multiprocessors = found.multiProcessorCount;
  properties->total_bytes = static_cast<int64_t>(found.totalGlobalMem);
  properties->shared_bytes = static_cast<int64_t>(found.sharedMemPerBlockOptin);
  return check("cudaDriverGetVersion", cudaDriverGetVersion(&properties->driver_version));
}

int fd_device_memory(int device, int64_t* free_bytes, int64_t* total_bytes) {
  int present = 0;
  size_t free_now = 0, total = 0;
  if (check("cudaGetDevice", cudaGetDevice(&present)) != 0 || fd_device_set(device) != 0) return fd::gpu::kDeviceFailed;
  const int code = check("cudaMemGetInfo", cudaMemGetInfo(&free_now, &total));
  *free_bytes = static_cast<int64_t>(free_now);
  *total_bytes = static_cast<int64_t>(total);
  return fd_device_set(present) != 0 ? fd::gpu::kDeviceFailed : code;
}

int fd_device_set(int device) { return check("cudaSetDevice", cudaSetDevice(device)); }
int fd_device_sync() { return check("cudaDeviceSynchronize", cudaDeviceSynchronize()); }

int fd_device_alloc(size_t bytes, void** address) { return check("cudaMalloc", cudaMalloc(address, bytes)); }
int fd_device_free(void* address) { return check("cudaFree", cudaFree(address)); }
int fd_device_alloc_pinned(size_t bytes, void** address) {
  return check("cudaHostAlloc", cudaHostAlloc(address, bytes, cudaHostAllocDefault));
}
int fd_device_free_pinned(void* address) { return check("cudaFreeHost", cudaFreeHost(address)); }

int fd_device_copy_async(void* to, const void* from, size_t bytes, void* stream) {
  if (stream == nullptr) return check("cudaMemcpy", cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  return check("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}
int fd_device_set_async(void* to, int value, size_t bytes, void* stream) {
  return check("cudaMemsetAsync", cudaMemsetAsync(to, value, bytes, stream_of(stream)));
}

int fd_device_stream_create(void** stream) {
  return check("cudaStreamCreateWithFlags",
               cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking));
}
int fd_device_stream_destroy(void* stream) { return check("cudaStreamDestroy", cudaStreamDestroy(stream_of(stream))); }
int fd_device_stream_sync(void* stream) {
  return check("cudaStreamSynchronize", cudaStreamSynchronize(stream_of(stream)));
}

int fd_device_event_create(void** event) {
  return check("cudaEventCreateWithFlags",
               cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
}
int fd_device_event_destroy(void* event) { return check("cudaEventDestroy", cudaEventDestroy(event_of(event))); }
int fd_device_event_record(void* event, void* stream) {
  return check("cudaEventRecord", cudaEventRecord(event_of(event), stream_of(stream)));
}
int fd_device_event_wait(void* event, void* stream) {
  return check("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
}
int fd_device_event_sync(void* event) { return check("cudaEventSynchronize", cudaEventSynchronize(event_of(event))); }

int fd_device_graph_begin(void* stream) {
  return check("cudaStreamBeginCapture", cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
}
int fd_device_graph_end(void* stream, void** graph) {
  cudaGraph_t captured = nullptr;
  if (check("cudaStreamEndCapture", cudaStreamEndCapture(stream_of(stream), &captured)) != 0)
    return fd::gpu::kDeviceFailed;
  const int code =
      check("cudaGraphInstantiate", cudaGraphInstantiate(reinterpret_cast<cudaGraphExec_t*>(graph), captured, 0));
  return check("cudaGraphDestroy", cudaGraphDestroy(captured)) != 0 ? fd::gpu::kDeviceFailed : code;
}
int fd_device_graph_launch(void* graph, void* stream) {
  return check("cudaGraphLaunch", cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)));
}
int fd_device_graph_free(void* graph) {
  return check("cudaGraphExecDestroy", cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}
