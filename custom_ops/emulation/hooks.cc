// SPDX-License-Identifier: Apache-2.0
// What GCC calls for each access of code that it compiles with -fsanitize=thread, and for shifts, divisions and
// conversions without a defined result: an x86 processor and a GPU return different ones. The library is linked without
// that flag, so that these functions take the place of libtsan's and libubsan's.

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "emulation/block.h"

namespace fd::gpu::emulation {
namespace {

struct Segment {
  uintptr_t begin, end;
};

// The segments of this process's libraries that hold constants.
const std::vector<Segment>& constant_segments() {
  static const std::vector<Segment> segments = [] {
    std::vector<Segment> found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* into) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            const bool is_constant =
                header.p_type == PT_GNU_RELRO || (header.p_type == PT_LOAD && !(header.p_flags & PF_W));
            const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
            if (is_constant) static_cast<std::vector<Segment>*>(into)->push_back({begin, begin + header.p_memsz});
          }
          return 0;
        },
        &found);
    return found;
  }();
  return segments;
}

void check(void* address, size_t bytes, bool is_write, const void* place) {
  Machine& self = machine();
  if (self.is_running()) self.access(reinterpret_cast<uintptr_t>(address), bytes, is_write, false, place, nullptr);
}

// An access to a struct of another size than an instruction has: all of it, in words of which it consists.
void check_range(void* address, size_t bytes, bool is_write, const void* place) {
  const size_t misalignment = (reinterpret_cast<uintptr_t>(address) | bytes) % 4;
  const size_t word = misalignment == 0 ? 4 : misalignment == 2 ? 2 : 1;
  for (size_t i = 0; i < bytes; i += word) check(static_cast<char*>(address) + i, word, is_write, place);
}

// The beginning of what GCC passes with an undefined operation.
struct UndefinedOperation {
  const char* file;
  uint32_t line, column;
};

void refuse(const void* data, const char* what) {
  const auto* operation = static_cast<const UndefinedOperation*>(data);
  Machine& self = machine();
  if (self.is_running()) self.fail(what, {operation->file, static_cast<int>(operation->line)});
  std::fprintf(stderr, "%s:%u: %s\n", operation->file, operation->line, what);
  std::abort();
}

// Returns the first line that addr2line prints about a code address minus `offset`.
std::string ask_addr2line(const void* code, uintptr_t offset, const char* flags) {
  Dl_info info;
  if (code == nullptr || dladdr(code, &info) == 0) return "unknown";
  const uintptr_t address = reinterpret_cast<uintptr_t>(code) - reinterpret_cast<uintptr_t>(info.dli_fbase) - offset;
  char command[4096], line[1024] = "";
  std::snprintf(command, sizeof(command), "addr2line %s -e '%s' 0x%zx", flags, info.dli_fname, size_t{address});
  if (FILE* output = popen(command, "r")) {
    if (std::fgets(line, sizeof(line), output) == nullptr) line[0] = 0;
    pclose(output);
  }
  line[std::strcspn(line, "\n")] = 0;
  return line[0] ? line : "unknown";
}

}  // namespace

bool is_constant(uintptr_t address) {
  for (const Segment& segment : constant_segments())
    if (address >= segment.begin && address < segment.end) return true;
  return false;
}

std::string source_of(const void* code) {
  const std::string line = ask_addr2line(code, 1, "");
  return line.substr(0, line.find(' '));
}

std::string signature_of(const void* code) { return ask_addr2line(code, 0, "-fC"); }

std::string function_of(const void* code) {
  std::string name = signature_of(code);
  for (const std::string& part : {std::string("void "), std::string("(anonymous namespace)::")})
    if (const size_t at = name.find(part); at != std::string::npos) name.erase(at, part.size());
  return name.substr(0, name.find('('));
}

}  // namespace fd::gpu::emulation

#define FD_HOOKS(bytes)                                                            \
  extern "C" void __tsan_read##bytes(void* address) {                              \
    fd::gpu::emulation::check(address, bytes, false, __builtin_return_address(0)); \
  }                                                                                \
  extern "C" void __tsan_write##bytes(void* address) {                             \
    fd::gpu::emulation::check(address, bytes, true, __builtin_return_address(0));  \
  }                                                                                \
  extern "C" void __tsan_unaligned_read##bytes(void* address) {                    \
    fd::gpu::emulation::check(address, bytes, false, __builtin_return_address(0)); \
  }                                                                                \
  extern "C" void __tsan_unaligned_write##bytes(void* address) {                   \
    fd::gpu::emulation::check(address, bytes, true, __builtin_return_address(0));  \
  }

FD_HOOKS(1)
FD_HOOKS(2)
FD_HOOKS(4)
FD_HOOKS(8)
FD_HOOKS(16)

extern "C" void __tsan_read_range(void* address, size_t bytes) {
  fd::gpu::emulation::check_range(address, bytes, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, size_t bytes) {
  fd::gpu::emulation::check_range(address, bytes, true, __builtin_return_address(0));
}

extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}

extern "C" void __ubsan_handle_shift_out_of_bounds(void* data, void*, void*) {
  fd::gpu::emulation::refuse(data, "shifts by a negative number or by at least the width of the value");
}
extern "C" void __ubsan_handle_divrem_overflow(void* data, void*, void*) {
  fd::gpu::emulation::refuse(data, "divides an integer by zero");
}
extern "C" void __ubsan_handle_float_cast_overflow(void* data, void*) {
  fd::gpu::emulation::refuse(data, "converts a number to an integer type that cannot hold it");
}
