// SPDX-License-Identifier: Apache-2.0
// The accesses to memory of a running kernel: checks, asynchronous copies, counters.

#include <algorithm>
#include <cstring>
#include <set>

#include "emulation/block.h"

namespace fd::gpu::emulation {

Accessor Machine::accessor() const {
  const unsigned thread = thread_index();
  return {block_number_, static_cast<uint16_t>(thread), barriers_, warps_[thread / kWarpSize].barriers};
}

Shadow* Machine::find_shadow(uintptr_t address) {
  if (shared_shadow_->contains(address)) return shared_shadow_.get();
  for (Shadow& array : arrays_)
    if (array.contains(address)) return &array;
  return nullptr;
}

bool Machine::is_private(uintptr_t address) const {
  return address - reinterpret_cast<uintptr_t>(current_->fiber.stack) < kStackBytes;
}

void Machine::access(uintptr_t address, size_t bytes, bool is_write, bool is_readonly, const void* place,
                     const Location* at) {
  if (!has_checks || is_private(address)) return;
  const Shadow* shadow = check(address, bytes, is_write, is_readonly, place, at);
  if (shadow == nullptr) return;  // a constant
  const bool is_shared = shadow == shared_shadow_.get();
  if (!is_shared)
    (is_write ? counters.global_written_bytes : counters.global_read_bytes) += static_cast<int64_t>(bytes);
  if (counts_accesses)
    groups_.add(thread_index(), at != nullptr ? at->file + at->line : place, is_write, is_shared, address, bytes);
}

Shadow* Machine::check(uintptr_t address, size_t bytes, bool is_write, bool is_readonly, const void* place,
                       const Location* at) {
  const auto here = [&] {
    static thread_local std::string text;
    if (at != nullptr) return *at;
    text = source_of(place);
    const size_t colon = text.rfind(':');
    Location found{text.c_str(), 0};
    if (colon != std::string::npos) {
      found.line = std::atoi(text.c_str() + colon + 1);
      text.resize(colon);
      found.file = text.c_str();
    }
    return found;
  };
  Shadow* shadow = find_shadow(address);
  if (shadow == nullptr) {
    if (!is_write && is_constant(address)) return nullptr;
    fail(std::string(is_write ? "writes" : "reads") + " outside of its arrays", here());
  }
  if (address % bytes != 0)
    fail("an address is not a multiple of the " + std::to_string(bytes) + " bytes accessed", here());
  if (address + bytes > shadow->end())
    fail(std::string(is_write ? "writes" : "reads") + " beyond the end of an array", here());
  const Accessor who = accessor();
  const std::string wrong =
      is_write ? shadow->write(address, bytes, who, order_) : shadow->read(address, bytes, who, order_, is_readonly);
  if (!wrong.empty()) fail(wrong, here());
  return shadow;
}

void Machine::copy_async(const Copy& copy, Location at) {
  if (has_checks) {
    const uintptr_t to = reinterpret_cast<uintptr_t>(copy.shared);
    if (to % 16 != 0) fail("an address is not a multiple of the 16 bytes copied", at);
    if (!shared_shadow_->contains(to) || to + 16 > shared_shadow_->end())
      fail("copies to outside of shared memory", at);
    if (copy.is_valid) access(reinterpret_cast<uintptr_t>(copy.global), 16, false, false, nullptr, &at);
    const std::string wrong = shared_shadow_->begin_copy(to, 16, accessor(), order_);
    if (!wrong.empty()) fail(wrong, at);
  }
  std::memset(copy.shared, kPoison, 16);
  current_->groups.back().push_back(copy);
}

void Machine::commit_copies() { current_->groups.emplace_back(); }

void Machine::wait_copies(int num_pending) {
  auto& groups = current_->groups;  // the last one is open, and not waited for
  while (static_cast<int>(groups.size()) - 1 > num_pending) {
    for (const Copy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

void Machine::land(const Copy& copy) {
  if (copy.is_valid)
    std::memcpy(copy.shared, copy.global, 16);
  else
    std::memset(copy.shared, 0, 16);
  if (has_checks) shared_shadow_->end_copy(reinterpret_cast<uintptr_t>(copy.shared), 16, accessor());
}

void Machine::check_atomic(const void* counter, size_t bytes, Location at) {
  if (!has_checks) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(counter);
  Shadow* shadow = find_shadow(address);
  if (shadow == nullptr || address + bytes > shadow->end())
    fail("changes atomically what is outside of its arrays", at);
  if (address % bytes != 0)
    fail("an address is not a multiple of the " + std::to_string(bytes) + " bytes accessed", at);
  const bool is_shared = shadow == shared_shadow_.get();
  const std::string wrong = shadow->change_atomically(address, bytes, accessor(), order_, is_shared);
  if (!wrong.empty()) fail(wrong, at);
}

bool Machine::last_block(int32_t* counter, int32_t count, Location at) {
  sync_block(at);
  Thread& self = *current_;
  if (thread_index() == 0) {
    const int32_t before = *counter;
    if (has_checks && (before < 0 || before >= count)) fail("the counter of blocks does not begin with 0", at);
    const bool is_last = before == count - 1;
    *counter = is_last ? 0 : before + 1;
    if (has_checks) order_.arrive(block_number_, counter, is_last);
    for (Thread& thread : threads_) thread.out[0] = is_last;
  }
  sync_block(at);
  return self.out[0] != 0;
}

void AccessGroups::add(unsigned thread, const void* place, bool is_write, bool is_shared, uintptr_t address,
                       size_t bytes) {
  const uint32_t kind = is_shared * 2 + is_write;
  const uint32_t turn = turns_[{place, thread * 4 + kind, 0}]++;
  groups_[{place, thread / kWarpSize * 4 + kind, turn}].push_back({thread % kWarpSize, address, bytes});
}

void AccessGroups::finish(Counters& counters) {
  for (const auto& [key, parts] : groups_) {
    if (key.who & 2)
      count_wavefronts(parts, counters);
    else
      (key.who & 1 ? counters.written_sectors : counters.read_sectors) += count_sectors(parts);
  }
  groups_.clear();
  turns_.clear();
}

int64_t AccessGroups::count_sectors(const std::vector<Part>& parts) {
  std::vector<uintptr_t> sectors;
  for (const Part& part : parts)
    for (uintptr_t sector = part.address / 32; sector <= (part.address + part.bytes - 1) / 32; ++sector)
      sectors.push_back(sector);
  std::sort(sectors.begin(), sectors.end());
  return std::unique(sectors.begin(), sectors.end()) - sectors.begin();
}

// A warp's access of 4 bytes a lane or less is one request, one of 8 bytes is two, one of 16 bytes four. A request is
// served in as many wavefronts as the bank has words that most are asked of.
void AccessGroups::count_wavefronts(const std::vector<Part>& parts, Counters& counters) {
  const unsigned lanes = parts[0].bytes >= 16 ? 8 : parts[0].bytes == 8 ? 16 : kWarpSize;
  for (unsigned first = 0; first < kWarpSize; first += lanes) {
    std::set<uintptr_t> banks[32];
    for (const Part& part : parts)
      if (part.lane / lanes == first / lanes)
        for (uintptr_t word = part.address / 4; word <= (part.address + part.bytes - 1) / 4; ++word)
          banks[word % 32].insert(word);
    size_t most = 0;
    for (const auto& words : banks) most = std::max(most, words.size());
    counters.shared_wavefronts += static_cast<int64_t>(most);
    counters.least_shared_wavefronts += most > 0;
  }
}

Bytes16 load16(const void* address, bool is_readonly, Location at) {
  machine().access(reinterpret_cast<uintptr_t>(address), 16, false, is_readonly, nullptr, &at);
  Bytes16 value;
  std::memcpy(&value, address, 16);
  return value;
}

void store16(void* address, Bytes16 value, Location at) {
  machine().access(reinterpret_cast<uintptr_t>(address), 16, true, false, nullptr, &at);
  std::memcpy(address, &value, 16);
}

}  // namespace fd::gpu::emulation
