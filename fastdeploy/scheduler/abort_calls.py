# SPDX-License-Identifier: Apache-2.0
"""Aborts of requests by their ids, whichever owner has them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from fastdeploy.scheduler.messages import AbortAnswer, AbortCall
from fastdeploy.scheduler.owner_link import OwnerLink, Send
from fastdeploy.scheduler.store import Store, StoreError

ANSWER_S = 1.0  # that an asker waits for the owners that are alive
MAX_REMEMBERED = 256  # calls that were answered: Redis may deliver a call again, when other requests are in flight

logger = logging.getLogger("fastdeploy.cluster")

Aborted = list[tuple[str, int]]
"""The ids of aborted requests, and the number of tokens that each of them had."""


class AbortCalls:
    """Asks all other owners, and answers them."""

    def __init__(
        self, name: str, store: Store, link: OwnerLink, abort_own: Callable[[Sequence[str] | None, str], Aborted]
    ) -> None:
        """Ask and answer for the owner `name`; `abort_own` aborts requests of its own."""
        self._name, self._store, self._link, self._abort_own = name, store, link, abort_own
        self._call_ids = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._answered: dict[tuple[str, int], AbortAnswer] = {}

    async def abort(self, request_ids: Sequence[str] | None, salt_prefix: str) -> Aborted:
        """Abort requests of all owners; while Redis is away, of this one only."""
        aborted = self._abort_own(request_ids, salt_prefix)
        if not self._link.is_up:
            return aborted
        call_id = next(self._call_ids)
        call = self._calls[call_id] = _Call()
        message = AbortCall(self._name, call_id, None if request_ids is None else list(request_ids), salt_prefix)
        try:
            async with asyncio.timeout(ANSWER_S):
                for owner in sorted(await self._store.read_owners() - {self._name}):
                    if await self._store.send_to_owner(owner, [message]):
                        call.asked.add(owner)
                while call.asked - call.answered:
                    await call.has_answer.wait()
                    call.has_answer.clear()
        except TimeoutError:
            late = ", ".join(sorted(call.asked - call.answered)) or "Redis"
            logger.warning("requests are aborted, but not everywhere: no answer of %s within %g s", late, ANSWER_S)
        except StoreError as error:
            self._link.lose(error)
        finally:
            del self._calls[call_id]
        return aborted + call.aborted

    def on_call(self, call: AbortCall) -> None:
        """Abort own requests for another owner, unless that was done for the same call, and answer."""
        key = call.asker, call.call_id
        if key not in self._answered:
            aborted = self._abort_own(call.request_ids, call.salt_prefix)
            self._answered[key] = AbortAnswer(call.call_id, self._name, aborted)
            if len(self._answered) > MAX_REMEMBERED:
                del self._answered[next(iter(self._answered))]
        self._link.write(Send(call.asker, self._answered[key]))

    def on_answer(self, answer: AbortAnswer) -> None:
        """Take the answer of another owner; one that is late or comes twice is ignored."""
        call = self._calls.get(answer.call_id)
        if call is not None and answer.owner not in call.answered:
            call.answered.add(answer.owner)
            call.aborted += answer.num_tokens
            call.has_answer.set()


class _Call:
    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.answered: set[str] = set()
        self.aborted: Aborted = []
        self.has_answer = asyncio.Event()
