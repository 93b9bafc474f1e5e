# SPDX-License-Identifier: Apache-2.0
"""Threads that serve their clients in turn, so that the work of one client does not delay that of another."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastdeploy.core.errors import QueueFullError
from fastdeploy.core.fair_queue import FairQueue

T = TypeVar("T")


@dataclass
class _Task:
    client_id: str
    weight: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)


class FairExecutor:
    """Runs functions in a fixed number of threads, one function of each client at a time.

    The clients that wait are served in proportion to their weights. Thread-safe.
    """

    def __init__(self, num_threads: int, max_waiting_per_client: int, name: str) -> None:
        """Create an executor; its threads, which are called `name`, start when they are needed."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_waiting = max_waiting_per_client
        self._lock = threading.Lock()
        self._num_idle = num_threads
        self._queue: FairQueue[_Task] = FairQueue()  # at most one task per client, whose other tasks are in `_later`
        self._later: dict[str, deque[_Task]] = {}  # one entry per client with a task in the queue or in a thread

    def submit(self, client_id: str, weight: float, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Return the future result of `function(*arguments)`; a task that is cancelled before its turn does not run.

        Raises:
            QueueFullError: `max_waiting_per_client` functions of this client are waiting.
        """
        task = _Task(client_id, weight, function, arguments)
        with self._lock:
            later = self._later.get(client_id)
            if later is None:
                self._later[client_id] = deque()
                self._queue.push(client_id, task, weight)
                self._start_tasks()
            elif len(later) < self._max_waiting:
                later.append(task)
            else:
                raise QueueFullError(f"{self._max_waiting} large requests of this client are waiting already")
        return task.future

    async def run(self, client_id: str, weight: float, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`, computed in a thread. Raises what `submit` and the function raise."""
        return await asyncio.wrap_future(self.submit(client_id, weight, function, *arguments))

    def _start_tasks(self) -> None:
        """Give waiting tasks to idle threads. The lock is held."""
        while self._num_idle and len(self._queue):
            self._num_idle -= 1
            self._threads.submit(self._run_task, self._queue.pop())

    def _run_task(self, task: _Task) -> None:
        if task.future.set_running_or_notify_cancel():
            try:
                task.future.set_result(task.function(*task.arguments))
            except BaseException as error:
                task.future.set_exception(error)
        with self._lock:
            self._num_idle += 1
            later = self._later[task.client_id]
            if later:
                following = later.popleft()
                self._queue.push(following.client_id, following, following.weight)
            else:
                del self._later[task.client_id]
            self._start_tasks()
