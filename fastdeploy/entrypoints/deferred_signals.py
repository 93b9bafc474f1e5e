# SPDX-License-Identifier: Apache-2.0
"""Holds back signals whose handlers may raise, such as Ctrl-C, while the state of an engine changes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals for which programs install handlers that raise: KeyboardInterrupt, SystemExit, a timeout."""


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Call the handlers of signals that arrive in the block after it.

    Python calls handlers in the main thread only, between any two instructions; in other threads nothing is to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    is_over = False
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}

    def defer(number: int, frame: FrameType | None) -> None:
        if not is_over:
            arrived.append((number, frame))
            return
        handler = handlers[signal.Signals(number)]  # not restored yet, or not at all because another one has raised
        signal.signal(number, handler)
        handler(number, frame)

    try:
        for which in handlers:
            signal.signal(which, defer)
        yield
    finally:
        is_over = True
        for which, handler in handlers.items():
            signal.signal(which, handler)
    for number, frame in arrived:
        handlers[signal.Signals(number)](number, frame)
