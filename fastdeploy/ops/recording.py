# SPDX-License-Identifier: Apache-2.0
"""Operator calls recorded once and replayed by one native call: the CPU's counterpart of a CUDA graph.

A call through Paddle costs about 10 us, and 0.1 to 0.3 ms where a model's weights have just gone through the caches;
the hundred calls of a step would pay it again and again for the same buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from fastdeploy.ops.registry import load_library, selected_backend


class Recording:
    """The launches that a function makes, without what it does in Python between them.

    It holds addresses: whoever replays it keeps every tensor alive that the function passed to an operator.

    Attributes:
        handle: what native code knows it by.
    """

    __slots__ = ("_free", "_num_launches", "_replay", "handle")

    def __init__(self, function: Callable[[], Any]) -> None:
        """Record the operators that `function` calls.

        Those of drafting and of log-probabilities, and those that prepare weights, cannot be recorded: they are called.

        They are checked as usual but not performed, so `function` must not read their results. Every one of them is
        to be called with the most rows (and sequences) that a replay may ask for.

        Raises:
            ValueError: as the operators do.
        """
        library = load_library()
        library.fd_recording_end.restype = ctypes.c_void_p
        library.fd_recording_describe.restype = ctypes.c_char_p
        self._free = library.fd_recording_free  # kept here: modules may be gone when the last recording goes
        self._free.argtypes = [ctypes.c_void_p]
        self._replay = library.fd_replay
        self._replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._replay.restype = ctypes.c_char_p
        library.fd_recording_begin()
        try:
            function()
        finally:
            self.handle: int = library.fd_recording_end()
        self._num_launches = int(library.fd_recording_size(ctypes.c_void_p(self.handle)))

    def __len__(self) -> int:
        """Return the number of launches."""
        return self._num_launches

    def replay(self, num_rows: int, num_seqs: int) -> None:
        """Perform the launches for the first num_rows rows and num_seqs sequences, at most those recorded.

        Raises:
            ValueError: more rows than recorded; an id, position or slot out of range, as the operators say it.
        """
        refusal = self._replay(self.handle, num_rows, num_seqs)
        if refusal is not None:
            raise ValueError(refusal.decode())

    def describe(self) -> list[str]:
        """Return what every launch is, with the size of its weight if it has one: "Linear [3072, 1024]".

        A layer whose outputs are sampled next is a "Linear with block maxima [151936, 1024]": it tells sampling the
        largest logit of each block.
        """
        lines: bytes = load_library().fd_recording_describe(ctypes.c_void_p(self.handle))
        return lines.decode().splitlines()

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None:
            self._free(handle)


class Routine:
    """Operators that run again and again over the same buffers, for another number of rows and sequences each time.

    Where the backend can record, the first run records them and every run replays them.
    """

    def __init__(self, function: Callable[[int, int], None], max_rows: int, max_seqs: int) -> None:
        """Take the operators that function(num_rows, num_seqs) calls, and what their buffers have room for."""
        self._function, self._max_rows, self._max_seqs = function, max_rows, max_seqs
        self._records = can_record()
        self._recording: Recording | None = None

    def run(self, num_rows: int, num_seqs: int) -> None:
        """Perform the operators for the first rows and sequences.

        Raises:
            ValueError: as they do.
        """
        if not self._records:
            return self._function(num_rows, num_seqs)
        if self._recording is None:
            self._recording = Recording(lambda: self._function(self._max_rows, self._max_seqs))
        self._recording.replay(num_rows, num_seqs)

    def forget(self) -> None:
        """Record anew at the next run: a buffer has moved."""
        self._recording = None


def num_launches() -> int:
    """Return how many native operators that can be recorded this process has performed, replayed ones included."""
    library = load_library()
    library.fd_num_launches.restype = ctypes.c_int64
    return int(library.fd_num_launches())


def can_record() -> bool:
    """Return whether the selected backend can record: the native operators of the CPU can."""
    return selected_backend() == "cpu"
