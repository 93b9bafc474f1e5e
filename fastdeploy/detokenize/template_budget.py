# SPDX-License-Identifier: Apache-2.0
"""What a chat template may still use: processor time of its thread, and characters of the values that it makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from fastdeploy.core.errors import TemplateLimitError

MAX_SIZE = 2**24  # characters of one value, as it would be printed
MAX_TOTAL_SIZE = 2**29  # characters of all values that a template makes
TICKS_PER_CHECK = 32  # of the processor time, which takes a microsecond to read


def check_size(size: int) -> None:
    """Raise TemplateLimitError if a value of so many characters is too large."""
    if size > MAX_SIZE:
        raise TemplateLimitError("messages", f"the chat template makes a value of more than {MAX_SIZE} characters")


class Budget(threading.local):
    """What is left of the limits of the template that this thread renders; without one there is no limit."""

    cpu_end_s: float = float("inf")
    size: float = float("inf")
    max_cpu_s: float = 0.0

    def check_time(self) -> None:
        """Raise TemplateLimitError if the template has taken too much time."""
        if _cpu_time_s() > self.cpu_end_s:
            raise TemplateLimitError("messages", f"rendering takes more than {self.max_cpu_s:g} s of processor time")

    def spend(self, size: int) -> None:
        """Count a value that the template makes; raise TemplateLimitError if it is too large, or all are together."""
        check_size(size)
        self.size -= size
        if self.size < 0:
            raise TemplateLimitError(
                "messages", f"the chat template makes more than {MAX_TOTAL_SIZE} characters in all"
            )


BUDGET = Budget()
_ticks = count(1)  # of all threads, so that a tick needs no state of its thread


@contextmanager
def limited(max_cpu_s: float) -> Iterator[None]:
    """Limit what this thread renders meanwhile."""
    BUDGET.size, BUDGET.max_cpu_s = MAX_TOTAL_SIZE, max_cpu_s
    BUDGET.cpu_end_s = _cpu_time_s() + max_cpu_s
    try:
        yield
    finally:
        del BUDGET.size, BUDGET.cpu_end_s, BUDGET.max_cpu_s


def tick() -> None:
    """Count one repetition; raise TemplateLimitError if the template has taken too much time."""
    if not next(_ticks) % TICKS_PER_CHECK:
        BUDGET.check_time()


def _cpu_time_s() -> float:
    """Return the processor time of this thread."""
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
