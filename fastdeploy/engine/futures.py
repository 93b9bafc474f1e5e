# SPDX-License-Identifier: Apache-2.0
"""Waits for several futures at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any


class _AllDone(Future[None]):
    """Keeps the futures that it waits for: a form whose futures are all gone is not compiled."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        super().__init__()
        self.futures = futures


def all_done(futures: Sequence[Future[Any]]) -> Future[Any] | None:
    """Return a future that is done when all of these are; None for none."""
    if len(futures) < 2:
        return next(iter(futures), None)
    done = _AllDone(futures)
    left = [len(futures)]
    lock = threading.Lock()

    def count_down(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            is_last = left[0] == 0
        if is_last:
            done.set_result(None)

    for future in futures:
        future.add_done_callback(count_down)
    return done
