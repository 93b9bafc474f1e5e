# SPDX-License-Identifier: Apache-2.0
"""Holds back for milliseconds what steps emit, so that one message tells of several steps."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.ipc import messages

CHUNK_S = 0.0001  # processor time of bringing a stream what is new of it, on both sides
MAX_SHARE = 0.015  # of all cores' time that this may take: on two cores, each of 4 streams gets a chunk every 13 ms
MAX_DELAY_S = 0.05  # more often than anybody reads


class Outbox:
    """What was emitted and not sent yet, by client.

    Streams of all clients are brought up to date together, at intervals that grow with their number: writing to each
    after each step would take from the engine the cores that it computes with. The engine sends at once what must not
    wait, first tokens and ends, and whatever is here with it.
    """

    def __init__(
        self,
        send: Callable[[bytes, messages.Deltas], None],
        num_cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send through `send`; `num_cores` is how many this process may use, by default."""
        cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
        self._interval_s = CHUNK_S / (MAX_SHARE * cores)  # of one stream
        self._send = send
        self._clock = clock
        self._unsent: dict[bytes, list[TokenDelta]] = defaultdict(list)
        self._sent_s = self._stepped_s = clock()

    def put(self, client: bytes, delta: TokenDelta) -> None:
        """Add what a step has emitted of a choice."""
        self._unsent[client].append(delta)

    def send_when_due(self, num_streams: int) -> None:
        """Send if this end of a step is nearer to the end of so many streams' interval than the next one will be.

        The next step is taken to be as long as this one.
        """
        now_s = self._clock()
        step_s, self._stepped_s = now_s - self._stepped_s, now_s
        if now_s + step_s / 2 > self._sent_s + min(MAX_DELAY_S, self._interval_s * num_streams):
            self.send()

    def send(self) -> None:
        """Send all that is there."""
        self._sent_s = self._stepped_s = self._clock()
        for client, deltas in self._unsent.items():
            self._send(client, messages.split_deltas(deltas))
        self._unsent.clear()
