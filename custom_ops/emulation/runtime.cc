// SPDX-License-Identifier: Apache-2.0
// A device on the host. Its memory cannot be touched by the host while nothing runs on it, new allocations are
// poisoned, and a stream does nothing before somebody waits for it: forgotten uploads, missing waits and buffers that
// the host changes too early show.

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulation/block.h"
#include "gpu_ops/device_api.h"
#include "gpu_ops/errors.h"

namespace fd::gpu::emulation {
namespace {

constexpr size_t kDeviceBytes = size_t{4} << 30;
constexpr size_t kAlignment = 256;

int fail(const std::string& message) { return gpu::fail(kDeviceFailed, "%s", message.c_str()); }

// What a stream does at its turn; returns a code, after a failure with the reason in `fd_last_error`.
using Work = std::function<int()>;

struct Stream;

struct Event {
  Stream* stream = nullptr;
  int64_t position = 0;  // number of the stream's works before it
};

struct Stream {
  std::deque<Work> works;
  int64_t num_done = 0, num_put = 0;
  std::vector<std::function<Work()>>* graph = nullptr;  // that is recorded
};

struct Graph {
  std::vector<std::function<Work()>> works;  // each makes what is put into a stream at a launch
};

class Device {
 public:
  Device() {
    void* memory = mmap(nullptr, kDeviceBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    begin_ = memory == MAP_FAILED ? nullptr : static_cast<unsigned char*>(memory);
    if (begin_ != nullptr) free_[0] = kDeviceBytes;
  }

  // While one lives, the host can touch the device's memory.
  class Opened {
   public:
    explicit Opened(Device& device) : device_(device) {
      if (device_.num_opened_++ == 0) device_.protect(PROT_READ | PROT_WRITE);
    }
    ~Opened() {
      if (--device_.num_opened_ == 0) device_.protect(PROT_NONE);
    }

   private:
    Device& device_;
  };

  bool contains(const void* address) const {
    return static_cast<size_t>(static_cast<const unsigned char*>(address) - begin_) < kDeviceBytes;
  }
  size_t free_bytes() const { return kDeviceBytes - used_; }

  int allocate(size_t bytes, void** address) {
    const size_t size = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    for (auto found = free_.begin(); found != free_.end(); ++found) {
      if (found->second < size) continue;
      const auto [offset, length] = *found;
      free_.erase(found);
      if (length > size) free_[offset + size] = length - size;
      blocks_[offset] = size;
      used_ += size;
      high_ = std::max(high_, offset + size);
      *address = begin_ + offset;
      const Opened opened(*this);
      std::memset(*address, kPoison, size);
      return 0;
    }
    return fail("out of memory: " + std::to_string(bytes) + " bytes are not free");
  }

  int release(void* address) {
    const auto found = blocks_.find(static_cast<size_t>(static_cast<unsigned char*>(address) - begin_));
    if (found == blocks_.end()) return fail("fd_device_free: not an address that was allocated");
    auto [offset, size] = *found;
    blocks_.erase(found);
    used_ -= size;
    const auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + size) {
      size += next->second;
      free_.erase(next);
    }
    const auto after = free_.lower_bound(offset);
    if (after != free_.begin() && std::prev(after)->first + std::prev(after)->second == offset)
      std::prev(after)->second += size;
    else
      free_[offset] = size;
    return 0;
  }

 private:
  void protect(int protection) {
    if (high_ > 0) mprotect(begin_, (high_ + 4095) / 4096 * 4096, protection);
  }

  unsigned char* begin_ = nullptr;
  std::map<size_t, size_t> free_, blocks_;  // offset -> bytes
  size_t used_ = 0, high_ = 0;
  int num_opened_ = 0;
};

struct Runtime {
  std::recursive_mutex mutex;
  Device device;
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<unsigned char*, size_t> pinned;
  bool does_nothing = false;
};

Runtime& runtime() {
  static Runtime* instance = new Runtime;  // never destroyed: Paddle frees memory while the process ends
  return *instance;
}

// Runs the works of a stream up to a position; a failure ends all of them.
int drain(Stream& stream, int64_t position) {
  if (stream.num_done >= position) return 0;
  const Device::Opened opened(runtime().device);
  while (stream.num_done < position) {
    Work work = std::move(stream.works.front());
    stream.works.pop_front();
    ++stream.num_done;
    if (work() != 0) {
      stream.num_done += static_cast<int64_t>(stream.works.size());
      stream.works.clear();
      return kDeviceFailed;
    }
  }
  return 0;
}

int put(void* handle, const std::function<Work()>& make) {
  if (runtime().does_nothing) return 0;
  if (handle == nullptr) {
    const Device::Opened opened(runtime().device);
    return make()();
  }
  Stream& stream = *static_cast<Stream*>(handle);
  if (stream.graph != nullptr) {
    stream.graph->push_back(make);
  } else {
    stream.works.push_back(make());
    ++stream.num_put;
  }
  return 0;
}

uint64_t digest(const void* address, size_t bytes) {
  uint64_t sum = 1469598103934665603u;  // FNV-1a
  for (size_t i = 0; i < bytes; ++i) sum = (sum ^ static_cast<const unsigned char*>(address)[i]) * 1099511628211u;
  return sum;
}

bool is_pinned(const void* address) {
  auto& pinned = runtime().pinned;
  const auto* byte = static_cast<const unsigned char*>(address);
  const auto after = pinned.upper_bound(const_cast<unsigned char*>(byte));
  return after != pinned.begin() && byte < std::prev(after)->first + std::prev(after)->second;
}

// Makes the copy. A source in pinned memory must stay as it is now until the copy runs; one in other host memory is
// read at once, as the CUDA runtime does.
Work make_copy(void* to, const void* from, size_t bytes) {
  if (!runtime().device.contains(from) && !is_pinned(from)) {
    const auto* begin = static_cast<const unsigned char*>(from);
    const auto staged = std::make_shared<std::vector<unsigned char>>(begin, begin + bytes);
    return [=] {
      std::memcpy(to, staged->data(), bytes);
      return 0;
    };
  }
  const bool is_upload = is_pinned(from);
  const uint64_t before = is_upload ? digest(from, bytes) : 0;
  return [=]() -> int {
    if (is_upload && digest(from, bytes) != before)
      return fail("a copy from the host: its source was changed before the copy ran");
    std::memmove(to, from, bytes);
    return 0;
  };
}

}  // namespace

int submit(const Launch& launch, void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  const auto shared = std::make_shared<Launch>(launch);
  return put(stream, [shared]() -> Work { return [shared] { return run(*shared) == 0 ? 0 : fail(last_fault()); }; });
}

}  // namespace fd::gpu::emulation

using namespace fd::gpu::emulation;
using fd::gpu::kDeviceFailed;
using Lock = std::lock_guard<std::recursive_mutex>;

// From now on launches, copies and fills return at once and do nothing, so that only the host takes time.
FD_EXPORT void fd_emulation_do_nothing(int enabled) {
  const Lock lock(runtime().mutex);
  runtime().does_nothing = enabled != 0;
}

int fd_device_count(int* count) {
  *count = 1;
  return 0;
}

int fd_device_properties(int, FdDeviceProperties* properties) {
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "emulated GPU");
  properties->architecture = 80;
  properties->num_multiprocessors = 4;
  properties->driver_version = 13000;
  properties->total_bytes = kDeviceBytes;
  properties->shared_bytes = static_cast<int64_t>(Card{}.max_shared_bytes);
  return 0;
}

int fd_device_memory(int, int64_t* free_bytes, int64_t* total_bytes) {
  const Lock lock(runtime().mutex);
  *free_bytes = static_cast<int64_t>(runtime().device.free_bytes());
  *total_bytes = kDeviceBytes;
  return 0;
}

int fd_device_set(int device) { return device == 0 ? 0 : fail("fd_device_set: expected device 0"); }

int fd_device_sync() {
  const Lock lock(runtime().mutex);
  for (const auto& stream : runtime().streams)
    if (drain(*stream, stream->num_put) != 0) return kDeviceFailed;
  return 0;
}

int fd_device_alloc(size_t bytes, void** address) {
  const Lock lock(runtime().mutex);
  return runtime().device.allocate(bytes, address);
}

int fd_device_free(void* address) {
  if (fd_device_sync() != 0) return kDeviceFailed;
  const Lock lock(runtime().mutex);
  return runtime().device.release(address);
}

int fd_device_alloc_pinned(size_t bytes, void** address) {
  const Lock lock(runtime().mutex);
  if (posix_memalign(address, kAlignment, std::max<size_t>(bytes, 1)) != 0) return fail("out of host memory");
  std::memset(*address, kPoison, bytes);
  runtime().pinned[static_cast<unsigned char*>(*address)] = bytes;
  return 0;
}

int fd_device_free_pinned(void* address) {
  const Lock lock(runtime().mutex);
  if (runtime().pinned.erase(static_cast<unsigned char*>(address)) == 0)
    return fail("fd_device_free_pinned: not an address that was allocated");
  free(address);
  return 0;
}

int fd_device_copy_async(void* to, const void* from, size_t bytes, void* stream) {
  const Lock lock(runtime().mutex);
  const int code = put(stream, [=]() -> Work { return make_copy(to, from, bytes); });
  const bool is_late = runtime().device.contains(to) || is_pinned(to);
  return code != 0 || is_late ? code : fd_device_stream_sync(stream);  // host memory is written before the return
}

int fd_device_set_async(void* to, int value, size_t bytes, void* stream) {
  const Lock lock(runtime().mutex);
  return put(stream, [=]() -> Work {
    return [=] {
      std::memset(to, value, bytes);
      return 0;
    };
  });
}

int fd_device_stream_create(void** stream) {
  const Lock lock(runtime().mutex);
  runtime().streams.push_back(std::make_unique<Stream>());
  *stream = runtime().streams.back().get();
  return 0;
}

int fd_device_stream_destroy(void* stream) {
  if (fd_device_stream_sync(stream) != 0) return kDeviceFailed;
  const Lock lock(runtime().mutex);
  auto& streams = runtime().streams;
  streams.erase(std::find_if(streams.begin(), streams.end(), [=](const auto& one) { return one.get() == stream; }));
  return 0;
}

int fd_device_stream_sync(void* stream) {
  const Lock lock(runtime().mutex);
  if (stream == nullptr) return 0;
  Stream& drained = *static_cast<Stream*>(stream);
  return drain(drained, drained.num_put);
}

int fd_device_event_create(void** event) {
  *event = new Event;
  return 0;
}

int fd_device_event_destroy(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}

int fd_device_event_record(void* event, void* stream) {
  const Lock lock(runtime().mutex);
  Stream* recorded = static_cast<Stream*>(stream);
  *static_cast<Event*>(event) = {recorded, recorded == nullptr ? 0 : recorded->num_put};
  return 0;
}

int fd_device_event_wait(void* event, void* stream) {
  const Lock lock(runtime().mutex);
  const Event waited = *static_cast<Event*>(event);
  if (waited.stream == nullptr || waited.stream == stream) return 0;
  return put(stream, [=]() -> Work { return [=] { return drain(*waited.stream, waited.position); }; });
}

int fd_device_event_sync(void* event) {
  const Lock lock(runtime().mutex);
  const Event waited = *static_cast<Event*>(event);
  return waited.stream == nullptr ? 0 : drain(*waited.stream, waited.position);
}

int fd_device_graph_begin(void* stream) {
  const Lock lock(runtime().mutex);
  Stream& captured = *static_cast<Stream*>(stream);
  if (captured.graph != nullptr) return fail("fd_device_graph_begin: the stream is being captured already");
  captured.graph = new std::vector<std::function<Work()>>;
  return 0;
}

int fd_device_graph_end(void* stream, void** graph) {
  const Lock lock(runtime().mutex);
  Stream& captured = *static_cast<Stream*>(stream);
  if (captured.graph == nullptr) return fail("fd_device_graph_end: the stream is not being captured");
  *graph = new Graph{std::move(*captured.graph)};
  delete captured.graph;
  captured.graph = nullptr;
  return 0;
}

int fd_device_graph_launch(void* graph, void* stream) {
  const Lock lock(runtime().mutex);
  for (const auto& make : static_cast<Graph*>(graph)->works)
    if (put(stream, make) != 0) return kDeviceFailed;
  return 0;
}

int fd_device_graph_free(void* graph) {
  if (fd_device_sync() != 0) return kDeviceFailed;
  delete static_cast<Graph*>(graph);
  return 0;
}
