# SPDX-License-Identifier: Apache-2.0
"""What are the limits of the machine at this moment? Read bandwidth, and peak operations in bf16 and int8.

A reading with all threads takes about 20 ms, so that benchmarks can take one between any two timed calls. On a shared
machine the bandwidth halves and doubles within minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paddle

from benchmarks.roofline_library import load_loops
from fastdeploy.config.machine import available_memory_bytes
from fastdeploy.ops.backends.cpu.library import num_threads
from fastdeploy.ops.backends.cpu.memory import allocate_streamed
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION
from fastdeploy.ops.registry import select_backend

MIN_WINDOW_BYTES = 1 << 28  # of one reading
BUFFER_OVER_CACHE = 4  # size of the whole buffer over that of the last-level cache
TILE = 1 << 18  # bytes that a thread reads at a time
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
BLOCKED_ROWS, BLOCKED_OUT, BLOCKED_IN = 504, 3072, 1024
REGISTER_STEPS = 10_000  # about a millisecond


@dataclass(frozen=True)
class Reading:
    """The limits of the machine at one moment.

    Attributes:
        bytes_per_s: bandwidth of reading memory that is in no cache.
        bf16_per_s: bf16 operations per second, the better of a loop over registers and a blocked linear layer.
        int8_per_s: int8 operations per second, likewise.
    """

    bytes_per_s: float
    bf16_per_s: float
    int8_per_s: float

    def floor_s(self, num_bytes: float, bf16_operations: float, int8_operations: float = 0.0) -> float:
        """Return the lower bound of the seconds of work that reads `num_bytes` and does these operations."""
        arithmetic = bf16_operations / self.bf16_per_s + int8_operations / self.int8_per_s
        return max(num_bytes / self.bytes_per_s, arithmetic)

    def __str__(self) -> str:
        """Name the three limits."""
        return (
            f"{self.bytes_per_s / 1e9:.1f} GB/s, {self.bf16_per_s / 1e9:.0f} bf16 GFLOP/s, "
            f"{self.int8_per_s / 1e9:.0f} int8 GOP/s"
        )


def median_of(readings: Sequence[Reading]) -> Reading:
    """Return the median of each figure."""
    return Reading(
        statistics.median(r.bytes_per_s for r in readings),
        statistics.median(r.bf16_per_s for r in readings),
        statistics.median(r.int8_per_s for r in readings),
    )


def integer_products(quantization: str) -> int:
    """Return the number of integer products per weight and row in this format; 0 if it multiplies in bf16.

    Rows of wint8 and wint4 have 16 bits, which takes two products if the instruction-set path multiplies bytes.
    """
    if quantization == NO_QUANTIZATION:
        return 0
    return int(load_loops().fd_row_limbs(ctypes.c_int64(FORMS[quantization].as_list()[0])))


def add_clock_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `make_roofline` reads."""
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu needs FD_NUM_THREADS=1")


def make_roofline(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Roofline:
    """Select the CPU's operators and return a roofline with the clock of --clock.

    On a shared machine, --clock cpu leaves out the time in which other processes ran.
    """
    select_backend("cpu")
    if args.clock == "cpu" and num_threads() != 1:
        parser.error(f"--clock: cpu: expected FD_NUM_THREADS=1, got {num_threads()} threads")
    return Roofline(time.thread_time if args.clock == "cpu" else time.perf_counter)


def last_level_cache_bytes(caches: Path = CACHES) -> int:
    """Return the size of the largest cache that the system reports; 0 if it reports none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [file.read_text().strip() for file in caches.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] if size[-1] in units else int(size) for size in sizes), default=0)


def buffer_bytes(cache: int, available: int) -> tuple[int, int]:
    """Return the bytes of the buffer, and of the window of it that one reading reads; both whole tiles.

    A window is at least as large as the cache and is read again only after all others. So a reading finds none of its
    bytes in the cache, and it evicts those of the call that was timed before. The buffer is at most a quarter of the
    available memory.
    """
    window = max(MIN_WINDOW_BYTES, -(-cache // TILE) * TILE)
    num_windows = max(1, min(-(-BUFFER_OVER_CACHE * cache // window), available // 4 // window))
    return num_windows * window, window


class Roofline:
    """Measures the limits with the threads and the instruction-set path of the operators, and keeps all readings."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.readings: list[Reading] = []
        self._loops = load_loops()
        self.cache_bytes = last_level_cache_bytes()
        self.buffer_bytes, self._window = buffer_bytes(self.cache_bytes, available_memory_bytes())
        self._memory = allocate_streamed([self.buffer_bytes // 4], "float32").zero_()
        self._next = 0
        source = random_rows(BLOCKED_OUT, BLOCKED_IN, "bfloat16", 5, BLOCKED_IN**-0.5)
        self._blocked = {kind: pack_linear(source, None, kind) for kind in ("none", "w8a8")}
        self._x = random_rows(BLOCKED_ROWS, BLOCKED_IN, "bfloat16", 6)
        self._out = paddle.zeros([BLOCKED_ROWS, BLOCKED_OUT], "bfloat16")

    def measure(self) -> Reading:
        """Measure the limits now."""
        reading = Reading(
            self._read(),
            max(self._multiply(self._loops.fd_multiply_registers), self._multiply_blocked("none")),
            max(self._multiply(self._loops.fd_multiply_integers), self._multiply_blocked("w8a8")),
        )
        self.readings.append(reading)
        return reading

    @property
    def median(self) -> Reading:
        """Return the median of each figure over all readings."""
        return median_of(self.readings)

    def describe(self) -> dict[str, float]:
        """Return the medians and the sizes of cache and buffer, for a JSON line."""
        return {
            "read_gb_per_s": self.median.bytes_per_s / 1e9,
            "peak_bf16_gflop_per_s": self.median.bf16_per_s / 1e9,
            "peak_int8_gop_per_s": self.median.int8_per_s / 1e9,
            "last_level_cache_mib": self.cache_bytes / (1 << 20),
            "read_buffer_mib": self.buffer_bytes / (1 << 20),
        }

    def _read(self) -> float:
        address = self._memory.data_ptr() + self._next
        self._next = (self._next + self._window) % self.buffer_bytes
        begin = self.clock()
        self._loops.fd_read_memory(ctypes.c_void_p(address), ctypes.c_int64(self._window))
        return self._window / (self.clock() - begin)

    def _multiply(self, loop: Callable[[ctypes.c_int64], float]) -> float:
        begin = self.clock()
        operations = loop(ctypes.c_int64(REGISTER_STEPS))
        return operations / (self.clock() - begin)

    def _multiply_blocked(self, kind: str) -> float:
        begin = self.clock()
        linear(self._x, self._blocked[kind], self._out, BLOCKED_ROWS)
        return 2.0 * BLOCKED_ROWS * BLOCKED_OUT * BLOCKED_IN / (self.clock() - begin)
