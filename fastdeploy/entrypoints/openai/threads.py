# SPDX-License-Identifier: Apache-2.0
"""The threads in which large requests are parsed, rendered and tokenized, so that the event loop stays free."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from fastdeploy.core.fair_executor import FairExecutor

NUM_THREADS = 3  # one client uses one of them at a time; each may hold about a gigabyte while it tokenizes
MAX_WAITING = 1024  # functions per client
MAX_WAITING_TEMPLATES = 64  # per client: each may take seconds

T = TypeVar("T")


async def run_in_thread(client_id: str, weight: float, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, computed in a thread; clients are served in turn.

    Args:
        client_id: whose work it is (`Client.id`).
        weight: a client of weight 2 is served twice as often as one of weight 1.

    Raises:
        QueueFullError: `MAX_WAITING` functions of this client are waiting.
    """
    return await _threads().run(client_id, weight, function, *arguments)


async def run_in_template_thread(client_id: str, weight: float, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, which may render a client's template: only this thread may do that.

    Raises:
        QueueFullError: `MAX_WAITING_TEMPLATES` functions of this client are waiting.
    """
    return await _template_thread().run(client_id, weight, function, *arguments)


@cache
def _threads() -> FairExecutor:
    return FairExecutor(NUM_THREADS, MAX_WAITING, "text")


@cache
def _template_thread() -> FairExecutor:
    return FairExecutor(1, MAX_WAITING_TEMPLATES, "template")  # there is one template process
