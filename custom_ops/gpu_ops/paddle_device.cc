// SPDX-License-Identifier: Apache-2.0
// Makes a device known to Paddle: a plug-in for the CustomDevice interface of its CPU wheel, over `device_api.h`.
// Paddle loads it from CUSTOM_DEVICE_ROOT when it is imported. It allocates tensors and copies them; what it computes
// itself runs on the CPU, with copies.

#include <atomic>
#include <cstring>

#include "gpu_ops/device_api.h"
#include "paddle/phi/backends/device_ext.h"

namespace {

constexpr char kDeviceType[] = "fd_gpu";
constexpr size_t kChunkBytes = 256;

C_Status status(int code) { return code == 0 ? C_SUCCESS : C_FAILED; }

thread_local int present_device = 0;
std::atomic<int64_t> num_allocations{0}, num_copies{0}, num_waits{0};

C_Status counted(std::atomic<int64_t>& counter, int code) {
  counter.fetch_add(1, std::memory_order_relaxed);
  return status(code);
}

C_Status succeed() { return C_SUCCESS; }
C_Status use_device(const C_Device device) {
  present_device = device->id;
  return status(fd_device_set(device->id));
}
C_Status get_device(const C_Device device) {
  device->id = present_device;
  return C_SUCCESS;
}
C_Status close_device(const C_Device) { return C_SUCCESS; }

C_Status create_stream(const C_Device, C_Stream* stream) {
  return status(fd_device_stream_create(reinterpret_cast<void**>(stream)));
}
C_Status destroy_stream(const C_Device, C_Stream stream) { return status(fd_device_stream_destroy(stream)); }
C_Status query_stream(const C_Device, C_Stream stream) { return counted(num_waits, fd_device_stream_sync(stream)); }
C_Status synchronize_stream(const C_Device, C_Stream stream) {
  return counted(num_waits, fd_device_stream_sync(stream));
}
C_Status synchronize_device(const C_Device) { return counted(num_waits, fd_device_sync()); }
C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* user_data) {
  C_Status result = counted(num_waits, fd_device_stream_sync(stream));
  callback(device, stream, user_data, &result);
  return result;
}

C_Status create_event(const C_Device, C_Event* event) {
  return status(fd_device_event_create(reinterpret_cast<void**>(event)));
}
C_Status destroy_event(const C_Device, C_Event event) { return status(fd_device_event_destroy(event)); }
C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  return status(fd_device_event_record(event, stream));
}
C_Status query_event(const C_Device, C_Event event) { return counted(num_waits, fd_device_event_sync(event)); }
C_Status synchronize_event(const C_Device, C_Event event) { return counted(num_waits, fd_device_event_sync(event)); }
C_Status wait_event(const C_Device, C_Stream stream, C_Event event) {
  return status(fd_device_event_wait(event, stream));
}

C_Status allocate(const C_Device, void** address, size_t bytes) {
  return counted(num_allocations, fd_device_alloc(bytes, address));
}
C_Status release(const C_Device, void* address, size_t) { return status(fd_device_free(address)); }
C_Status allocate_host(const C_Device, void** address, size_t bytes) {
  return counted(num_allocations, fd_device_alloc_pinned(bytes, address));
}
C_Status release_host(const C_Device, void* address, size_t) { return status(fd_device_free_pinned(address)); }
C_Status set_memory(const C_Device, void* address, unsigned char value, size_t bytes) {
  return counted(num_copies, fd_device_set_async(address, value, bytes, nullptr));
}
C_Status copy(const C_Device, void* to, const void* from, size_t bytes) {
  return counted(num_copies, fd_device_copy_async(to, from, bytes, nullptr));
}
C_Status copy_async(const C_Device, C_Stream stream, void* to, const void* from, size_t bytes) {
  return counted(num_copies, fd_device_copy_async(to, from, bytes, stream));
}

C_Status count_devices(size_t* count) {
  int number = 0;
  const int code = fd_device_count(&number);
  *count = static_cast<size_t>(number);
  return status(code);
}
C_Status list_devices(size_t* devices) {
  size_t count = 0;
  const C_Status result = count_devices(&count);
  for (size_t i = 0; i < count; ++i) devices[i] = i;
  return result;
}
C_Status memory_stats(const C_Device device, size_t* total_bytes, size_t* free_bytes) {
  int64_t free_now = 0, total = 0;
  const int code = fd_device_memory(device->id, &free_now, &total);
  *total_bytes = static_cast<size_t>(total);
  *free_bytes = static_cast<size_t>(free_now);
  return status(code);
}
C_Status min_chunk(const C_Device, size_t* bytes) {
  *bytes = kChunkBytes;
  return C_SUCCESS;
}

}  // namespace

int fd_device_counters(FdDeviceCounters* counters) {
  *counters = {num_allocations.load(), num_copies.load(), num_waits.load()};
  return 0;
}

extern "C" FD_PUBLIC void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(kDeviceType);
  params->sub_device_type = const_cast<char*>("0");
  C_DeviceInterface& device = *params->interface;
  std::memset(&device, 0, sizeof(device));
  device.size = sizeof(device);
  device.initialize = succeed;
  device.finalize = succeed;
  device.init_device = use_device;
  device.set_device = use_device;
  device.get_device = get_device;
  device.deinit_device = close_device;
  device.create_stream = create_stream;
  device.destroy_stream = destroy_stream;
  device.query_stream = query_stream;
  device.stream_add_callback = add_callback;
  device.create_event = create_event;
  device.record_event = record_event;
  device.destroy_event = destroy_event;
  device.query_event = query_event;
  device.synchronize_device = synchronize_device;
  device.synchronize_stream = synchronize_stream;
  device.synchronize_event = synchronize_event;
  device.stream_wait_event = wait_event;
  device.device_memory_allocate = allocate;
  device.device_memory_deallocate = release;
  device.device_memory_set = set_memory;
  device.host_memory_allocate = allocate_host;
  device.host_memory_deallocate = release_host;
  device.memory_copy_h2d = copy;
  device.memory_copy_d2h = copy;
  device.memory_copy_d2d = copy;
  device.async_memory_copy_h2d = copy_async;
  device.async_memory_copy_d2h = copy_async;
  device.async_memory_copy_d2d = copy_async;
  device.get_device_count = count_devices;
  device.get_device_list = list_devices;
  device.device_memory_stats = memory_stats;
  device.device_min_chunk_size = min_chunk;
}
