# SPDX-License-Identifier: Apache-2.0
"""Limits on what clients have in flight: sequences in an API process, and tokens per minute."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from prometheus_client import Gauge

from fastdeploy.core.fair_queue import FairQueue
from fastdeploy.entrypoints.openai.clients import Client
from fastdeploy.entrypoints.openai.errors import ApiError, deadline_exceeded, too_many_requests

MINUTE_S = 60.0


@dataclass(eq=False)
class _Waiter:
    """A request that waits; the future is set when it is admitted."""

    client: Client
    num_sequences: int
    admitted: asyncio.Future[None]


class ConcurrencyLimiter:
    """Admits requests whose sequences (prompts times n) fit; others wait up to `max_wait_s` seconds (-1: no limit).

    Waiting clients take turns in proportion to their weights, each with its oldest request, and a request counts as
    many turns as it has sequences. A request whose turn it is is not overtaken, so that large ones are admitted too. A
    client at its own limit gets no turn until it releases some sequences. A request counts at most as that limit.

    Attributes:
        num_inside: requests inside.
        num_sequences: their sequences.
    """

    def __init__(
        self,
        limit: int,
        client_limit: int,
        max_wait_s: float,
        requests: Gauge,
        sequences: Gauge,
        on_wait: Callable[[str, int], None],
    ) -> None:
        """Admit `limit` sequences in all and `client_limit` of each client; the gauges show what is inside.

        Args:
            on_wait: is called with the name of a client and how many more, or fewer, sequences of it wait.
        """
        self._limit = limit
        self._client_limit = min(client_limit, limit)
        self._max_wait_s = math.inf if max_wait_s == -1 else max_wait_s
        self._gauges = (requests, sequences)
        self._on_wait = on_wait
        self._held: dict[str, int] = {}  # client id -> its sequences inside, at least one
        self._waiting: dict[str, OrderedDict[_Waiter, None]] = {}  # client id -> its waiters, at least one
        self._turns: FairQueue[str] = FairQueue()  # ids of clients whose oldest waiter is within the client's limit
        self._in_turns: set[str] = set()
        self.num_inside = 0
        self.num_sequences = 0

    @contextlib.asynccontextmanager
    async def enter(self, client: Client, num_sequences: int, deadline_s: float | None = None) -> AsyncIterator[None]:
        """Hold the sequences until the block ends.

        Args:
            deadline_s: time of the event loop until which the request may wait.

        Raises:
            ApiError: 429, too many sequences are running; 504, the deadline has come first.
        """
        count = min(num_sequences, self._client_limit)
        is_next = client.id not in self._waiting and not self._turns
        if is_next and self._has_room(client.id, count) and self.num_sequences + count <= self._limit:
            self._acquire(client.id, count)
        elif self._max_wait_s == 0:
            raise self._too_many(client.id, count)
        else:
            await self._wait(client, count, deadline_s)
        try:
            yield
        finally:
            self._release(client.id, count)

    async def _wait(self, client: Client, count: int, deadline_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._max_wait_s
        end_s = give_up_s if deadline_s is None else min(give_up_s, deadline_s)
        waiter = _Waiter(client, count, loop.create_future())
        self._waiting.setdefault(client.id, OrderedDict())[waiter] = None
        self._on_wait(client.name, count)
        self._take_turn(client.id)
        self._admit()
        try:
            async with asyncio.timeout_at(None if end_s == math.inf else end_s):
                await waiter.admitted
        except BaseException as error:
            if waiter.admitted.done() and not waiter.admitted.cancelled():  # admitted in the same moment
                self._release(client.id, count)
            else:
                self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise (self._too_many(client.id, count) if end_s == give_up_s else deadline_exceeded()) from None
            raise

    def _admit(self) -> None:
        """Admit waiters in turn until one does not fit."""
        while self._turns:
            client_id = self._turns.peek()
            waiter = self._oldest(client_id)
            if waiter is not None and self._has_room(client_id, waiter.num_sequences):
                if self.num_sequences + waiter.num_sequences > self._limit:
                    return
                self._acquire(client_id, waiter.num_sequences)
                waiter.admitted.set_result(None)
                self._forget(waiter)
            self._turns.pop()
            self._in_turns.remove(client_id)
            self._take_turn(client_id)

    def _take_turn(self, client_id: str) -> None:
        """Queue a client, unless it is queued already, nothing of it waits, or its oldest waiter exceeds its limit."""
        waiter = self._oldest(client_id)
        if waiter is None or client_id in self._in_turns or not self._has_room(client_id, waiter.num_sequences):
            return
        self._turns.push(client_id, client_id, waiter.client.weight / waiter.num_sequences)
        self._in_turns.add(client_id)

    def _leave(self, waiter: _Waiter) -> None:
        """Remove a waiter that gives up; what waits behind it may fit."""
        self._forget(waiter)
        self._take_turn(waiter.client.id)
        self._admit()

    def _oldest(self, client_id: str) -> _Waiter | None:
        """Return the oldest waiter of a client; one that has been cancelled is about to leave."""
        waiters = self._waiting.get(client_id, ())
        return next((waiter for waiter in waiters if not waiter.admitted.done()), None)

    def _forget(self, waiter: _Waiter) -> None:
        waiters = self._waiting[waiter.client.id]
        del waiters[waiter]
        self._on_wait(waiter.client.name, -waiter.num_sequences)
        if not waiters:
            del self._waiting[waiter.client.id]

    def _has_room(self, client_id: str, count: int) -> bool:
        has_own_limit = self._client_limit < self._limit  # else it waits for its turn like all others
        return not has_own_limit or self._held.get(client_id, 0) + count <= self._client_limit

    def _acquire(self, client_id: str, count: int) -> None:
        self._held[client_id] = self._held.get(client_id, 0) + count
        self._change(1, count)

    def _release(self, client_id: str, count: int) -> None:
        self._held[client_id] -= count
        if not self._held[client_id]:
            del self._held[client_id]
        self._change(-1, -count)
        self._take_turn(client_id)
        self._admit()

    def _change(self, num_requests: int, num_sequences: int) -> None:
        self.num_inside += num_requests
        self.num_sequences += num_sequences
        for gauge, change in zip(self._gauges, (num_requests, num_sequences)):
            gauge.inc(change)

    def _too_many(self, client_id: str, count: int) -> ApiError:
        held = self._held.get(client_id, 0)
        if held and held + count > self._client_limit < self._limit:
            text = f"{held} sequences of this client are running, its maximum is {self._client_limit}"
            return too_many_requests(f"{text} (--max-client-share)", "concurrency")
        text = f"{self.num_sequences} sequences are running, the maximum is {self._limit} (--max-concurrency)"
        return too_many_requests(text, "concurrency")


class TokenBucket:
    """What a client may still use of its tokens per minute: the bucket holds one minute's tokens and refills steadily.

    Output tokens are taken although the bucket is empty; the client then waits until they are made up for.
    """

    def __init__(self, tokens_per_minute: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._capacity = self._level = tokens_per_minute
        self._now_s = now_s
        self._refilled_s = now_s()

    def take(self, num_tokens: int) -> float:
        """Take the tokens of a prompt, for more than a minute's tokens from a full bucket.

        Returns:
            0, or the seconds after which there will be enough; then nothing has been taken.
        """
        now_s = self._now_s()
        self._level = min(self._capacity, self._level + (now_s - self._refilled_s) * self._capacity / MINUTE_S)
        self._refilled_s = now_s
        missing = min(num_tokens, self._capacity) - self._level
        if missing > 0:
            return missing * MINUTE_S / self._capacity
        self._level -= num_tokens
        return 0.0

    def charge(self, num_tokens: int) -> None:
        """Take output tokens, whether there are enough or not."""
        self._level -= num_tokens
