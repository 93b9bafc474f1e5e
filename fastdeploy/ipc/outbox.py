# SPDX-License-Identifier: Apache-2.0
"""Collects the deltas of several steps, for some milliseconds, into one message."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.ipc import messages

SEND_S = 0.0001  # processor time to send the deltas of one stream, in both processes together
MAX_CPU_FRACTION = 0.015  # of all cores, for sending: with 4 streams on two cores, one message every 13 ms
MAX_DELAY_S = 0.05  # shorter than a reader notices


class Outbox:
    """The deltas that were emitted and not sent yet, by client.

    The streams of all clients are sent together, at intervals that grow with the number of streams: sending after every
    step would take processor time from the engine. First tokens and finished requests are sent at once, with everything
    that is collected by then.
    """

    def __init__(
        self,
        send: Callable[[bytes, messages.Deltas], None],
        num_cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty outbox.

        Args:
            send: sends a message to a client.
            num_cores: cores of the machine; by default those that this process may use.
            clock: returns seconds.
        """
        cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
        self._interval_s = SEND_S / (MAX_CPU_FRACTION * cores)  # of one stream
        self._send = send
        self._clock = clock
        self._unsent: dict[bytes, list[TokenDelta]] = defaultdict(list)
        self._sent_s = self._stepped_s = clock()

    def put(self, client: bytes, delta: TokenDelta) -> None:
        """Add the delta of a step and choice."""
        self._unsent[client].append(delta)

    def send_when_due(self, num_streams: int) -> None:
        """Send at the end of a step if the interval for this many streams ends before the middle of the next step.

        The next step is assumed to take as long as this one.
        """
        now_s = self._clock()
        step_s, self._stepped_s = now_s - self._stepped_s, now_s
        if now_s + step_s / 2 > self._sent_s + min(MAX_DELAY_S, self._interval_s * num_streams):
            self.send()

    def send(self) -> None:
        """Send everything that is collected."""
        self._sent_s = self._stepped_s = self._clock()
        for client, deltas in self._unsent.items():
            self._send(client, messages.split_deltas(deltas))
        self._unsent.clear()
