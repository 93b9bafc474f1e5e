# SPDX-License-Identifier: Apache-2.0
"""How long does each operator of a step take, and how long a plain loop over the same memory?

A plain loop (custom_ops/roofline/lines.h) loads each line of the memory that the kernel reads, weights or keys
and values, expands it as the format requires and multiplies it by the same number of rows, with the same threads. The
sums that a format requires belong to it: the two halves of a 16-bit row are combined (`wint8`, `wint4`), and a group's
sum times its scales is added to a total (all formats but `wint8`). The loop does not prepare rows, scale or write
outputs, or compute a softmax. For each kind of operator it runs in the fastest of several forms (FORMS), found by
trial. If a kernel is faster than its loop even so, the kernel's time replaces the loop's, so that the sum of all loops
is never above the time of the operators.
"""

from __future__ import annotations

import ctypes
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

from benchmarks.roofline import Reading
from benchmarks.roofline_library import load_loops
from fastdeploy.ops.backends.cpu.graph import OpGraph

TRIALS = 2  # per form


class LoopForm(ctypes.Structure):
    """How a loop streams its memory; LoopForm of custom_ops/roofline/loops.h."""

    _fields_ = (
        ("streams", ctypes.c_int64),
        ("ahead_bytes", ctypes.c_int64),
        ("interleaves_row_blocks", ctypes.c_int64),
    )


FORMS = [LoopForm(streams, ahead) for streams in (1, 2, 4) for ahead in (1 << 12, 1 << 14, 1 << 15)]
FORMS += [LoopForm(streams=2, ahead_bytes=ahead, interleaves_row_blocks=1) for ahead in (1 << 12, 1 << 14, 1 << 15)]


@dataclass(frozen=True)
class LaunchWork:
    """The work of a launch: bytes to read, operations in fp32 or bf16, and operations in integers."""

    num_bytes: float
    bf16_operations: float
    int8_operations: float

    def __add__(self, other: LaunchWork) -> LaunchWork:
        """Return the sum."""
        return LaunchWork(
            self.num_bytes + other.num_bytes,
            self.bf16_operations + other.bf16_operations,
            self.int8_operations + other.int8_operations,
        )

    def floor_s(self, reading: Reading) -> float:
        """Return the lower bound of the seconds that this work takes on a machine with these limits."""
        return reading.floor_s(self.num_bytes, self.bf16_operations, self.int8_operations)


@dataclass(frozen=True)
class Replay:
    """A captured graph with the size of one step, whose data its tensors hold until the next step."""

    graph: OpGraph
    num_rows: int
    num_seqs: int

    def count_work(self) -> list[LaunchWork]:
        """Return the work of each launch."""
        work = (ctypes.c_double * (3 * len(self.graph)))()
        load_loops().fd_count_work(*self._arguments(), work)
        return [LaunchWork(*one) for one in zip(work[0::3], work[1::3], work[2::3], strict=True)]

    def time_kernels(self, on_thread_time: bool) -> list[float]:
        """Run the launches; return the seconds of each."""
        seconds, _ = self._time(None, on_thread_time)
        return seconds

    def time_loops(self, forms: Sequence[LoopForm], on_thread_time: bool) -> tuple[list[float], list[int]]:
        """Run each launch's loop in its form; return its seconds and its number of 64-byte lines times rows."""
        return self._time((LoopForm * len(forms))(*forms), on_thread_time)

    def _time(self, forms: ctypes.Array[LoopForm] | None, on_thread_time: bool) -> tuple[list[float], list[int]]:
        count = len(self.graph)
        seconds, lines = (ctypes.c_double * count)(), (ctypes.c_int64 * count)()
        clock = ctypes.c_bool(on_thread_time)
        load_loops().fd_time_launches(*self._arguments(), forms, clock, seconds, lines)
        return list(seconds), list(lines)

    def _arguments(self) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]:
        handle = ctypes.c_void_p(self.graph.handle)
        return handle, ctypes.c_int64(self.num_rows), ctypes.c_int64(self.num_seqs)


def capture_replays(step: Callable[[], object]) -> list[Replay]:
    """Run a step that is not the engine's first; return the graphs that it replayed."""
    captured: list[Replay] = []
    replay = OpGraph.replay

    def recorded_replay(self: OpGraph, num_rows: int, num_seqs: int) -> None:
        captured.append(Replay(self, num_rows, num_seqs))
        replay(self, num_rows, num_seqs)

    with patch.object(OpGraph, "replay", recorded_replay):
        step()
    return captured


NO_WORK = LaunchWork(0.0, 0.0, 0.0)


def total_work(replays: Sequence[Replay]) -> LaunchWork:
    """Return the work of all launches of a step."""
    launches = (work for replay in replays for work in replay.count_work())
    return sum(launches, NO_WORK)


def _by_kind(replays: Sequence[Replay], values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Add up the launches' values by kind of operator."""
    sums: dict[str, float] = defaultdict(float)
    for replay, of_launches in zip(replays, values, strict=True):
        for kind, value in zip(replay.graph.describe(), of_launches, strict=True):
            sums[kind] += value
    return sums


@dataclass
class LaunchFloors:
    """Times of the operators in steps of one shape, per group of steps and kind of operator."""

    on_thread_time: bool = False
    forms: dict[str, LoopForm] = field(default_factory=dict)  # kind -> fastest form
    work: dict[str, LaunchWork] = field(default_factory=dict)
    kernels_s: list[dict[str, float]] = field(default_factory=list)
    loops_s: list[dict[str, float]] = field(default_factory=list)

    def measure(self, replays: Sequence[Replay]) -> None:
        """Time the loops and kernels of one group, twice in alternation. The first call finds the forms."""
        if not self.forms:
            self._find_forms(replays)
        self._count(replays)
        times = [(self._time_loops(replays, self.forms), self._time_kernels(replays)) for _ in range(2)]
        for kept, (first, second) in zip((self.loops_s, self.kernels_s), zip(*times)):
            kept.append({kind: (first[kind] + second[kind]) / 2 for kind in self.work})

    def by_kernel(self) -> list[str]:
        """Return the kinds whose kernel was faster than its loop in the median of groups."""
        return [kind for kind in self.work if _median(self.kernels_s, kind) < _median(self.loops_s, kind)]

    def attainable_by_kind_s(self) -> list[dict[str, float]]:
        """Return, per group, the time of each kind's loop, or of its kernel if that was faster."""
        faster = set(self.by_kernel())
        return [
            {kind: (kernels if kind in faster else loops)[kind] for kind in self.work}
            for loops, kernels in zip(self.loops_s, self.kernels_s, strict=True)
        ]

    def attainable_s(self) -> list[float]:
        """Return, per group, the sum of these."""
        return [sum(by_kind.values()) for by_kind in self.attainable_by_kind_s()]

    def _count(self, replays: Sequence[Replay]) -> None:
        self.work = {}
        for replay in replays:
            for kind, work in zip(replay.graph.describe(), replay.count_work(), strict=True):
                if work.num_bytes:  # the bounds leave out gathers and norms
                    self.work[kind] = self.work[kind] + work if kind in self.work else work

    def _find_forms(self, replays: Sequence[Replay]) -> None:
        kinds = {kind for replay in replays for kind in replay.graph.describe()}
        trials = [
            (form, self._time_loops(replays, dict.fromkeys(kinds, form))) for _ in range(TRIALS) for form in FORMS
        ]
        for kind in kinds:
            self.forms[kind] = min(trials, key=lambda trial: trial[1][kind])[0]

    def _time_loops(self, replays: Sequence[Replay], forms: Mapping[str, LoopForm]) -> dict[str, float]:
        of_launches = [[forms[kind] for kind in replay.graph.describe()] for replay in replays]
        times = [replay.time_loops(own, self.on_thread_time)[0] for replay, own in zip(replays, of_launches)]
        return _by_kind(replays, times)

    def _time_kernels(self, replays: Sequence[Replay]) -> dict[str, float]:
        return _by_kind(replays, [replay.time_kernels(self.on_thread_time) for replay in replays])


def _median(groups: Sequence[Mapping[str, float]], kind: str) -> float:
    return statistics.median(group[kind] for group in groups)
