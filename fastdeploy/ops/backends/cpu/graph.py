# SPDX-License-Identifier: Apache-2.0
"""Operator calls captured once and replayed by one native call: the CPU's counterpart of a CUDA graph.

A call through Paddle costs about 10 us, and 0.1 to 0.3 ms when the processor's caches hold a model's weights. A step
makes about a hundred such calls, always on the same buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from fastdeploy.ops.backends.cpu.library import load_library


class OpGraph:
    """The operators that a function called, with their arguments; the Python code between them is not kept.

    It holds addresses only: the caller keeps every tensor alive that the function passed to an operator.

    Attributes:
        handle: address of the native graph.
    """

    __slots__ = ("_free", "_num_launches", "_replay", "handle")

    def __init__(self, function: Callable[[], Any]) -> None:
        """Capture the operators that `function` calls.

        They are checked as usual but not executed, so `function` must not read their results. Each must be called with
        the maximum number of rows (and sequences) that a replay may use. Operators of drafting, of log-probabilities
        and of weight packing cannot be captured: they are executed at once.

        Raises:
            ValueError: an operator refuses its arguments.
        """
        library = load_library()
        library.fd_capture_end.restype = ctypes.c_void_p
        library.fd_graph_describe.restype = ctypes.c_char_p
        self._free = library.fd_graph_free  # kept here: at interpreter exit, modules may be gone before the graph
        self._free.argtypes = [ctypes.c_void_p]
        self._replay = library.fd_graph_replay
        self._replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._replay.restype = ctypes.c_char_p
        library.fd_capture_begin()
        try:
            function()
        finally:
            self.handle: int = library.fd_capture_end()
        self._num_launches = int(library.fd_graph_size(ctypes.c_void_p(self.handle)))

    def __len__(self) -> int:
        """Return the number of launches."""
        return self._num_launches

    def replay(self, num_rows: int, num_seqs: int) -> None:
        """Execute the operators for the first num_rows rows and num_seqs sequences.

        Raises:
            ValueError: more rows or sequences than captured; an id, position or slot out of range.
        """
        message = self._replay(self.handle, num_rows, num_seqs)
        if message is not None:
            raise ValueError(message.decode())

    def describe(self) -> list[str]:
        """Return the kind of every launch, with the size of its weight if it has one: "Linear [3072, 1024]".

        A linear layer whose outputs are sampled next is a "Linear with block maxima [151936, 1024]": it passes the
        largest logit of each block to sampling.
        """
        lines: bytes = load_library().fd_graph_describe(ctypes.c_void_p(self.handle))
        return lines.decode().splitlines()

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None:
            self._free(handle)
