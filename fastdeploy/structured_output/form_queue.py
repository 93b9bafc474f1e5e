# SPDX-License-Identifier: Apache-2.0
"""The forms that requests wait for, in the order in which they are compiled."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from weakref import WeakSet

from fastdeploy.core.errors import QueueFullError
from fastdeploy.core.fair_queue import FairQueue
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.structured_output.grammar import GrammarState
from fastdeploy.structured_output.trial_process import Verdict

MAX_WAITING_FORMS = 64  # of one client


class Form:
    """A form of requests: waiting, being compiled, or done.

    Attributes:
        request_id, client_id: the request that asked for it first, and whose it is.
        result: its grammar, why it was refused, or an exception that says nothing about the form; None before.
    """

    def __init__(self, request_id: str, client_id: str, spec: StructuredOutputsParams) -> None:
        self.request_id = request_id
        self.client_id = client_id
        self.spec = spec
        self.result: GrammarState | Verdict | Exception | None = None
        self.is_started = False
        self._waiters: WeakSet[Future[None]] = WeakSet()

    @property
    def is_wanted(self) -> bool:
        """Return whether anybody waits for the form."""
        return bool(self._waiters)

    @property
    def is_waiting(self) -> bool:
        """Return whether the form is still to be compiled: a form whose requests were all aborted is not."""
        return not self.is_started and self.is_wanted

    def wait(self) -> Future[None]:
        """Return a future that is done when the form is; its owner waits for the form as long as it keeps it."""
        waiter: Future[None] = Future()
        if self.result is not None:
            waiter.set_result(None)
        self._waiters.add(waiter)
        return waiter

    def finish(self, result: GrammarState | Verdict | Exception) -> None:
        """Set the result."""
        self.result = result
        for waiter in list(self._waiters):
            waiter.set_result(None)


class FormQueue:
    """Waiting forms, served round-robin by client. A form that several clients wait for is in the queue of each.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._forms: dict[str, list[Form]] = {}  # by client, in order of arrival
        self._turns: FairQueue[str] = FairQueue()  # clients; a turn whose form has gone is skipped
        self._num_turns: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of turns, which is at least that of the waiting forms."""
        return len(self._turns)

    def push(self, client_id: str, form: Form, weight: float) -> None:
        """Add a form that is waiting to the queue of a client, unless it is there.

        Raises:
            QueueFullError: MAX_WAITING_FORMS other forms of the client are waiting.
        """
        forms = [other for other in self._forms.get(client_id, ()) if other.is_waiting]
        if form not in forms:
            if len(forms) >= MAX_WAITING_FORMS:
                raise QueueFullError(f"{len(forms)} forms of this client wait to be compiled, which is the limit")
            forms.append(form)
        self._forms[client_id] = forms
        if self._num_turns[client_id] < len(forms):
            self._num_turns[client_id] += 1
            self._turns.push(client_id, client_id, weight)

    def pop(self) -> Form | None:
        """Remove the next form and mark it as started; return None if no form is waiting."""
        while self._turns:
            client_id = self._turns.pop()
            self._num_turns[client_id] -= 1
            forms = [form for form in self._forms.pop(client_id, ()) if form.is_waiting]
            if len(forms) > 1:
                self._forms[client_id] = forms[1:]
            if not self._num_turns[client_id]:
                del self._num_turns[client_id]
            if forms:
                forms[0].is_started = True
                return forms[0]
        return None
