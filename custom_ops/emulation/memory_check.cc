// SPDX-License-Identifier: Apache-2.0
#include "emulation/memory_check.h"

#include <algorithm>

namespace fd::gpu::emulation {
namespace {

constexpr uint32_t kSeveralBlocks = 0xFFFFFFFFu;
constexpr uint16_t kSeveralLanes = 0xFFFEu, kSeveralWarps = 0xFFFFu;

bool is_ordered(uint16_t earlier, uint32_t barriers, uint32_t warp_barriers, const Accessor& now) {
  if (earlier == now.thread || barriers < now.barriers) return true;
  return earlier / kWarpSize == now.thread / kWarpSize && warp_barriers < now.warp_barriers;
}

// Whether a barrier has followed the atomic changes of shared memory; those of global memory are not `is_written`.
bool is_settled(const Cell& cell, const Accessor& now) { return cell.is_written && cell.write_barriers < now.barriers; }

std::string thread_text(uint16_t thread) { return "thread " + std::to_string(thread); }

}  // namespace

void BlockOrder::begin(uint32_t num_blocks) {
  counters_.assign(num_blocks, {});
  last_at_.assign(num_blocks, {});
}

void BlockOrder::arrive(uint32_t block, const void* counter, bool is_last) {
  counters_[block].push_back(counter);
  if (is_last) last_at_[block].push_back(counter);
}

bool BlockOrder::is_before(uint32_t earlier, uint32_t num_arrivals, uint32_t later) const {
  const auto& arrived = counters_[earlier];
  for (const void* counter : last_at_[later])
    if (std::find(arrived.begin() + num_arrivals, arrived.end(), counter) != arrived.end()) return true;
  return false;
}

void Shadow::allocate() {
  if (cells_.empty()) cells_.resize((bytes_ + 1) / 2);
}

void Shadow::clear() { cells_.assign(cells_.size(), Cell{}); }

std::string Shadow::read(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order,
                         bool is_readonly) {
  allocate();
  for (Cell* cell = cells(address); cell <= cells(address + bytes - 1); ++cell) {
    if (cell->is_copied) return "reads what an asynchronous copy has not brought yet";
    if (cell->is_atomic && !is_settled(*cell, who)) return "reads a counter that this launch changes";
    if (cell->is_written) {
      if (is_readonly) return "reads as read-only what this launch writes";
      const uint32_t block = cell->write_block - 1;
      if (block != who.block && !order.is_before(block, cell->write_arrivals, who.block))
        return "reads what block " + std::to_string(block) + " writes in this launch";
      if (block == who.block && !is_ordered(cell->writer, cell->write_barriers, cell->write_warp_barriers, who))
        return "reads what " + thread_text(cell->writer) + " has written, without a barrier between them";
    } else if (access_ == Access::kScratch) {
      return "reads memory that nothing has written";
    }
    note_read(*cell, who, order);
  }
  return "";
}

void Shadow::note_read(Cell& cell, const Accessor& who, const BlockOrder& order) {
  const uint32_t block = who.block + 1;
  if (cell.read_block == kSeveralBlocks) return;
  if (cell.read_block != 0 && cell.read_block != block) {
    if (!order.is_before(cell.read_block - 1, cell.read_arrivals, who.block)) {
      cell.read_block = kSeveralBlocks;
      return;
    }
    cell.reader = who.thread;
  } else {
    const bool same_warp = cell.reader != kSeveralWarps && cell.read_warp == who.thread / kWarpSize;
    const bool after_block = cell.read_barriers < who.barriers;
    const bool after_warp = same_warp && cell.read_warp_barriers < who.warp_barriers;
    if (cell.read_block == 0 || after_block || after_warp) {
      cell.reader = who.thread;  // those who read before a barrier need not be remembered
    } else if (cell.reader != who.thread) {
      cell.reader = same_warp ? kSeveralLanes : kSeveralWarps;
    }
  }
  cell.read_block = block;
  cell.read_warp = static_cast<uint8_t>(who.thread / kWarpSize);
  cell.read_barriers = who.barriers;
  cell.read_warp_barriers = who.warp_barriers;
  cell.read_arrivals = order.num_arrivals(who.block);
}

std::string Shadow::check_write(Cell& cell, const Accessor& who, const BlockOrder& order) const {
  if (cell.is_copied) return "writes where an asynchronous copy is under way";
  if (cell.is_atomic && !is_settled(cell, who)) return "writes a counter that this launch changes atomically";
  if (cell.is_written) {
    const uint32_t block = cell.write_block - 1;
    if (block != who.block && !order.is_before(block, cell.write_arrivals, who.block))
      return "writes what block " + std::to_string(block) + " has written in this launch";
    if (block == who.block && !is_ordered(cell.writer, cell.write_barriers, cell.write_warp_barriers, who))
      return "writes what " + thread_text(cell.writer) + " has written, without a barrier between them";
  }
  if (cell.read_block == 0) return "";
  if (cell.read_block == kSeveralBlocks) return "writes what several blocks have read in this launch";
  const uint32_t block = cell.read_block - 1;
  if (block != who.block) {
    const bool is_before = order.is_before(block, cell.read_arrivals, who.block);
    return is_before ? "" : "writes what block " + std::to_string(block) + " has read in this launch";
  }
  if (cell.read_barriers < who.barriers || cell.reader == who.thread) return "";
  const bool same_warp = cell.reader != kSeveralWarps && cell.read_warp == who.thread / kWarpSize;
  if (same_warp && cell.read_warp_barriers < who.warp_barriers) return "";
  const std::string reader = cell.reader >= kSeveralLanes ? "other threads have" : thread_text(cell.reader) + " has";
  return "writes what " + reader + " read, without a barrier between them";
}

std::string Shadow::write(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order) {
  if (access_ == Access::kRead) return "writes an array that is an input";
  allocate();
  for (Cell* cell = cells(address); cell <= cells(address + bytes - 1); ++cell) {
    if (std::string fault = check_write(*cell, who, order); !fault.empty()) return fault;
    cell->is_written = true;
    cell->is_atomic = false;
    cell->write_block = who.block + 1;
    cell->writer = who.thread;
    cell->write_barriers = who.barriers;
    cell->write_warp_barriers = who.warp_barriers;
    cell->write_arrivals = order.num_arrivals(who.block);
  }
  return "";
}

std::string Shadow::change_atomically(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order,
                                      bool is_shared) {
  if (access_ == Access::kRead) return "changes an array that is an input";
  allocate();
  for (Cell* cell = cells(address); cell <= cells(address + bytes - 1); ++cell) {
    if (is_shared) {
      if (cell->is_atomic && cell->write_barriers == who.barriers) continue;
      if (!cell->is_written) return "changes memory that nothing has written";
      if (std::string fault = check_write(*cell, who, order); !fault.empty()) return fault;
      cell->is_atomic = true;
      cell->writer = who.thread;
      cell->write_barriers = who.barriers;
      cell->write_warp_barriers = who.warp_barriers;
      continue;
    }
    if (cell->is_written || cell->read_block != 0) return "changes atomically what this launch reads or writes";
    cell->is_atomic = true;
  }
  return "";
}

std::string Shadow::begin_copy(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order) {
  if (std::string fault = write(address, bytes, who, order); !fault.empty()) return fault;
  for (Cell* cell = cells(address); cell <= cells(address + bytes - 1); ++cell) cell->is_copied = true;
  return "";
}

void Shadow::end_copy(uintptr_t address, size_t bytes, const Accessor& who) {
  for (Cell* cell = cells(address); cell <= cells(address + bytes - 1); ++cell) {
    cell->is_copied = false;
    cell->write_barriers = who.barriers;
    cell->write_warp_barriers = who.warp_barriers;
  }
}

}  // namespace fd::gpu::emulation
